"""Training rows and held-out rows of a run: never the same, and the same again for the same seed."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from small_tokenizers import chat, plain

from snugtune.data.dataset import load_dataset, load_evaluation
from snugtune.errors import DataError
from snugtune.recipe import check


@pytest.fixture
def write(tmp_path):
    def _write(rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return _write


def _rows(count, *, start=0):
    return [{"prompt": f"q{n}", "completion": f" a{n}"} for n in range(start, start + count)]


def _load(data, *, tokenizer=None, seed=0, max_length=1024, **keys):
    recipe = check({"data": data, "what": {"seed": seed, "max_length": max_length}, **keys})
    return load_dataset(recipe, tokenizer or plain())


def _where(rows):
    return [row.where for row in rows]


# --- the split -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "eval_rows", "held_out"),
    [(100, "auto", 10), (2500, "auto", 200), (9, "auto", 0), (1, "auto", 0), (100, 0, 0), (100, 7, 7), (100, 99, 99)],
)
def test_a_part_of_the_rows_is_held_out_and_never_trained_on(write, rows, eval_rows, held_out):
    found = _load(write(_rows(rows)), eval_rows=eval_rows)
    assert len(found.held_out) == held_out and len(found.train) == rows - held_out
    everything = [f"rows.jsonl:{n}" for n in range(1, rows + 1)]
    parts = [_where(found.train), _where(found.held_out)]
    assert sorted(parts[0] + parts[1]) == sorted(everything), "a row is in both parts or in none"
    for part in map(set, parts):
        assert [where for where in everything if where in part] in parts, "the file's order is lost"


def test_the_split_is_a_function_of_the_seed(write):
    name = write(_rows(100))
    splits = [tuple(_where(_load(name, seed=seed, eval_rows=10).held_out)) for seed in (0, 1, 2, 0, 1, 2)]
    assert splits[:3] == splits[3:] and len(set(splits)) == 3


def test_rows_that_cannot_be_used_take_no_place_among_the_held_out(write):
    rows = _rows(50)
    rows[3]["completion"] = ""
    found = _load(write(rows), eval_rows=40)
    assert len(found.held_out) == 40 and len(found.train) == 9
    assert found.left_out.reasons == {"completion is empty": ["rows.jsonl:4"]}


@pytest.mark.parametrize("eval_rows", [3, 4])
def test_holding_out_every_row_is_refused(write, eval_rows):
    with pytest.raises(DataError, match=rf"eval_rows={eval_rows} would leave no row of .*rows\.jsonl \(3 rows\)"):
        _load(write(_rows(3)), eval_rows=eval_rows)


@pytest.mark.parametrize(("eval_rows", "held_out"), [("auto", 30), (0, 0), (5, 5), (500, 30)])
def test_held_out_rows_of_their_own_leave_the_training_rows_whole(write, eval_rows, held_out):
    found = _load(write(_rows(20)), eval_data=write(_rows(30), "eval.jsonl"), eval_rows=eval_rows)
    assert len(found.train) == 20 and len(found.held_out) == held_out
    assert all(row.where.startswith("eval.jsonl") for row in found.held_out)


def test_many_held_out_rows_are_drawn_by_the_seed(write):
    train, test = write(_rows(5)), write(_rows(300), "eval.jsonl")
    draws = [tuple(_where(_load(train, eval_data=test, seed=seed).held_out)) for seed in (0, 1, 0)]
    assert draws[0] == draws[2] != draws[1] and {len(draw) for draw in draws} == {200}


def test_rows_left_out_of_both_parts_are_reported_together(write):
    bad = {"prompt": "q", "completion": None}
    found = _load(write([*_rows(3), bad]), eval_data=write([bad, *_rows(3)], "eval.jsonl"))
    assert found.left_out.reasons == {"completion is null": ["rows.jsonl:4", "eval.jsonl:1"]}


def test_rows_cut_to_nothing_are_reported_and_the_others_train(write):
    rows = [*_rows(3), {"prompt": "z" * 200, "completion": " a"}]
    found = _load(write(rows), max_length=32, eval_rows=0)
    assert len(found.train) == 3
    assert found.left_out.reasons == {"no label token within max_length 32": ["rows.jsonl:4"]}


def test_only_held_out_rows_carry_choices(write):
    choices = [f" a{n}" for n in range(20)]
    found = _load(write([{**row, "choices": choices} for row in _rows(20)]), eval_rows=5)
    assert {row.choices for row in found.train} == {None}
    assert all(row.choices and len(row.choices) == 20 for row in found.held_out)


# --- what cannot be used ---------------------------------------------------------------------------------------------


def test_an_empty_file_is_refused_by_name(write):
    with pytest.raises(DataError, match=r"rows\.jsonl holds no rows; it is empty"):
        _load(write([]))


def test_an_empty_file_of_held_out_rows_is_refused_by_name(write):
    with pytest.raises(DataError, match=r"eval\.jsonl holds no rows"):
        _load(write(_rows(3)), eval_data=write([], "eval.jsonl"))


def test_a_file_without_a_usable_row_is_refused_with_the_reasons(write):
    rows = [{"prompt": "q", "completion": ""}, {"prompt": "q", "completion": None}, {"prompt": None, "completion": "a"}]
    with pytest.raises(DataError) as refused:
        _load(write(rows))
    message = str(refused.value)
    assert "no usable row among 3" in message
    assert "completion is empty: rows.jsonl:1" in message and "prompt is null: rows.jsonl:3" in message


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(DataError, match="there is no data at"):
        _load(str(tmp_path / "absent.jsonl"))


# --- packaged data and evaluation ------------------------------------------------------------------------------------


def test_the_demo_trains_on_its_training_part_and_is_scored_on_its_test_part():
    found = _load("demo")
    assert len(found.held_out) == 200 and not found.left_out.reasons
    assert all("train" in row.where for row in found.train) and all("test" in row.where for row in found.held_out)
    assert all(row.choices and len(row.choices) == 10 for row in found.held_out)
    assert {row.choices[row.answer][-1] for row in found.held_out if row.choices} == {plain().eos_token_id}


def test_banking77_trains_on_its_10003_rows():
    # Tokenising 77 answers for 200 rows takes seconds, and the demo's test has been through it.
    found = _load("banking77", eval_rows=2)
    assert len(found.train) == 10003
    assert all(row.choices and len(set(row.choices)) == 77 for row in found.held_out)


def test_a_model_is_evaluated_on_the_test_part():
    found = load_evaluation("demo", plain(), max_length=1024, most_rows=20)
    assert not found.train and len(found.held_out) == 20
    assert all("test" in row.where and row.choices for row in found.held_out)
    again = load_evaluation("demo", plain(), max_length=1024, most_rows=20)
    assert _where(again.held_out) == _where(found.held_out)


def test_a_file_is_evaluated_whole_in_its_order(write):
    found = load_evaluation(write(_rows(30)), plain(), max_length=1024)
    assert _where(found.held_out) == [f"rows.jsonl:{n}" for n in range(1, 31)]


def test_the_split_comes_before_tokens(write):
    """Which rows are held out must not depend on the model's tokenizer, else two models could not be compared."""
    name = write(_rows(60))
    assert _where(_load(name).held_out) == _where(_load(name, tokenizer=chat()).held_out)


def test_held_out_rows_that_are_cut_to_nothing_do_not_stop_the_run(write):
    rows = [*_rows(9), {"prompt": "z" * 200, "completion": " a"}]
    for seed in range(12):
        found = _load(write(rows), max_length=32, seed=seed, eval_rows=1)
        assert len(found.train) + len(found.held_out) == 9


def test_bad_rows_of_the_held_out_file_are_no_reason_not_to_train(write):
    bad = [{"prompt": "q", "completion": ""}] * 30
    found = _load(write(_rows(5)), eval_data=write([*_rows(10), *bad], "eval.jsonl"))
    assert len(found.train) == 5 and sum(found.left_out.counts.values()) == 30


def test_a_small_weight_leaves_a_row_at_least(write):
    assert len(_load({"path": write(_rows(20)), "weight": 0.01}, eval_rows=0).train) == 1


# --- several sources -------------------------------------------------------------------------------------------------


def test_several_sources_are_one_after_the_other_with_their_tasks(write):
    sources = [{"path": write(_rows(4), "a.jsonl"), "task": "x"}, write(_rows(3), "b.jsonl")]
    found = _load(sources, eval_rows=0)
    assert _where(found.train) == [f"a.jsonl:{n}" for n in range(1, 5)] + [f"b.jsonl:{n}" for n in range(1, 4)]
    assert found.train.tasks == ["x", None]


@pytest.mark.parametrize(("weight", "rows"), [(1, 10), (2, 20), (0.5, 5), (1.3, 13), (3.25, 32)])
def test_a_weight_says_how_often_rows_come(write, weight, rows):
    sources = [{"path": write(_rows(10), "a.jsonl"), "weight": weight}, {"path": write(_rows(4), "b.jsonl")}]
    found = _load(sources, eval_rows=0)
    counts = Counter(_where(found.train))
    assert sum(n for where, n in counts.items() if where[0] == "a") == rows
    assert all(n in (int(weight), int(weight) + 1) for where, n in counts.items() if where[0] == "a")
    assert [n for where, n in counts.items() if where[0] == "b"] == [1] * 4
    assert _where(_load(sources, eval_rows=0).train) == _where(found.train), "the draw is no function of the seed"


def test_held_out_rows_come_from_all_sources_and_never_come_twice(write):
    sources = [{"path": write(_rows(50), "a.jsonl"), "weight": 2}, {"path": write(_rows(50, start=50), "b.jsonl")}]
    found = _load(sources, eval_rows=40)
    held = _where(found.held_out)
    assert len(set(held)) == 40 and {where[0] for where in held} == {"a", "b"}
    assert not set(held) & set(_where(found.train))


def test_an_empty_source_among_others_is_named(write):
    with pytest.raises(DataError, match=r"b\.jsonl holds no rows"):
        _load([write(_rows(4), "a.jsonl"), write([], "b.jsonl")])


def test_files_of_one_name_are_told_apart(write, tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    labelled = [{"text": f"t{n}", "label": "ab"[n % 2]} for n in range(10)]
    sources = [
        write(labelled, "one/r.jsonl"),
        write([{**row, "text": f"u{n}"} for n, row in enumerate(labelled)], "two/r.jsonl"),
    ]
    found = _load(sources, eval_rows=12)
    assert all(row.choices and len(row.choices) == 2 for row in found.held_out)
    assert len({tuple(row.ids.tolist()) for row in found.held_out}) == 12


def test_columns_and_eval_data(write):
    source = {"path": write([{"q": "x", "a": "y"}] * 3), "columns": {"prompt": "q", "completion": "a"}}
    found = _load(source, eval_data=write([{"q": "z", "a": "y"}], "eval.jsonl"))
    assert len(found.train) == 3 and len(found.held_out) == 1


def test_records_of_no_known_format_stop_the_run_with_the_formats(write):
    with pytest.raises(
        DataError, match=r"(?s)its keys: q, a\).*A row needs one of: prompt \+ completion, messages.*data\.columns"
    ):
        _load(write([{"q": "x", "a": "y"}] * 3))
