"""A01 and A08: answers that are cut off, empty or absent: each row is named before anything is loaded; never NaN, never 0.0."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from snugtune.data.dataset import load_dataset
from snugtune.data.pack import collate
from snugtune.errors import DataError
from snugtune.recipe import check
from snugtune.step import Scorer


def _load(folder, rows, *, max_length=16, **keys):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = check({"data": str(path), "eval_rows": 0, "what": {"max_length": max_length}, **keys})
    return load_dataset(recipe, tiny.tokenizer())


def _row(prompt_tokens, answer_tokens):
    return {"prompt": "w5 " * prompt_tokens, "completion": "w6 " * answer_tokens}


def test_a01_a_prompt_of_40_tokens_is_named_and_left_out(tmp_path):
    found = _load(tmp_path, [_row(40, 1), _row(3, 1), _row(4, 1)])
    assert found.left_out.reasons == {"no label token within max_length 16": ["rows.jsonl:1"]}
    assert [row.where for row in found.train] == ["rows.jsonl:2", "rows.jsonl:3"]


def test_a01_where_every_row_is_like_that_the_length_is_said_that_would_do(tmp_path):
    with pytest.raises(DataError, match="the shortest of them needs max_length 31"):
        _load(tmp_path, [_row(40, 1), _row(30, 1), _row(35, 1)])


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), min_size=1, max_size=6))
def test_a01_rows_are_used_exactly_where_part_of_the_answer_is_left(tmp_path_factory, sizes):
    folder = tmp_path_factory.mktemp("a01")
    usable = [f"rows.jsonl:{n}" for n, (prompt, _) in enumerate(sizes, 1) if prompt < 16]
    if not usable:
        return
    found = _load(folder, [_row(*size) for size in sizes], most_left_out=1)
    assert [row.where for row in found.train] == usable
    with torch.no_grad():
        for row in found.train:
            loss = float(Scorer(tiny.pair("llama")[0]).loss(collate([row])))
            assert row.label_tokens > 0 and math.isfinite(loss) and loss > 0


BAD = {
    "completion is empty": {"prompt": "w5", "completion": ""}, "completion is null": {"prompt": "w5", "completion": None},
    "it is in no format that is known here (its keys: none)": {},
}  # fmt: skip


def test_a08_each_bad_row_is_named_with_its_reason_and_the_run_goes_on(tmp_path):
    found = _load(tmp_path, [_row(3, 1), *BAD.values(), {"prompt": "", "completion": "w6 w7"}, _row(3, 1), _row(2, 2)])
    assert found.left_out.reasons == {reason: [f"rows.jsonl:{n}"] for n, reason in enumerate(BAD, 2)}
    assert [row.where for row in found.train] == ["rows.jsonl:1", "rows.jsonl:5", "rows.jsonl:6", "rows.jsonl:7"]


def test_a08_past_the_stated_limit_the_run_is_refused_with_all_reasons(tmp_path):
    rows = [_row(3, 1), *BAD.values()]
    with pytest.raises(DataError, match=r"3 of 4 rows of .* cannot be used, and most_left_out is 0\.5") as refused:
        _load(tmp_path, rows)
    assert all(f"rows.jsonl:{n}" in str(refused.value) for n in (2, 3, 4))
    assert len(_load(tmp_path, rows, most_left_out=0.75).train) == 1
