"""The event log keeps what was written; a file is replaced whole or not at all; an error says the right name."""

from __future__ import annotations

import json
import os
import pathlib

import pytest

from snugtune import events
from snugtune.errors import DataError, DoesNotFit, InputError, ModelError, OutOfMemory, RecipeError, Stopped, nearest
from snugtune.events import EventLog, replace_text


def _lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def test_every_event_is_one_line_that_is_there_at_once(tmp_path):
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.write("step", number=1, loss=0.5)
    assert [(e["event"], e["number"], e["loss"]) for e in _lines(path)] == [("step", 1, 0.5)], "it was not flushed"
    log.write("end", message="two\nlines, ä and \u2028")
    log.close()
    assert _lines(path)[1]["message"] == "two\nlines, ä and \u2028"
    assert _lines(path)[0]["time"] <= _lines(path)[1]["time"]


def test_a_second_log_goes_on_where_the_first_ended(tmp_path):
    path = tmp_path / "events.jsonl"
    for number in range(2):
        log = EventLog(path)
        log.write("step", number=number)
        log.close()
    assert [e["number"] for e in _lines(path)] == [0, 1]


def test_half_a_surrogate_pair_does_not_break_the_log(tmp_path):
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.write("stopped", message=os.fsdecode(b"caf\xe9.jsonl"))
    log.close()
    assert _lines(path)[0]["message"] == os.fsdecode(b"caf\xe9.jsonl")


def test_a_closed_log_takes_nothing_more(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log.close()
    with pytest.raises(ValueError, match="closed"):
        log.write("late")


def test_a_tensor_like_fact_is_refused_and_leaves_the_log_whole(tmp_path):
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    with pytest.raises(TypeError):
        log.write("step", loss=object())
    log.write("step", loss=1.0)
    log.close()
    assert [e["loss"] for e in _lines(path)] == [1.0]


# --- replace_text ----------------------------------------------------------------------------------------------------


def test_a_file_is_written_and_replaced(tmp_path):
    path = tmp_path / "report.json"
    for text in ("first", "second ä\r\n\u2028"):
        replace_text(path, text)
        assert path.read_bytes().decode() == text
    assert list(tmp_path.iterdir()) == [path], "something was left beside the file"


def _fails(*_args, **_kwargs):
    raise OSError("no space left on device")


def _interrupted(*_args, **_kwargs):
    raise KeyboardInterrupt


@pytest.mark.parametrize("existed", [True, False])
@pytest.mark.parametrize(
    ("place", "name", "failure"),
    [
        (os, "fsync", _fails),
        (os, "fsync", _interrupted),
        (pathlib.Path, "replace", _fails),
        (pathlib.Path, "open", _fails),
    ],
)
def test_a_failure_in_the_middle_leaves_the_old_file_or_none(tmp_path, monkeypatch, existed, place, name, failure):
    path = tmp_path / "report.json"
    if existed:
        path.write_text("old")
    with monkeypatch.context() as patched:
        patched.setattr(place, name, failure)
        with pytest.raises((OSError, KeyboardInterrupt)):
            replace_text(path, "new" * 1000)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == ([("report.json", "old")] if existed else [])


def test_text_that_cannot_be_written_leaves_the_old_file(tmp_path):
    path = tmp_path / "report.json"
    replace_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        replace_text(path, "a" * 100_000 + "\ud800")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("report.json", "old")]


def test_the_text_is_on_disk_before_it_takes_the_name(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    order = []
    fsync, replace = os.fsync, pathlib.Path.replace
    monkeypatch.setattr(events.os, "fsync", lambda handle: (order.append("sync"), fsync(handle))[1])
    monkeypatch.setattr(pathlib.Path, "replace", lambda self, to: (order.append("rename"), replace(self, to))[1])
    replace_text(path, "new")
    assert order == ["sync", "rename", "sync"], "a power cut could leave an empty file, or lose the rename"


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "right", "message"),
    [
        ("bf61", ["fp32", "bf16", "fp16"], "; did you mean 'bf16'?"),
        ("q_porj", ["q_proj", "k_proj"], "; did you mean 'q_proj'?"),
        ("xyz", ["b", "a"], "; there are: a, b"), ("xyz", [], ""), ("seed", iter(["seed"]), "; did you mean 'seed'?"),
    ],
)  # fmt: skip
def test_the_nearest_right_name(wrong, right, message):
    assert nearest(wrong, right) == message


def test_exit_codes_are_the_contracts():
    codes = {
        kind: kind.exit_code
        for kind in (InputError, RecipeError, DataError, ModelError, DoesNotFit, OutOfMemory, Stopped)
    }
    assert list(codes.values()) == [2, 2, 2, 2, 3, 3, 4]
    assert DoesNotFit("no", smallest_bytes=5).smallest_bytes == 5
