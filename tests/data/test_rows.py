"""Records to rows: every format is recognised, and what cannot be used is left out with a reason and its line."""

from __future__ import annotations

import json

import pytest
from small_tokenizers import CHATML, DEFAULT_SYSTEM, REWRITES, STRICT, THINKS, chat, plain

from snugtune.data.chat import JOINED, MOVED
from snugtune.data.rows import LeftOut, Row, render
from snugtune.data.sources import Record
from snugtune.errors import DataError


def _render(*fields, tokenizer=None):
    left_out = LeftOut()
    records = [Record(f"f.jsonl:{n}", f) for n, f in enumerate(fields, 1)]
    return render(records, tokenizer or plain(), left_out), left_out


def _one(fields, tokenizer=None) -> Row:
    rows, left_out = _render(fields, tokenizer=tokenizer)
    assert len(rows) == 1, f"left out: {left_out.reasons}"
    return rows[0]


def _learnt(row: Row) -> list[str]:
    return [row.text[start:end] for start, end in row.label_spans]


def _turns(*turns: str) -> list[dict[str, str]]:
    """`u:hello` is a user's turn."""
    roles = {"u": "user", "a": "assistant", "s": "system"}
    return [{"role": roles[turn[0]], "content": turn[2:]} for turn in turns]


# --- formats ---------------------------------------------------------------------------------------------------------

CHAT_QA = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
CHAT_SYSTEM = "<|im_start|>system\ns<|im_end|>\n"
ASKED = {"from": "user", "value": "q"}


@pytest.mark.parametrize(
    ("fields", "text", "learnt"),
    [
        ({"prompt": "q", "completion": "a"}, "qa", ["a"]), ({"prompt": "", "completion": " a "}, " a ", [" a "]),
        ({"query": "q", "response": "a"}, "q\na", ["a"]), ({"question": "q", "answer": "a"}, "q\na", ["a"]),
        ({"instruction": "q", "output": "a"}, "q\na", ["a"]),
        ({"instruction": "q", "input": "", "output": "a"}, "q\na", ["a"]),
        ({"instruction": "q", "input": None, "output": "a"}, "q\na", ["a"]),
        ({"instruction": "q", "input": "x", "output": "a", "system": "s"}, "s\n\nq\n\nx\na", ["a"]),
        ({"text": "t", "label": "a"}, "t\nLabel: a", [" a"]), ({"text": "t", "category": "a"}, "t\nLabel: a", [" a"]),
        ({"text": "t", "intent": "a"}, "t\nLabel: a", [" a"]), ({"text": "t", "label": 3}, "t\nLabel: 3", [" 3"]),
        ({"text": " t\n", "id": 3}, " t\n", [" t\n"]),
        ({"prompt": "q", "completion": "a", "messages": [], "text": "t"}, "qa", ["a"]),
    ],
)  # fmt: skip
def test_each_format_without_a_template(fields, text, learnt):
    row = _one(fields)
    assert (row.text, _learnt(row), row.rendered) == (text, learnt, False)


@pytest.mark.parametrize(
    ("fields", "text", "learnt"),
    [
        ({"messages": _turns("u:q", "a:a")}, CHAT_QA, ["a<|im_end|>"]),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, CHAT_QA, ["a<|im_end|>"]),
        ({"conversations": [ASKED, {"from": "model", "value": "a"}]}, CHAT_QA, ["a<|im_end|>"]),
        ({"query": "q", "response": "a"}, CHAT_QA, ["a<|im_end|>"]),
        ({"question": "q", "answer": "a"}, CHAT_QA, ["a<|im_end|>"]),
        ({"instruction": "q", "output": "a"}, CHAT_QA, ["a<|im_end|>"]),
        ({"instruction": "q", "output": "a", "system": "s"}, CHAT_SYSTEM + CHAT_QA, ["a<|im_end|>"]),
    ],
)  # fmt: skip
def test_each_format_with_a_template(fields, text, learnt):
    row = _one(fields, chat())
    assert (row.text, _learnt(row), row.rendered) == (text, learnt, True)


def test_prompt_and_completion_are_joined_as_they_stand_even_with_a_template():
    row = _one({"prompt": "q ", "completion": "a"}, chat())
    assert (row.text, _learnt(row), row.rendered) == ("q a", ["a"], False)


@pytest.mark.parametrize("template", [CHATML, DEFAULT_SYSTEM])
def test_every_assistant_turn_is_learnt_with_its_end(template):
    turns = _turns("u:one?", "a:  One.\n", "u:two?", "a:Two.")
    row = _one({"messages": turns}, chat(template))
    assert _learnt(row) == ["  One.\n<|im_end|>", "Two.<|im_end|>"]


def test_a_template_that_trims_answers_and_ends_with_the_end_token():
    row = _one({"messages": _turns("u:one?", "a:  One.\n", "u:two?", "a:Two.")}, chat(STRICT))
    assert row.text == "<s>[INST] one? [/INST] One.</s>[INST] two? [/INST] Two.</s>"
    assert _learnt(row) == [" One.</s>", " Two.</s>"]


def test_an_answer_that_also_stands_in_the_prompt_is_found_at_its_own_place():
    row = _one({"messages": _turns("u:yes", "a:yes", "u:yes", "a:yes")}, chat())
    assert _learnt(row) == ["yes<|im_end|>"] * 2
    starts = [start for start, _ in row.label_spans]
    assert [row.text[start - 10 : start] for start in starts] == ["assistant\n"] * 2


# --- rows that cannot be used ----------------------------------------------------------------------------------------

NO_TURNS = "the conversation has no turns"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt": "q", "completion": ""}, "completion is empty"),
        ({"prompt": "q", "completion": " \n"}, "completion is empty"),
        ({"prompt": "q", "completion": None}, "completion is null"),
        ({"prompt": None, "completion": "a"}, "prompt is null"),
        ({"prompt": ["q"], "completion": "a"}, "prompt is a list, not text"),
        ({"prompt": "q", "completion": {"a": 1}}, "completion is a dict, not text"),
        ({"prompt": "q", "completion": "\ud83d"}, "completion holds half a surrogate pair"),
        ({"instruction": "", "output": "a"}, "instruction is empty"),
        ({"instruction": "q", "output": None}, "output is null"),
        ({"text": "t", "label": ""}, "label is empty"), ({"text": None}, "text is null"),
        ({"text": " "}, "text is empty"),
        ({"query": "q", "response": []}, "response is a list, not text"),
        ({"messages": []}, NO_TURNS), ({"messages": None}, NO_TURNS), ({"messages": "u:q"}, NO_TURNS),
        ({"conversations": {}}, NO_TURNS), ({"messages": ["q"]}, "a turn lacks role"),
        ({"messages": [{"role": "user"}]}, "a turn lacks content"),
        ({"conversations": _turns("u:q", "a:a")}, "a turn lacks from"),
        ({"messages": [{"role": None, "content": "q"}]}, "role is null"),
        ({"messages": [{"role": ["user"], "content": "q"}]}, "role is a list, not text"),
        ({"messages": [*_turns("u:q"), {"role": "assistant", "content": None}]}, "content is null"),
        ({"messages": [*_turns("u:q"), {"role": "assistant", "content": None, "tool_calls": [{}]}]}, "a tool call has no function name"),
        ({"messages": [*_turns("u:q"), {"role": "assistant", "content": "a", "loss": "no"}]}, "loss of a turn is neither true nor false"),
        ({"messages": [*_turns("u:q"), {"role": "assistant", "content": "a", "loss": False}]}, "the loss counts none of the assistant's turns"),
        ({"messages": _turns("u:q", "a:a"), "tools": "{"}, "tools is no JSON"),
        ({"messages": _turns("u:q", "a:a"), "tools": ["f"]}, "tools is no list of functions"),
        ({"messages": [{"role": "user", "content": None}, *_turns("a:a")]}, "content is null"),
        ({"messages": [{"role": "user", "content": [{}]}, *_turns("a:a")]}, "content is a list, not text"),
        ({"messages": _turns("u:q", "a: ")}, "content is empty"),
        ({"messages": _turns("u:q")}, "the conversation has no assistant turn"),
        ({"messages": _turns("a:a", "u:q", "a:a")}, "the conversation begins with an assistant turn"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("template", [CHATML, DEFAULT_SYSTEM, STRICT], ids=["chatml", "default_system", "strict"])
def test_a_bad_row_is_left_out_with_its_reason_and_line_and_the_others_stay(fields, reason, template):
    good = {"prompt": "q", "completion": "a"}
    rows, left_out = _render(good, fields, good, tokenizer=chat(template))
    assert left_out.reasons == {reason: ["f.jsonl:2"]}
    assert [row.where for row in rows] == ["f.jsonl:1", "f.jsonl:3"]


@pytest.mark.parametrize("value", [42, 3.5, True, 0, -1.5e300, 10**30])
def test_numbers_in_text_fields_become_their_json_text(value):
    assert _learnt(_one({"prompt": "q", "completion": value})) == [json.dumps(value)]
    assert _one({"messages": [{"role": "user", "content": value}, *_turns("a:a")]}, chat()).text.count(
        json.dumps(value)
    )


def test_an_empty_user_turn_and_an_empty_system_text_are_fine():
    assert _learnt(_one({"messages": _turns("s:", "u:", "a:a")}, chat())) == ["a<|im_end|>"]


def test_a_column_that_is_null_for_long_and_text_later_loads_in_any_order():
    fields = [{"instruction": "q", "output": "a", "system": None}] * 500 + [
        {"instruction": "q", "output": "a", "system": "s"}
    ]
    for order in (fields, fields[::-1]):
        rows, left_out = _render(*order, tokenizer=chat())
        assert len(rows) == 501 and not left_out.reasons
        assert sum("system\ns" in row.text for row in rows) == 1


def test_left_out_rows_are_counted_by_reason_and_the_first_are_named():
    bad = {"prompt": "q", "completion": ""}
    _, left_out = _render(*[bad] * 7, {"prompt": None, "completion": "a"})
    assert left_out.counts == {"completion is empty": 7, "prompt is null": 1}
    assert left_out.describe() == [
        "7 rows left out, completion is empty: " + ", ".join(f"f.jsonl:{n}" for n in range(1, 6)) + " and 2 more",
        "1 row left out, prompt is null: f.jsonl:8",
    ]


@pytest.mark.parametrize("fields", [{}, {"prompt": "q"}, {"a": 1, "b": 2}, {"Prompt": "q", "Completion": "a"}])
def test_a_record_of_no_known_format_is_left_out_with_its_keys(fields):
    rows, left_out = _render(fields, {"text": "t"})
    [(reason, where)] = left_out.reasons.items()
    assert len(rows) == 1 and where == ["f.jsonl:1"]
    assert reason == f"it is in no format that is known here (its keys: {', '.join(fields) or 'none'})"


@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_a_conversation_without_a_template_stops_the_run(key):
    with pytest.raises(DataError, match=r"f\.jsonl:1 is a conversation.*no chat template"):
        _render({key: _turns("u:q", "a:a")})


# --- templates -------------------------------------------------------------------------------------------------------


def test_what_a_template_refuses_in_every_form_is_left_out_with_its_words():
    turns = [*_turns("u:q", "a:a"), {"role": "tool", "content": "42"}, *_turns("a:a")]
    rows, left_out = _render({"messages": turns}, {"messages": _turns("u:q", "a:a")}, tokenizer=chat(STRICT))
    assert [row.where for row in rows] == ["f.jsonl:2"]
    assert left_out.reasons == {
        "the chat template refuses it (Conversation roles must alternate user/assistant)": ["f.jsonl:1"]
    }


def test_rows_that_the_rule_changed_are_named():
    turns = _turns("s:s", "u:q", "a:a")
    rows, left_out = _render({"messages": turns}, {"messages": _turns("u:q", "u:r", "a:a")}, tokenizer=chat(STRICT))
    assert [row.text for row in rows] == ["<s>[INST] s\n\nq [/INST] a</s>", "<s>[INST] q\n\nr [/INST] a</s>"]
    assert left_out.changed == {MOVED: ["f.jsonl:1"], JOINED: ["f.jsonl:2"]} and not left_out.reasons
    assert left_out.describe() == [
        "1 row used, but the system text was put in front of the user's turn: f.jsonl:1",
        "1 row used, but turns of the same role in a row were joined: f.jsonl:2",
    ]


def test_turns_say_themselves_whether_they_are_learnt():
    for key in ("loss", "train", "weight"):
        turns = _turns("u:q", "a:one", "u:q", "a:two")
        turns[1][key] = 0 if key == "weight" else False
        assert _learnt(_one({"messages": turns}, chat())) == ["two<|im_end|>"]


def test_sharegpt_names_and_its_own_system_text():
    said = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    row = _one({"conversations": said, "system": "s"}, chat())
    assert row.text == CHAT_SYSTEM + CHAT_QA and _learnt(row) == ["a<|im_end|>"]


def test_a_template_that_rewrites_earlier_turns_is_not_trained_on_by_guess():
    thought = _turns("u:q", "a:<think>x</think>a", "u:q", "a:<think>x</think>a")
    rows, left_out = _render({"messages": thought}, {"messages": thought[:2]}, tokenizer=chat(REWRITES))
    assert [_learnt(row) for row in rows] == [["<think>x</think>a<|im_end|>"]]
    [(reason, where)] = left_out.reasons.items()
    assert "rewrites earlier turns" in reason and where == ["f.jsonl:1"]


def test_a_template_that_writes_the_last_answer_in_another_way_learns_every_answer():
    row = _one({"messages": _turns("u:assistant", "a:yes", "u:yes", "a:yes")}, chat(THINKS))
    assert _learnt(row) == ["yes<|im_end|>", "<think>\n\n</think>\n\nyes<|im_end|>"]
    assert row.text.index("assistant\nyes") + 10 == row.label_spans[0][0]


# --- choices ---------------------------------------------------------------------------------------------------------


def test_choices_come_along_where_the_answer_is_one_of_them():
    assert _one({"prompt": "q", "completion": " b", "choices": [" a", " b"]}).choices == (" a", " b")
    assert _one({"prompt": "q", "completion": 2, "choices": [1, 2]}).choices == ("1", "2")
    assert _one({"text": "t", "label": "b", "choices": ["a", "b"]}).choices == (" a", " b")
    assert _one({"prompt": "q", "completion": "b", "choices": None}).choices is None


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        (["a", "c"], "'b' is not among the choices"), ("abc", "choices is not a list of texts"),
        ([], "'b' is not among the choices"),
        ({"b": 1}, "choices is not a list of texts"), (["b", None], "a choice is null"),
        (["b", ["c"]], "a choice is a list, not text"),
        (["b", "\ud83d"], "a choice holds half a surrogate pair"), (["b", ""], "a choice is empty"),
    ],
)  # fmt: skip
def test_wrong_choices_leave_the_row_out(choices, reason):
    rows, left_out = _render({"prompt": "q", "completion": "b", "choices": choices})
    assert (rows, left_out.reasons) == ([], {reason: ["f.jsonl:1"]})
