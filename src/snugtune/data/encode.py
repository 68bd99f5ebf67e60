"""Rows to tokens with their labels, by character offsets of one joint tokenisation.

Prompt and answer are tokenised together, as the model will see them, and a token is a label when it reaches into an
answer's characters. Padding never enters, and the end token of every answer is a label of its own, told by position and
not by its id: a pad token equal to the end token cannot hide it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase as Tokenizer

from snugtune.data.rows import LeftOut, Row
from snugtune.errors import DataError

_BATCH_ROWS = 1000


@dataclass(frozen=True)
class EncodedRow:
    """Token ids [L] and which of them the loss counts [L]; the first token is never one, since nothing predicts it."""

    where: str
    ids: np.ndarray
    is_label: np.ndarray
    choices: tuple[tuple[int, ...], ...] | None = None
    """The whole row's tokens for every answer that the set knows."""
    answer: int = 0
    """Which of `choices` is right."""

    @property
    def tokens(self) -> int:
        """Length in tokens."""
        return len(self.ids)

    @property
    def label_tokens(self) -> int:
        """Tokens that the loss counts."""
        return int(self.is_label.sum())


def encode(
    rows: Sequence[Row], tokenizer: Tokenizer, *, max_length: int, left_out: LeftOut, with_choices: bool = False
) -> list[EncodedRow]:
    """Tokenise rows; one longer than `max_length` is cut at its end, and left out when no label token is left.

    Raises:
        DataError: where no row is usable, with the length that would have made one so.
    """
    encoded: list[EncodedRow] = []
    needed: list[int] = []
    for start in range(0, len(rows), _BATCH_ROWS):
        for row, ids, is_label in tokenise(rows[start : start + _BATCH_ROWS], tokenizer):
            if not is_label[:max_length].any():
                left_out.add(no_label(max_length if is_label.any() else None), row.where)
                if is_label.any():
                    needed.append(int(np.flatnonzero(is_label)[0]) + 1)
                continue
            encoded.append(EncodedRow(row.where, ids[:max_length], is_label[:max_length]))
    if with_choices:
        encoded = _with_choices(rows, encoded, tokenizer, max_length)
    if not encoded:
        raise no_row(needed, left_out)
    return encoded


def no_label(max_length: int | None) -> str:
    """Why a row is left out whose labels begin behind `max_length`, or that has none at all."""
    return "no label token" + (f" within max_length {max_length}" if max_length else "")


def no_row(needed: Sequence[int], left_out: LeftOut) -> DataError:
    """No row has a label token; `needed` holds the max_length that each of those would need which have one further on."""
    hint = f"; the shortest of them needs max_length {min(needed)}" if len(needed) else ""
    return DataError("no row can be used" + hint + "".join(f"\n  {line}" for line in left_out.describe()))


def tokenise(rows: Sequence[Row], tokenizer: Tokenizer) -> list[tuple[Row, np.ndarray, np.ndarray]]:
    """Token ids [L] of each row and which of them are labels [L], in the order of `rows`."""
    backend = plain_backend(tokenizer)
    found: dict[int, tuple[Row, np.ndarray, np.ndarray]] = {}
    for rendered in (False, True):
        part = [index for index, row in enumerate(rows) if row.rendered is rendered]
        # Its wrapper would make Python lists of every token's range, of which two or three count.
        encodings = backend.encode_batch([rows[i].text for i in part], add_special_tokens=not rendered)
        for index, encoding in zip(part, encodings, strict=True):
            found[index] = (rows[index], *_labelled(rows[index], encoding, tokenizer))
    return [found[index] for index in range(len(rows))]


def plain_backend(tokenizer: Tokenizer) -> Any:
    """The fast tokenizer itself, without what some files bring: padding and truncation.

    Raises:
        DataError: where there is none.
    """
    if not tokenizer.is_fast:
        raise DataError(
            f"{type(tokenizer).__name__} cannot tell which characters a token stands for; give the model's folder a tokenizer.json"
        )
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    return backend


def _labelled(row: Row, encoding: Any, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    ids = np.array(encoding.ids, dtype=np.int32)
    is_label = np.zeros(len(ids), dtype=bool)
    for start, end in row.label_spans:
        first, last = encoding.char_to_token(start), encoding.char_to_token(end - 1)
        if first is None or last is None:  # white space at the span's edge, left out of every token's range
            is_label |= _reaching_into(encoding, start, end)
            continue
        while last + 1 < len(ids) and _begins(encoding, last + 1, end):  # a character of several tokens
            last += 1
        is_label[first : last + 1] = True
    if not row.rendered:
        ids, is_label = _ended(ids, is_label, tokenizer.eos_token_id)
    if len(is_label):
        is_label[0] = False
    return ids, is_label


def _begins(encoding: Any, token: int, end: int) -> bool:
    """Whether a token begins before character `end`; one that was added begins nowhere."""
    characters = encoding.token_to_chars(token)
    return characters is not None and characters[0] < end and characters[1] > characters[0]


def _reaching_into(encoding: Any, start: int, end: int) -> np.ndarray:
    """[L] tokens whose range meets characters start..end."""
    starts, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
    # Some tokenizers trim white space off their ranges: a token that is nothing else begins where the last one ended.
    starts = np.where(starts == ends, np.minimum(np.roll(ends, 1), starts), starts)
    # An added special token has an empty range and so never falls into a span.
    return (starts < end) & (ends > start) & (ends > starts)


def _ended(ids: np.ndarray, is_label: np.ndarray, end_id: int) -> tuple[np.ndarray, np.ndarray]:
    """The row with exactly one end token after its answer, labelled; some texts hold it, some tokenizers add it."""
    while len(ids) > 1 and ids[-1] == ids[-2] == end_id:
        ids, is_label = ids[:-1], is_label[:-1]
    if len(ids) and ids[-1] == end_id:
        is_label[-1] = True
        return ids, is_label
    return np.append(ids, np.int32(end_id)), np.append(is_label, True)


def _with_choices(
    rows: Sequence[Row], encoded: Sequence[EncodedRow], tokenizer: Tokenizer, max_length: int
) -> list[EncodedRow]:
    """Rows that know their possible answers get the tokens of each, joined and tokenised as the right one is."""
    by_where = {row.where: row for row in rows}
    texts: list[str] = []
    for item in encoded:
        row = by_where[item.where]
        if row.choices and len(row.label_spans) == 1:
            prompt = row.text[: row.label_spans[0][0]]
            texts += [prompt + choice for choice in row.choices]
    ids = iter(tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"] if texts else [])
    result = []
    for item in encoded:
        row = by_where[item.where]
        if not row.choices or len(row.label_spans) != 1:
            result.append(item)
            continue
        sequences = [_end(s, tokenizer.eos_token_id) for s in islice(ids, len(row.choices))]
        same_start = len({sequence[0] for sequence in sequences}) == 1  # else nothing stands before the answers
        if max(map(len, sequences)) > max_length or not same_start:
            result.append(item)
            continue
        answer = row.choices.index(row.text[row.label_spans[0][0] :])
        result.append(EncodedRow(item.where, item.ids, item.is_label, tuple(sequences), answer))
    return result


def _end(ids: list[int], end_id: int) -> tuple[int, ...]:
    while ids and ids[-1] == end_id:
        ids = ids[:-1]
    return (*ids, end_id)
