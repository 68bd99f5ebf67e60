"""A06 and A07: mixed kinds in a column, columns that are null for long, byte-order marks: rows are read as written."""

from __future__ import annotations

import csv
import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from snugtune.data.dataset import load_dataset
from snugtune.data.sources import read
from snugtune.recipe import check


def _load(path, **keys):
    return load_dataset(check({"data": str(path), "eval_rows": 0, **keys}), tiny.tokenizer())


def _ids(found):
    return [row.ids.tolist() for row in found.train]


def test_a06_an_answer_yes_and_then_42(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "w5 ", "completion": "w6"}\n{"prompt": "w5 ", "completion": 42}\n')
    assert len(_load(path).train) == 2


@settings(max_examples=40, deadline=None)
@given(values=st.lists(
    st.one_of(st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.none(), st.sampled_from(["yes", "n/a", ""]), st.just(["x"])),
    min_size=1, max_size=8,
))  # fmt: skip
def test_a06_every_row_is_used_or_named_in_whatever_order(tmp_path_factory, values):
    folder, good = tmp_path_factory.mktemp("a06"), {"prompt": "w5 ", "completion": "w6"}
    results = []
    for order in (values, values[::-1]):
        path = folder / "rows.jsonl"
        rows = [*({"prompt": "w5 ", "completion": value} for value in order), good]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        found = _load(path, most_left_out=1)
        assert len(found.train) + sum(found.left_out.counts.values()) == len(rows)
        results.append((sorted(map(str, _ids(found))), found.left_out.counts))
    assert results[0] == results[1], "the order of rows changed what is used"
    assert results[0][1].get("completion is null", 0) == values.count(None)


def test_a06_a_system_text_after_60000_rows_without(tmp_path):
    path = tmp_path / "rows.jsonl"
    row = {"instruction": "w5", "output": "w6", "system": None}
    path.write_text((json.dumps(row) + "\n") * 60_000 + json.dumps(row | {"system": "w9"}) + "\n")
    records = list(read(str(path)))
    assert len(records) == 60_001 and records[-1].fields["system"] == "w9"


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv"])
def test_a07_a_byte_order_mark_changes_nothing(tmp_path, kind):
    rows = [{"prompt": "w5 ", "completion": "w6"}, {"prompt": "w7 ", "completion": "NA"}]
    table = io.StringIO()
    writer = csv.DictWriter(table, ["prompt", "completion"])
    writer.writeheader()
    writer.writerows(rows)
    text = {"jsonl": "".join(json.dumps(r) + "\n" for r in rows), "json": json.dumps(rows), "csv": table.getvalue()}[
        kind
    ]
    found = []
    for mark in (b"", b"\xef\xbb\xbf"):
        path = tmp_path / f"{len(mark)}.{kind}"
        path.write_bytes(mark + text.encode())
        found.append([record.fields for record in read(str(path))])
    assert found[0] == found[1] == rows
