"""What inspect says of rows."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import plain

from snugtune.data import survey, tokens
from snugtune.recipe import DataSource, What

SENTENCES = [
    f"{who} {does} {what} {when}" for who in ("Anna", "The old man", "My cat", "Nobody", "A friend of hers")
    for does in ("found", "lost", "likes", "painted") for what in ("a coin", "the red house")
    for when in ("yesterday", "at noon", "last winter")
]  # fmt: skip


def _rows(folder, fields, *, max_length=512):
    path = folder / f"{len(list(folder.glob('*.jsonl')))}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in fields))
    return tokens.joined(
        [tokens.load(DataSource(path=str(path)), plain(), folder=folder / "kept")], max_length=max_length
    )


def _good(count=60):
    return [{"prompt": f"Tell me {n}.", "completion": f" {SENTENCES[n]}."} for n in range(count)]


def _said(rows):
    return {finding.what: list(finding.where) for finding in survey.findings(rows)}


def test_nothing_is_said_of_good_rows(tmp_path):
    assert _said(_rows(tmp_path, _good())) == {}


@pytest.mark.parametrize(("bad", "what"), [
    ({"prompt": " Tell me 3. ", "completion": " anna FOUND a coin  yesterday."}, "prompt of an earlier row"),
    ({"prompt": "Tell me 0.", "completion": " Anna found a coin yesterday."}, "same as an earlier row"),
    ({"prompt": "Tell me 0.", "completion": " Something else."}, "prompt of an earlier row"),
    ({"prompt": "Say.", "completion": " @@## %% ^^&& ** (( )) __ ++ {} || :; <> ,. ?/ ~` == -- [] \\" * 5}, "signs rather than words"),
    ({"prompt": "Say.", "completion": " ha ha ha" * 80}, "again and again"),
    ({"prompt": "Say.", "completion": "".join(f" {n} {s}" for n, s in enumerate(SENTENCES[:30]))}, "far more label tokens"),
    ({"prompt": "Say.", "completion": "".join(f" {n} {s}" for n, s in enumerate(SENTENCES * 2))}, "cut at max_length"),
])  # fmt: skip
def test_a_row_that_would_hurt_is_named(tmp_path, bad, what):
    rows = _rows(tmp_path, [*_good(), bad])
    named = [where for said, where in _said(rows).items() if what in said]
    assert named == [["0.jsonl:61"]], _said(rows)


def test_held_out_rows_that_are_trained_on_are_named(tmp_path):
    train = _rows(tmp_path, _good(20))
    held = [*_good(2), {"prompt": "Tell me 5.", "completion": " No."}, {"prompt": "New.", "completion": " No."}]
    leaks = survey.leaks(train, _rows(tmp_path, held))
    assert [leak.where for leak in leaks] == [("1.jsonl:1", "1.jsonl:2"), ("1.jsonl:3",)]


def test_losses_far_above_the_others_are_named_highest_first():
    names = [f"f:{n}" for n in range(50)]
    losses = [1 + 0.01 * n for n in range(50)]
    assert survey.high_losses(names, losses) == []
    losses[7], losses[9] = 9.0, 12.0
    (found,) = survey.high_losses(names, losses)
    assert found.where == ("f:9 (12.0)", "f:7 (9.0)")


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=60))
def test_the_histogram_counts_every_row_once(lengths):
    bins = survey.histogram(np.array(lengths))
    assert sum(rows for _, _, rows in bins) == len(lengths)
    for low, high, rows in bins:
        assert rows == sum(low <= n <= high for n in lengths)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 500), min_size=1, max_size=60))
def test_lengths_and_padding(lengths):
    found = survey.token_lengths(np.array(lengths))
    assert found["p50"] in lengths and found["max"] == max(lengths) and found["p50"] <= found["p95"] <= found["max"]
    shares = survey.padding(np.array(lengths), What(max_length=500))
    assert 0 <= shares["packing"] <= shares["dynamic"] <= shares["max_length"] + 1e-9 < 1


def test_the_share_of_padding_is_that_of_the_positions():
    shares = survey.padding(np.array([100, 200, 300, 400]), What(max_length=500))
    assert shares["dynamic"] == pytest.approx(1 - 1000 / 1600)
    assert shares["max_length"] == pytest.approx(0.5)
