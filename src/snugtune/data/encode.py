"""Rows to tokens with their labels, by character offsets of one joint tokenisation.

Prompt and answer are tokenised together, as the model will see them, and a token is a label when it reaches into an
answer's characters. Padding never enters, and the end token of every answer is a label of its own, told by position and
not by its id: a pad token equal to the end token cannot hide it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

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
        for row, ids, is_label in _tokenise(rows[start : start + _BATCH_ROWS], tokenizer):
            if not is_label[:max_length].any():
                reason = "no label token" if not is_label.any() else f"no label token within max_length {max_length}"
                left_out.add(reason, row.where)
                if is_label.any():
                    needed.append(int(np.flatnonzero(is_label)[0]) + 1)
                continue
            encoded.append(EncodedRow(row.where, ids[:max_length], is_label[:max_length]))
    if with_choices:
        encoded = _with_choices(rows, encoded, tokenizer, max_length)
    if not encoded:
        hint = f"; the shortest of them needs max_length {min(needed)}" if needed else ""
        raise DataError("no row can be used" + hint + "".join(f"\n  {line}" for line in left_out.describe()))
    return encoded


def _tokenise(rows: Sequence[Row], tokenizer: Tokenizer) -> list[tuple[Row, np.ndarray, np.ndarray]]:
    done = []
    for rendered in (False, True):
        part = [row for row in rows if row.rendered is rendered]
        if not part:
            continue
        found = tokenizer(
            [row.text for row in part], add_special_tokens=not rendered, return_offsets_mapping=True,
            return_attention_mask=False, verbose=False,
        )  # fmt: skip
        for row, ids, offsets in zip(part, found["input_ids"], found["offset_mapping"], strict=True):
            done.append((row, *_labelled(row, ids, offsets, tokenizer)))
    order = {id(row): index for index, row in enumerate(rows)}
    return sorted(done, key=lambda item: order[id(item[0])])


def _labelled(
    row: Row, ids: list[int], offsets: list[tuple[int, int]], tokenizer: Tokenizer
) -> tuple[np.ndarray, np.ndarray]:
    starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    # Some tokenizers trim white space off their ranges: a token that is nothing else begins where the last one ended.
    starts = np.where(starts == ends, np.minimum(np.roll(ends, 1), starts), starts) if len(ids) else starts
    is_label = np.zeros(len(ids), dtype=bool)
    for start, end in row.label_spans:
        # An added special token has an empty range and so never falls into a span.
        is_label |= (starts < end) & (ends > start) & (ends > starts)
    token_ids = np.array(ids, dtype=np.int32)
    if not row.rendered:
        token_ids, is_label = _ended(token_ids, is_label, tokenizer.eos_token_id)
    if len(is_label):
        is_label[0] = False
    return token_ids, is_label


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
