"""Rows kept as tokens: the same whoever made them, read one at a time, and made anew when anything changes."""

from __future__ import annotations

import gzip
import json
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import DEFAULT_SYSTEM, chat, plain

from snugtune.data import tokens
from snugtune.data.encode import encode
from snugtune.data.rows import LeftOut, render
from snugtune.data.sources import read
from snugtune.errors import DataError, SnugtuneError
from snugtune.recipe import DataSource


def _write(folder, rows, name="rows.jsonl"):
    path = folder / name
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return str(path)


def _rows(count):
    return [{"question": f"What is {n} and {n}?", "answer": f"It is {2 * n}. " * (n % 5 + 1)} for n in range(count)]


def _load(path, folder, tokenizer=None, **source):
    return tokens.load(DataSource(path=path, **source), tokenizer or chat(), folder=folder)


def _same(file, rows):
    assert len(file) == len(rows)
    for index, expected in enumerate(rows):
        got = file.row(index, max_length=1 << 20)
        assert got.where == expected.where
        assert np.array_equal(got.ids, expected.ids) and np.array_equal(got.is_label, expected.is_label)
        assert file.facts.label_tokens[index] == expected.label_tokens
        assert file.facts.first_label[index] == np.flatnonzero(expected.is_label)[0]


@pytest.mark.parametrize("processes", [False, True], ids=["here", "processes"])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz"])
def test_rows_are_those_of_the_plain_way(tmp_path, monkeypatch, processes, name):
    if processes:
        monkeypatch.setattr(tokens.sources, "_SMALL_BYTES", 0)
        monkeypatch.setattr(tokens, "CHUNK_RECORDS", 7)
        monkeypatch.setattr(tokens.os, "sched_getaffinity", lambda _: {0, 1, 2})
    rows = [*_rows(40), {"question": "q", "answer": ""}, *_rows(3)]
    path, left_out = _write(tmp_path, rows, name), LeftOut()
    expected = encode(render(read(path), chat(), left_out), chat(), max_length=1 << 20, left_out=left_out)
    file = _load(path, tmp_path / "kept")
    _same(file, expected)
    assert file.told.left_out == left_out and file.told.forms == {"question + answer": 43}


def test_rows_are_kept_and_not_made_again(tmp_path, monkeypatch):
    path = _write(tmp_path, _rows(5))
    first = _load(path, tmp_path / "kept")
    monkeypatch.setattr(tokens, "_make", lambda *a: pytest.fail("made again"))
    again = _load(path, tmp_path / "kept")
    _same(again, [first.row(i, max_length=1 << 20) for i in range(5)])
    assert again.told == first.told


def test_whatever_decides_the_tokens_decides_the_name(tmp_path):
    path = _write(tmp_path, _rows(5))
    source = DataSource(path=path)
    names = {tokens._name(source, tokenizer, "train") for tokenizer in (chat(), plain(), chat(DEFAULT_SYSTEM))}
    names.add(tokens._name(source.model_copy(update={"columns": {"prompt": "question"}}), chat(), "train"))
    names.add(tokens._name(source.model_copy(update={"skip_broken_lines": True}), chat(), "train"))
    _write(tmp_path, _rows(6))
    names.add(tokens._name(source, chat(), "train"))
    assert len(names) == 6
    assert tokens._name(source, chat(), "train") in names


@pytest.mark.parametrize("damage", ["cut", "no facts", "cut facts", "other facts"])
def test_a_kept_file_that_is_not_whole_is_made_again(tmp_path, damage):
    path, kept = _write(tmp_path, _rows(5)), tmp_path / "kept"
    expected = [_load(path, kept).row(i, max_length=99) for i in range(5)]
    (data,), (facts,) = kept.glob("*.tokens"), kept.glob("*.npz")
    if damage == "cut":
        os.truncate(data, 8)
    elif damage == "no facts":
        facts.unlink()
    elif damage == "cut facts":
        os.truncate(facts, 100)
    else:
        np.savez(facts, told=np.zeros(3, np.uint8))
    _same(_load(path, kept), expected)


@pytest.mark.parametrize("error", [DataError("no template"), KeyboardInterrupt()])
def test_what_stops_a_process_stops_all_of_them(tmp_path, monkeypatch, error):
    """And nothing waits for what will never come."""
    monkeypatch.setattr(tokens.sources, "_SMALL_BYTES", 0)
    monkeypatch.setattr(tokens, "CHUNK_RECORDS", 1)
    monkeypatch.setattr(tokens.os, "sched_getaffinity", lambda _: {0, 1})

    def fails(records, tokenizer):
        raise error

    monkeypatch.setattr(tokens, "_chunk", fails)
    with pytest.raises(type(error)):
        _load(_write(tmp_path, _rows(50)), tmp_path / "kept")
    assert list((tmp_path / "kept").iterdir()) == [], "a half-written file is left"


def test_a_process_that_is_killed_is_a_message(tmp_path, monkeypatch):
    monkeypatch.setattr(tokens.sources, "_SMALL_BYTES", 0)
    monkeypatch.setattr(tokens.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(tokens, "_chunk", lambda *_: os.kill(os.getpid(), 9))
    with pytest.raises(SnugtuneError, match="ended from outside"):
        _load(_write(tmp_path, _rows(50)), tmp_path / "kept")


def test_where_nothing_can_be_kept_rows_are_there_all_the_same(tmp_path):
    path = _write(tmp_path, _rows(5))
    (tmp_path / "kept").write_text("a file and no folder")
    assert len(_load(path, tmp_path / "kept")) == 5


def test_files_that_were_not_used_for_longest_go(tmp_path, monkeypatch):
    kept = tmp_path / "kept"
    for number in range(4):
        _load(_write(tmp_path, _rows(5 + number)), kept)
        (newest,) = set(kept.glob("*.tokens")) - {p for p in kept.glob("*.tokens") if p.stat().st_mtime < 10**6}
        os.utime(newest, (number, number))
    monkeypatch.setattr(tokens, "CACHE_BYTES", 1)
    _load(_write(tmp_path, _rows(20)), kept)
    assert len(list(kept.glob("*.tokens"))) == 1 == len(list(kept.glob("*.npz")))


def test_a_broken_line_can_be_left_out(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n{oops\n{"text": "b"}\n')
    file = _load(str(path), tmp_path / "kept", skip_broken_lines=True)
    assert [file.where(i) for i in range(2)] == ["rows.jsonl:1", "rows.jsonl:3"]
    assert file.told.left_out.reasons == {"the line is no JSON": ["rows.jsonl:2"]}


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(0, 30), min_size=1, max_size=8), max_length=st.integers(2, 40))
def test_rows_are_cut_and_counted_as_the_plain_way_does(tmp_path_factory, lengths, max_length):
    folder = tmp_path_factory.mktemp("cut")
    path = _write(folder, [{"prompt": "x " * n, "completion": "y " * (n % 4 + 1)} for n in lengths])
    file = _load(path, folder / "kept", plain())
    rows = tokens.joined([file], max_length=max_length)
    whole = [file.row(i, max_length=1 << 20) for i in range(len(file))]
    assert rows.lengths.tolist() == [min(row.tokens, max_length) for row in whole]
    assert rows.label_lengths.tolist() == [int(row.is_label[:max_length].sum()) for row in whole]
    assert all(np.array_equal(rows[i].ids, row.ids[:max_length]) for i, row in enumerate(whole))


def test_several_files_stand_one_after_the_other(tmp_path):
    files = [_load(_write(tmp_path, _rows(n), f"{n}.jsonl"), tmp_path / "kept") for n in (3, 4)]
    rows = tokens.joined(files, max_length=99)
    assert [row.where for row in rows] == [f"3.jsonl:{n}" for n in (1, 2, 3)] + [f"4.jsonl:{n}" for n in (1, 2, 3, 4)]
    taken = rows.take(np.array([5, 0, 5]))
    assert [row.where for row in taken] == ["4.jsonl:3", "3.jsonl:1", "4.jsonl:3"]
    both = tokens.stacked([rows, taken])
    assert len(both) == 10 and both.where(9) == "4.jsonl:3"


@pytest.mark.parametrize(("text", "flags"), [
    ("The quick brown fox jumps over the lazy dog and runs through a wide field. " * 2 + "Then it sleeps, and nobody knows where it went at night.", 0),
    ("%$#@!^&*()_+{}|:<>?~`-=[];',./" * 30 + "x", tokens.SALAD | tokens.REPEATED),
    ("again and again " * 60, tokens.REPEATED),
    ("那只敏捷的棕色狐狸跳过了懒狗然后跑过一片宽阔的田野最后在一棵老橡树下睡着了。" * 20, tokens.REPEATED),
    ("short!!!???", 0),
])  # fmt: skip
def test_texts_that_are_no_language_are_flagged(text, flags):
    assert tokens._flags(text) == flags
