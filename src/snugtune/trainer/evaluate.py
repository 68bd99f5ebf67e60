"""Exact held-out loss and, where rows know their possible answers, accuracy. Memory does not grow with the rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from snugtune.data.choices import TreeBatch, shared_tokens, tree_batches
from snugtune.data.encode import EncodedRow
from snugtune.data.pack import MicroBatch, collate, pack
from snugtune.step import Scorer

Advance = Callable[[int], None]
_PACKED_AT_ONCE = 64


@dataclass(frozen=True)
class Evaluation:
    """What the held-out rows say about a model."""

    loss: float
    """Mean over label tokens of -log p, natural logarithm."""
    tokens: int
    """Label tokens."""
    rows: int
    accuracy: float | None
    """Share of rows whose most probable known answer is the right one; None where no row knows its answers."""

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(min(self.loss, 700.0))


def evaluate_rows(
    scorer: Scorer,
    rows: Sequence[EncodedRow],
    *,
    capacity: int,
    device: str = "cpu",
    advance: Advance = lambda rows: None,
) -> Evaluation:
    """Score `rows` in batches of at most `capacity` tokens (a longer row stands alone)."""
    scorer.model.eval()
    tally = _Tally()
    branching = [row for row in rows if row.choices]
    plain = [row for row in rows if not row.choices]
    if scorer.sees_trees:
        for tree in tree_batches(branching, capacity=capacity, device=device):
            tally.add_trees(tree, scorer.log_probs(tree).tolist())
            advance(len(tree.answers))
    else:
        for row in branching:
            tally.judge([-_loss(scorer, answer, device) for answer in _written_out(row)], row.answer)
            tally.add_loss(_loss(scorer, row, device), row.label_tokens)
            advance(1)
    for batch in _batches(plain, capacity, device):
        tally.add_loss(float(scorer.loss(batch)), batch.label_tokens)
        advance(len(batch.row_tokens))
    scorer.model.train()
    return Evaluation(
        loss=tally.loss / tally.tokens, tokens=tally.tokens, rows=len(rows),
        accuracy=tally.right / len(branching) if branching else None,
    )  # fmt: skip


@dataclass
class _Tally:
    loss: float = 0.0
    tokens: int = 0
    right: int = 0

    def add_trees(self, batch: TreeBatch, log_probs: list[float]) -> None:
        for paths, answer, labels in zip(batch.paths, batch.answers, batch.label_tokens, strict=True):
            self.judge([math.fsum(log_probs[pair] for pair in path) for path in paths], answer)
            # Answers may part from each other before the label tokens begin; the loss counts those alone.
            self.add_loss(-math.fsum(log_probs[pair] for pair in paths[answer][-labels:]), labels)

    def add_loss(self, loss: float, tokens: int) -> None:
        self.loss += loss
        self.tokens += tokens

    def judge(self, scores: list[float], answer: int) -> None:
        self.right += max(range(len(scores)), key=scores.__getitem__) == answer


def _batches(rows: Sequence[EncodedRow], capacity: int, device: str) -> Iterator[MicroBatch]:
    for start in range(0, len(rows), _PACKED_AT_ONCE):
        part = rows[start : start + _PACKED_AT_ONCE]
        for indices in pack([row.tokens for row in part], capacity=capacity):
            yield collate([part[i] for i in indices], device=device)


def _written_out(row: EncodedRow) -> Iterator[EncodedRow]:
    assert row.choices is not None
    first = shared_tokens(row)
    for answer in row.choices:
        ids = np.array(answer, dtype=np.int32)
        yield replace(row, ids=ids, is_label=np.arange(len(ids)) >= first, choices=None)


def _loss(scorer: Scorer, row: EncodedRow, device: str) -> float:
    return float(scorer.loss(collate([row], device=device)))
