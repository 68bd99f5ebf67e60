"""Records to rows: recognise the format, check every row, say what the loss counts.

A row is text with the character spans that are learnt. Conversations are rendered with the model's chat template; plain
prompt and completion are joined as they stand. What cannot be used is left out with a reason and its line, before any
weight is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase as Tokenizer

from snugtune.data.sources import Record
from snugtune.errors import DataError

Span = tuple[int, int]


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


@dataclass
class LeftOut:
    """Rows that are not used, by reason, each by file and line."""

    reasons: dict[str, list[str]] = field(default_factory=dict)

    def add(self, reason: str, where: str) -> None:
        """Set one row aside."""
        self.reasons.setdefault(reason, []).append(where)

    @property
    def counts(self) -> dict[str, int]:
        """Reason -> number of rows."""
        return {reason: len(places) for reason, places in self.reasons.items()}

    def describe(self, most: int = 5) -> list[str]:
        """One line a reason, naming the first few rows."""
        return [
            f"{len(places)} row{'s' * (len(places) != 1)} left out, {reason}: {', '.join(places[:most])}"
            + (f" and {len(places) - most} more" if len(places) > most else "")
            for reason, places in self.reasons.items()
        ]


class _Unusable(Exception):
    """This row cannot be used; the text says why."""


def render(records: Iterable[Record], tokenizer: Tokenizer, left_out: LeftOut) -> list[Row]:
    """Rows of every usable record; the others go to `left_out`.

    Raises:
        DataError: where a record is in no known format at all (the file is not what the user thinks it is).
    """
    rows = []
    for record in records:
        try:
            rows.append(_row(record, tokenizer))
        except _Unusable as reason:
            left_out.add(str(reason), record.where)
    return _with_known_labels(rows)


def _with_known_labels(rows: list[Row]) -> list[Row]:
    """Rows of text + label get all labels of the set as their choices, where it is a set of labels and not free text."""
    known = {row.text[row.label_spans[0][0] :] for row in rows if row.choices == ()}
    few = 2 <= len(known) <= _MOST_LABELS
    choices = tuple(sorted(known)) if few else None
    return [replace(row, choices=choices) if row.choices == () else row for row in rows]


_PAIRS = (("prompt", "completion"), ("query", "response"), ("question", "answer"))
_LABEL_COLUMNS = ("label", "category", "intent")
_MOST_LABELS = 200
"""More different labels than these are taken for free text."""
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
                return _joined(record.where, prompt, answer, _choices(fields, answer))
            return _pair(record.where, prompt, answer, None, tokenizer)
    if "messages" in fields:
        return _conversation(record.where, fields["messages"], ("role", "content"), tokenizer)
    if "conversations" in fields:
        return _conversation(record.where, fields["conversations"], ("from", "value"), tokenizer)
    if "instruction" in fields and "output" in fields:
        prompt, extra = _text(fields, "instruction"), _text(fields, "input", empty_is_fine=True, default="")
        prompt = f"{prompt}\n\n{extra}" if extra else prompt
        system = _text(fields, "system", empty_is_fine=True, default="")
        return _pair(record.where, prompt, _text(fields, "output"), system or None, tokenizer)
    for column in _LABEL_COLUMNS:
        if "text" in fields and column in fields:
            prompt = f"{_text(fields, 'text')}\nLabel:"
            label = _text(fields, column)
            named = _choices(fields, label)
            # None named: the set's own labels, once all of it is read.
            choices = () if named is None else tuple(f" {choice}" for choice in named)
            return _joined(record.where, prompt, f" {label}", choices)
    if "text" in fields:
        text = _text(fields, "text")
        return Row(record.where, text, ((0, len(text)),), rendered=False)
    raise DataError(f"{record.where} has the keys {', '.join(fields) or '(none)'}; a row needs one of: {KNOWN}")


_MISSING = object()


def _text(fields: Mapping[str, Any], key: str, *, empty_is_fine: bool = False, default: Any = _MISSING) -> str:
    """A text field as written; a number or a truth value becomes its JSON text."""
    value = fields.get(key, default)
    if value is None and default is not _MISSING:
        value = default
    if value is None:
        raise _Unusable(f"{key} is null")
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


def _joined(where: str, prompt: str, answer: str, choices: tuple[str, ...] | None) -> Row:
    text = prompt + answer
    return Row(where, text, ((len(prompt), len(text)),), rendered=False, choices=choices)


def _pair(where: str, prompt: str, answer: str, system: str | None, tokenizer: Tokenizer) -> Row:
    """A question with its answer: a conversation where the model has a template, else two paragraphs."""
    if tokenizer.chat_template is None:
        return _joined(where, f"{system}\n\n{prompt}\n" if system else f"{prompt}\n", answer, None)
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    return _conversation(where, messages, ("role", "content"), tokenizer)


_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}


def _conversation(where: str, turns: Any, keys: tuple[str, str], tokenizer: Tokenizer) -> Row:
    if tokenizer.chat_template is None:
        raise DataError(f"{where} is a conversation, and the model's tokenizer has no chat template to render it with")
    if not isinstance(turns, list) or not turns:
        raise _Unusable("the conversation has no turns")
    messages = []
    for turn in turns:
        if not isinstance(turn, dict) or keys[0] not in turn or keys[1] not in turn:
            raise _Unusable(f"a turn lacks {keys[0]} or {keys[1]}")
        role = _text(turn, keys[0])
        role = _ROLES.get(role, role)
        messages.append({"role": role, "content": _text(turn, keys[1], empty_is_fine=role != "assistant")})
    if not any(m["role"] == "assistant" for m in messages):
        raise _Unusable("the conversation has no assistant turn")
    if messages[0]["role"] == "assistant":
        raise _Unusable("the conversation begins with an assistant turn")
    try:
        return _rendered(where, messages, tokenizer)
    except TemplateError as error:
        raise _Unusable(f"the chat template refuses it ({error})") from None


def _rendered(where: str, messages: list[dict[str, str]], tokenizer: Tokenizer) -> Row:
    """Spans are found by rendering the prefix with and without each turn, so that no generation marker is needed."""
    text = _template(tokenizer, messages)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _template(tokenizer, messages[:index], add_generation_prompt=True)
        through = _template(tokenizer, messages[: index + 1])
        if not (through.startswith(before) and text.startswith(through)):
            raise _Unusable("the chat template rewrites earlier turns, so that an answer's place cannot be told")
        spans.append((len(before), len(through.rstrip())))  # white space after the end marker is nobody's answer
    return Row(where, text, tuple(spans), rendered=True)


def _template(tokenizer: Tokenizer, messages: list[dict[str, str]], *, add_generation_prompt: bool = False) -> str:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    assert isinstance(text, str)
    return text
