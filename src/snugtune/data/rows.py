"""Records to rows: recognise the format, check every row, say what the loss counts.

A row is text with the character spans that are learnt. Conversations are rendered with the model's chat template; plain
prompt and completion are joined as they stand. What cannot be used is left out with a reason and its line, before any
weight is loaded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase as Tokenizer

from snugtune.data import chat
from snugtune.data.sources import Record
from snugtune.errors import DataError

Span = chat.Span


@dataclass(frozen=True)
class Row:
    """One training record, rendered."""

    where: str
    text: str
    label_spans: tuple[Span, ...]
    """Character ranges of `text` whose tokens the loss counts."""
    rendered: bool
    """True: a chat template wrote the special tokens into `text`; False: the tokenizer adds its begin token, we the end."""
    choices: tuple[str, ...] | None = None
    """Every answer that the set knows, this row's among them; each could stand where the completion stands."""
    form: str = ""
    """Of KNOWN."""
    changed: str | None = None
    """What the rule of `chat` did to it."""


@dataclass
class LeftOut:
    """Rows that are not used, by reason, and those that are used in another form than they were written in; by file and line."""

    reasons: dict[str, list[str]] = field(default_factory=dict)
    changed: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, where: str) -> None:
        """Set one row aside."""
        self.reasons.setdefault(reason, []).append(where)

    def merge(self, other: LeftOut) -> None:
        """Take over what `other` holds."""
        for mine, theirs in ((self.reasons, other.reasons), (self.changed, other.changed)):
            for reason, places in theirs.items():
                mine.setdefault(reason, []).extend(places)

    @property
    def counts(self) -> dict[str, int]:
        """Reason -> number of rows."""
        return {reason: len(places) for reason, places in self.reasons.items()}

    def describe(self, most: int = 5) -> list[str]:
        """One line a reason, naming the first few rows."""
        told = [(f"left out, {reason}", places) for reason, places in self.reasons.items()]
        told += [(f"used, but {what}", places) for what, places in self.changed.items()]
        return [
            f"{len(places)} row{'s' * (len(places) != 1)} {what}: {', '.join(places[:most])}"
            + (f" and {len(places) - most} more" if len(places) > most else "")
            for what, places in told
        ]


class _Unusable(Exception):
    """This row cannot be used; the text says why."""


def render(records: Iterable[Record], tokenizer: Tokenizer, left_out: LeftOut) -> list[Row]:
    """Rows of every usable record of a whole set; the others go to `left_out`."""
    rows = render_each(records, tokenizer, left_out)
    known = {row.text[row.label_spans[0][0] :] for row in rows if row.choices == ()}
    return with_labels(rows, sorted(known) if 2 <= len(known) <= MOST_LABELS else None)


def render_each(records: Iterable[Record], tokenizer: Tokenizer, left_out: LeftOut) -> list[Row]:
    """Rows of every usable record, some of a set; one whose choices are () is to get the set's labels."""
    rows = []
    for record in records:
        try:
            row = _row(record, tokenizer)
        except _Unusable as reason:
            left_out.add(str(reason), record.where)
            continue
        rows.append(row)
        if row.changed:
            left_out.changed.setdefault(row.changed, []).append(row.where)
    return rows


def with_labels(rows: Iterable[Row], labels: Iterable[str] | None) -> list[Row]:
    """Rows of text + label get all labels of the set as their choices; None: it is free text, and there are none."""
    choices = tuple(labels) if labels is not None else None
    return [replace(row, choices=choices) if row.choices == () else row for row in rows]


_PAIRS = (("prompt", "completion"), ("query", "response"), ("question", "answer"))
_LABEL_COLUMNS = ("label", "category", "intent")
MOST_LABELS = 200
"""More different labels than these are taken for free text."""
UNKNOWN = "it is in no format that is known here"
KNOWN = (
    "prompt + completion, messages, instruction (+ input) + output, conversations, query + response, question + answer, "
    "text + label (or category, intent), text"
)


def _row(record: Record, tokenizer: Tokenizer) -> Row:
    fields = record.fields
    for given, wanted in _PAIRS:
        if given in fields and wanted in fields:
            prompt, answer = _text(fields, given, empty_is_fine=True), _text(fields, wanted)
            if given == "prompt":
                return _joined(record.where, "prompt + completion", prompt, answer, _choices(fields, answer))
            return _pair(record.where, f"{given} + {wanted}", prompt, answer, None, tokenizer)
    for form in ("messages", "conversations"):
        if form in fields:
            return _conversation(record.where, form, _turns(fields, form), fields.get("tools"), tokenizer)
    if "instruction" in fields and "output" in fields:
        prompt, extra = _text(fields, "instruction"), _text(fields, "input", empty_is_fine=True, default="")
        prompt = f"{prompt}\n\n{extra}" if extra else prompt
        system = _text(fields, "system", empty_is_fine=True, default="")
        return _pair(record.where, "instruction + output", prompt, _text(fields, "output"), system or None, tokenizer)
    for column in _LABEL_COLUMNS:
        if "text" in fields and column in fields:
            prompt = f"{_text(fields, 'text')}\nLabel:"
            label = _text(fields, column)
            named = _choices(fields, label)
            # None named: the set's own labels, once all of it is read.
            choices = () if named is None else tuple(f" {choice}" for choice in named)
            return _joined(record.where, f"text + {column}", prompt, f" {label}", choices)
    if "text" in fields:
        text = _text(fields, "text")
        return Row(record.where, text, ((0, len(text)),), rendered=False, form="text")
    raise _Unusable(f"{UNKNOWN} (its keys: {', '.join(fields) or 'none'})")


def _turns(fields: Mapping[str, Any], form: str) -> Any:
    """The turns of a conversation; ShareGPT's files keep the system text beside them."""
    turns, system = fields[form], fields.get("system")
    if isinstance(turns, str) and turns.lstrip().startswith("["):  # a column of a CSV file holds them as JSON
        turns = _json(fields, form)
    if isinstance(turns, list) and isinstance(system, str) and system.strip():
        role, text = ("from", "value") if form == "conversations" else ("role", "content")
        begins = isinstance(turns[0], dict) and turns[0].get(role) == "system" if turns else False
        return turns if begins else [{role: "system", text: system}, *turns]
    return turns


_MISSING = object()


def _text(fields: Mapping[str, Any], key: str, *, empty_is_fine: bool = False, default: Any = _MISSING) -> str:
    """A text field as written; a number or a truth value becomes its JSON text."""
    value = fields.get(key, default)
    if value is None and default is not _MISSING:
        value = default
    if value is None:
        raise _Unusable(f"{key} is null")
    if isinstance(value, float) and not math.isfinite(value):
        raise _Unusable(f"{key} is {value}, which is no number")
    if isinstance(value, bool | int | float):
        value = json.dumps(value)
    if not isinstance(value, str):
        raise _Unusable(f"{key} is a {type(value).__name__}, not text")
    if not value.strip() and not empty_is_fine:
        raise _Unusable(f"{key} is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise _Unusable(f"{key} holds half a surrogate pair") from None
    return value


def _choices(fields: Mapping[str, Any], answer: str) -> tuple[str, ...] | None:
    if fields.get("choices") is None:
        return None
    if not isinstance(fields["choices"], list):
        raise _Unusable("choices is not a list of texts")
    choices = tuple(_text({"a choice": choice}, "a choice") for choice in fields["choices"])
    if answer not in choices:
        raise _Unusable(f"{answer!r} is not among the choices")
    return choices


def _joined(where: str, form: str, prompt: str, answer: str, choices: tuple[str, ...] | None) -> Row:
    text = prompt + answer
    return Row(where, text, ((len(prompt), len(text)),), rendered=False, choices=choices, form=form)


def _pair(where: str, form: str, prompt: str, answer: str, system: str | None, tokenizer: Tokenizer) -> Row:
    """A question with its answer: a conversation where the model has a template, else two paragraphs."""
    if tokenizer.chat_template is None:
        return _joined(where, form, f"{system}\n\n{prompt}\n" if system else f"{prompt}\n", answer, None)
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return _conversation(where, form, messages, None, tokenizer)


_ROLES = {
    "human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant", "chatgpt": "assistant",
    "function_call": "assistant", "observation": "tool", "function_response": "tool",
}  # fmt: skip
_LOSS_KEYS = ("loss", "train", "weight")
"""Of a turn: whether the loss counts it. Only the assistant's are ever counted."""


def _conversation(where: str, form: str, turns: Any, tools: Any, tokenizer: Tokenizer) -> Row:
    if tokenizer.chat_template is None:
        raise DataError(f"{where} is a conversation, and the model's tokenizer has no chat template to render it with")
    if not isinstance(turns, list) or not turns:
        raise _Unusable("the conversation has no turns")
    keys = ("from", "value") if form == "conversations" else ("role", "content")
    messages = [_turn(turn, *keys) for turn in turns]
    learnt = [m for m in messages if m["role"] == "assistant" and m["loss"]]
    if not any(m["role"] == "assistant" for m in messages):
        raise _Unusable("the conversation has no assistant turn")
    if not learnt:
        raise _Unusable("the loss counts none of the assistant's turns")
    if messages[0]["role"] == "assistant":
        raise _Unusable("the conversation begins with an assistant turn")
    functions = _tools(tools)
    try:
        rendered = chat.render(tokenizer, messages, tools=functions)
        spans = chat.answer_spans(tokenizer, rendered, tools=functions, learnt=lambda message: message["loss"])
    except chat.Refused as reason:
        raise _Unusable(str(reason)) from None
    return Row(where, rendered.text, tuple(spans), rendered=True, form=form, changed=rendered.changed)


def _turn(turn: Any, role_key: str, text_key: str) -> chat.Message:
    if not isinstance(turn, dict) or role_key not in turn:
        raise _Unusable(f"a turn lacks {role_key}")
    written = _text(turn, role_key)
    role = _ROLES.get(written, written)
    message: chat.Message = {"role": role, "loss": role == "assistant" and _counts(turn)}
    calls = turn.get("tool_calls")
    if calls or written == "function_call":
        if not calls:
            calls = [_json(turn, text_key)]
        if not isinstance(calls, list):
            raise _Unusable("tool_calls is no list")
        try:
            message["tool_calls"] = [chat.tool_call(call) for call in calls]
        except chat.Refused as reason:
            raise _Unusable(str(reason)) from None
        # A turn that calls a tool need not say anything.
        said = "" if written == "function_call" else _text(turn, text_key, empty_is_fine=True, default="")
        return message | {"content": said} | _besides(turn)
    if text_key not in turn:
        raise _Unusable(f"a turn lacks {text_key}")
    message["content"] = _text(turn, text_key, empty_is_fine=role != "assistant")
    return message | _besides(turn)


def _besides(turn: Mapping[str, Any]) -> chat.Message:
    """What a template may write besides role and content."""
    return {key: turn[key] for key in ("name", "tool_call_id", *chat.REASONING) if isinstance(turn.get(key), str)}


def _counts(turn: Mapping[str, Any]) -> bool:
    for key in _LOSS_KEYS:
        if turn.get(key) is not None:
            if turn[key] not in (True, False):  # 1 and 0 are these as well
                raise _Unusable(f"{key} of a turn is neither true nor false")
            return bool(turn[key])
    return True


def _tools(tools: Any) -> list[Any] | None:
    """Descriptions of functions, or their JSON as text."""
    if isinstance(tools, str) and tools.strip():
        tools = _json({"tools": tools}, "tools")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise _Unusable("tools is no list of functions")
    return tools


def _json(fields: Mapping[str, Any], key: str) -> Any:
    try:
        return json.loads(fields.get(key, ""))
    except (TypeError, ValueError, RecursionError):
        raise _Unusable(f"{key} is no JSON") from None
