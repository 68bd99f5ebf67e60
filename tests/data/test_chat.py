"""Conversations by the template, whatever it refuses: nothing is lost, and what is learnt is the answers and nothing else."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import CHATML, DEFAULT_SYSTEM, STRICT, THINKS, TOOLS, chat

from snugtune.data import chat as chats
from snugtune.data.rows import LeftOut, render
from snugtune.data.sources import Record

WORDS = st.text("abc <>|\n/", min_size=1, max_size=12).map(str.strip).filter(bool)
TURNS = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), WORDS), min_size=1, max_size=6)


def _messages(turns, *, loss=True):
    return [{"role": role, "content": text, "loss": loss and role == "assistant"} for role, text in turns]


@settings(max_examples=150, deadline=None)
@given(turns=TURNS, template=st.sampled_from([CHATML, DEFAULT_SYSTEM, STRICT, THINKS]))
def test_whatever_is_rendered_says_every_turn_in_order(turns, template):
    try:
        rendered = chats.render(chat(template), _messages(turns))
    except chats.Refused:
        assert turns[0][0] == "assistant" or template == STRICT
        return
    place = 0
    for _, text in turns:
        place = rendered.text.index(text, place) + len(text)
    if template != STRICT:
        assert rendered.changed is None, "a form that the template takes was changed"


@settings(max_examples=150, deadline=None)
@given(turns=TURNS, template=st.sampled_from([CHATML, DEFAULT_SYSTEM, THINKS]))
def test_what_is_learnt_is_the_answers_with_their_ends(turns, template):
    turns = [("user", "q"), *turns, ("assistant", "z")]
    messages = [{"role": role, "content": text} for role, text in turns]
    rows = render([Record("f:1", {"messages": messages})], chat(template), LeftOut())
    learnt = [row.text[a:b].removeprefix("<think>\n\n</think>\n\n") for row in rows for a, b in row.label_spans]
    assert learnt == [f"{text}<|im_end|>" for role, text in turns if role == "assistant"]


@settings(max_examples=100, deadline=None)
@given(turns=TURNS)
def test_a_strict_template_gets_turns_that_alternate(turns):
    """Only a chat whose first turn that is no system text is the assistant's has no such form."""
    if turns[0][0] == "assistant":
        with pytest.raises(chats.Refused, match="roles must alternate"):
            chats.render(chat(STRICT), _messages(turns))
        return
    roles = [message["role"] for message in chats.render(chat(STRICT), _messages(turns)).messages]
    assert [role == "user" for role in roles] == [i % 2 == 0 for i in range(len(roles))]


def test_the_mildest_form_is_taken():
    messages = _messages([("user", "a"), ("user", "b"), ("assistant", "c")])
    assert chats.render(chat(STRICT), messages).changed == chats.JOINED
    assert chats.render(chat(CHATML), messages).changed is None
    messages = _messages([("system", "s"), ("user", "a"), ("assistant", "c")])
    assert chats.render(chat(STRICT), messages).changed == chats.MOVED


def test_turns_of_which_one_is_learnt_are_not_joined():
    messages = _messages([("user", "a"), ("assistant", "b"), ("assistant", "c")])
    messages[1]["loss"] = False
    with pytest.raises(chats.Refused):
        chats.render(chat(STRICT), messages)


# --- functions -------------------------------------------------------------------------------------------------------

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}


def _called(**more):
    return {"messages": [
        {"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "rain"}, {"role": "assistant", "content": "It rains."},
    ], **more}  # fmt: skip


def _render(fields, template):
    left_out = LeftOut()
    return render([Record("f:1", fields)], chat(template), left_out), left_out.reasons


@pytest.mark.parametrize("tools", [[WEATHER], json.dumps([WEATHER])], ids=["list", "text"])
def test_calls_of_functions_are_learnt_with_their_arguments_as_an_object(tools):
    (row,), _ = _render(_called(tools=tools), TOOLS)
    call, answer = (row.text[a:b] for a, b in row.label_spans)
    assert call == '<tool_call>{"name": "weather", "arguments": {"city": "Bern"}}</tool_call><|im_end|>'
    assert answer == "It rains.<|im_end|>" and "<|im_start|>tools" in row.text


def test_a_template_without_functions_leaves_the_row_out():
    assert _render(_called(), CHATML) == ([], {"the chat template writes no tool calls": ["f:1"]})
    plain = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "tools": [WEATHER]}
    assert _render(plain, CHATML) == ([], {"the chat template writes no tools": ["f:1"]})


TEXT_ARGUMENTS = TOOLS.replace(
    "call['function'] | tojson", "call['function']['name'] + ' ' + call['function']['arguments']"
)


def test_a_template_that_wants_arguments_as_text_gets_them_so():
    (row,), _ = _render(_called(tools=[WEATHER]), TEXT_ARGUMENTS)
    assert 'weather {"city": "Bern"}' in row.text


@pytest.mark.parametrize("fields", [
    {"tools": [{"function": "weather"}]}, {"tools": [WEATHER, {}]}, {"tools": [{"name": 3}]},
])  # fmt: skip
def test_odd_tools_end_in_a_row_or_a_reason(fields):
    plain = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], **fields}
    rows, reasons = _render(plain, TOOLS)
    assert len(rows) + len(reasons) == 1


PHI = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)


def test_a_template_that_ends_a_chat_with_a_token_of_its_own_learns_every_answer():
    said = [("user", "q"), ("assistant", "yes"), ("user", "yes"), ("assistant", "yes")]
    (row,), _ = _render({"messages": [{"role": r, "content": c} for r, c in said]}, PHI)
    assert [row.text[a:b] for a, b in row.label_spans] == ["yes<|im_end|>", "yes<|im_end|>\n<|im_end|>"]


ESCAPES = TOOLS.replace(
    "+ message['content'] }}", "+ (message['content'] | tojson if message['role'] == 'tool' else message['content']) }}"
)


def test_an_answer_of_a_tool_that_the_template_escapes_is_not_taken_for_dropped():
    fields = _called(tools=[WEATHER])
    fields["messages"][2]["content"] = '{"temp": "20°"}\n'
    rows, reasons = _render(fields, ESCAPES)
    assert len(rows) == 1, reasons


def test_a_template_that_refuses_a_prefix_alone_leaves_the_row_out_by_name():
    needs_user = "{% if not messages | selectattr('role', 'equalto', 'user') | list %}{{ raise_exception('no user') }}{% endif %}"
    said = [("system", "s"), ("assistant", "a"), ("user", "q"), ("assistant", "b")]
    rows, reasons = _render({"messages": [{"role": r, "content": c} for r, c in said]}, needs_user + CHATML)
    assert rows == [] and list(reasons) == ["the chat template refuses it (no user)"]


def test_thoughts_are_written_or_the_row_is_left_out():
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "42", "reasoning_content": "six times seven"},
    ]
    rows, reasons = _render({"messages": turns}, CHATML)
    assert rows == [] and list(reasons) == ["the chat template drops what a turn of assistant says"]
    thinks = CHATML.replace(
        "+ message['content']", "+ '<think>' + (message['reasoning_content'] or '') + '</think>' + message['content']"
    )
    (row,), _ = _render({"messages": turns}, thinks)
    assert [row.text[a:b] for a, b in row.label_spans] == ["<think>six times seven</think>42<|im_end|>"]


def test_sharegpt_names_of_calls_and_answers():
    said = [
        ("human", "q"),
        ("function_call", '{"name": "weather", "arguments": {}}'),
        ("observation", "rain"),
        ("gpt", "wet"),
    ]
    (row,), _ = _render({"conversations": [{"from": who, "value": text} for who, text in said]}, TOOLS)
    assert [row.text[a:b] for a, b in row.label_spans] == [
        '<tool_call>{"name": "weather", "arguments": {}}</tool_call><|im_end|>',
        "wet<|im_end|>",
    ]
    assert "<|im_start|>tool\nrain" in row.text
