"""A conversation as the model's own template writes it, by one rule wherever a chat is rendered.

A chat is rendered as it stands. Where the template refuses it, or drops what one of its turns says, the mildest of these
forms that the template writes whole is taken:

    1. Turns of the same role in a row are joined by a blank line.
    2. Besides, system texts stand in front of the next user turn (one of their own where none follows).

What is refused even so cannot be rendered: training leaves the row out, a server answers 400.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase as Tokenizer

Message = dict[str, Any]
Span = tuple[int, int]

JOINED = "turns of the same role in a row were joined"
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Where a turn holds what was thought before it was said."""
MOVED = "the system text was put in front of the user's turn"


class Refused(Exception):
    """No form of this chat is one that the template writes whole; the text says why."""


@dataclass(frozen=True)
class Chat:
    """A rendered conversation."""

    text: str
    messages: tuple[Message, ...]
    """In the form that was rendered."""
    changed: str | None = None
    """JOINED or MOVED, where it is not the form that it was written in."""


def render(
    tokenizer: Tokenizer, messages: Sequence[Message], *, tools: Sequence[Any] | None = None, answer: bool = False
) -> Chat:
    """The text of `messages` by the rule above.

    Args:
        tokenizer: with a chat template.
        messages: role and content of each turn (text), and tool_calls where a turn makes some.
        tools: descriptions of functions, as JSON schemas.
        answer: end with what the template writes before an answer.

    Raises:
        Refused: where there is no such text.
    """
    first: Refused | None = None
    for form, changed in ((_as_written, None), (_joined, JOINED), (_moved, MOVED)):
        formed = form(messages)
        if changed and formed == list(messages):
            continue
        try:
            text = template(tokenizer, formed, tools=tools, answer=answer)
            _check_whole(text, formed, tools)
        except Refused as error:
            first = first or error
            continue
        return Chat(text, tuple(formed), changed)
    assert first is not None
    raise first from None


def answer_spans(
    tokenizer: Tokenizer, chat: Chat, *, tools: Sequence[Any] | None, learnt: Callable[[Message], bool]
) -> list[Span]:
    """Character ranges of the assistant's turns in `chat.text`, end marker included, found without generation markers.

    Each is where the text with the turn goes on from the text before it. Templates that write earlier turns in another way
    than the last one (Qwen 3 and its thoughts, Phi 3 and its last token) break that; there the answer is what changes when
    something else is said.

    Raises:
        Refused: where an answer's place cannot be told.
    """
    messages, text = list(chat.messages), chat.text
    spans: list[Span] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or not learnt(message):
            continue
        before = template(tokenizer, messages[:index], tools=tools, answer=True)
        last = index == len(messages) - 1
        through = text if last else template(tokenizer, messages[: index + 1], tools=tools)
        if through.startswith(before) and text.startswith(through):
            spans.append((len(before), len(through.rstrip())))  # white space after the end marker is nobody's answer
        else:
            spans.append(_what_changes(tokenizer, chat, index, before, tools))
    return spans


def template(
    tokenizer: Tokenizer, messages: Sequence[Message], *, tools: Sequence[Any] | None = None, answer: bool = False
) -> str:
    """What the template alone makes of it. Raises Refused where it makes nothing."""
    plain = [{key: value for key, value in message.items() if key != "loss"} for message in messages]
    try:
        return _apply(tokenizer, plain, tools, answer)
    except Refused as refused:
        if not any("tool_calls" in message for message in plain):
            raise
        try:  # some templates want arguments as JSON text
            return _apply(tokenizer, [_with_text_arguments(message) for message in plain], tools, answer)
        except Refused:
            raise refused from None


def _apply(tokenizer: Tokenizer, messages: list[Message], tools: Sequence[Any] | None, answer: bool) -> str:  # noqa: FBT001
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=answer)  # type: ignore[arg-type]
    except _FAILS as error:
        raise Refused(f"the chat template refuses it ({error})") from None
    assert isinstance(text, str)
    return text


_FAILS = (TemplateError, TypeError, ValueError, AttributeError, KeyError, IndexError)
"""A template is a program, and fails like one where a row is not what it expects."""


def _with_text_arguments(message: Message) -> Message:
    calls = [
        call | {"function": call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls") or ()
    ]
    return message | ({"tool_calls": calls} if calls else {})


_MARK = "something that nobody says"


def _what_changes(tokenizer: Tokenizer, chat: Chat, index: int, before: str, tools: Sequence[Any] | None) -> Span:
    """The part of the text that another answer in this turn changes, and what the template ends a turn with."""
    messages, text = list(chat.messages), chat.text
    other = messages[index] | {"content": _MARK}
    lead, found, rest = template(tokenizer, [*messages[:index], other, *messages[index + 1 :]], tools=tools).partition(
        _MARK
    )
    if not found or not text.startswith(lead) or not text.endswith(rest) or len(lead) + len(rest) > len(text):
        raise Refused("the chat template rewrites earlier turns, so that an answer's place cannot be told")
    end = len(text) - len(rest)
    if text[len(lead) : end].strip() != messages[index]["content"].strip():
        raise Refused("the chat template rewrites earlier turns, so that an answer's place cannot be told")
    closing = template(tokenizer, [*messages[:index], other], tools=tools).rpartition(_MARK)[2]
    start = len(before) if lead.startswith(before) else len(lead)
    return start, end + len(_common(tokenizer, rest, closing).rstrip())


def _common(tokenizer: Tokenizer, one: str, other: str) -> str:
    """What both begin with, in whole tokens."""
    first, second = (tokenizer.backend_tokenizer.encode(text, add_special_tokens=False) for text in (one, other))
    end = 0
    for a, b, (_, stop) in zip(first.ids, second.ids, first.offsets, strict=False):
        if a != b:
            break
        end = stop
    return one[:end]


def _check_whole(text: str, messages: Sequence[Message], tools: Sequence[Any] | None) -> None:
    """Templates drop what they do not know without a word."""
    for message in messages:
        if any(key in message and not _says(text, message[key]) for key in ("content", *REASONING)):
            raise Refused(f"the chat template drops what a turn of {message['role']} says")
        for call in message.get("tool_calls") or ():
            if call["function"]["name"] not in text:
                raise Refused("the chat template writes no tool calls")
    for tool in tools or ():
        inner = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = inner.get("name") if isinstance(inner, Mapping) else None
        if isinstance(name, str) and name not in text:
            raise Refused("the chat template writes no tools")


def _says(text: str, said: str) -> bool:
    """Whether `text` holds it: trimmed, with other white space in it, or written as JSON."""
    if said.strip() in text:
        return True
    forms = (said, json.dumps(said)[1:-1], json.dumps(said, ensure_ascii=False)[1:-1])
    squeezed = "".join(text.split())
    return any("".join(form.split()) in squeezed for form in forms)


def _as_written(messages: Sequence[Message]) -> list[Message]:
    return list(messages)


def _joined(messages: Sequence[Message]) -> list[Message]:
    done: list[Message] = []
    for message in messages:
        if done and _join(done[-1], message):
            texts = [done[-1]["content"], message["content"]]
            done[-1] = message | {"content": "\n\n".join(filter(None, texts))}
        else:
            done.append(message)
    return done


def _join(one: Message, other: Message) -> bool:
    """Whether two neighbours become one turn. Calls and answers of tools stay apart, and so do turns of which one is learnt."""
    plain = {"role", "content", "loss"}
    return (
        one["role"] == other["role"] != "tool"
        and {*one, *other} <= plain
        and bool(one.get("loss")) == bool(other.get("loss"))
    )


def _moved(messages: Sequence[Message]) -> list[Message]:
    done: list[Message] = []
    waiting: list[str] = []
    for message in messages:
        if message["role"] == "system":
            waiting.append(message["content"])
            continue
        if waiting:
            texts = filter(None, waiting)
            if message["role"] == "user":
                message = message | {"content": "\n\n".join([*texts, message["content"]])}
            else:
                done.append({"role": "user", "content": "\n\n".join(texts)})
            waiting = []
        done.append(message)
    if waiting:
        done.append({"role": "user", "content": "\n\n".join(filter(None, waiting))})
    return _joined(done)


def tool_call(call: Any) -> Message:
    """A call of a function as templates expect it: its arguments as an object, and not as JSON text.

    Raises:
        Refused: where it has no name.
    """
    inner = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
        raise Refused("a tool call has no function name")
    arguments = inner.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise Refused("a tool call's arguments are no JSON") from None
    kept = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {"type": "function", "function": {"name": inner["name"], "arguments": arguments}} | kept
