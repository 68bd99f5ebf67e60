"""Rows to micro-batches: which rows a step sees, how they are packed, and the tensors that the model gets.

The order of rows is a pure function of the seed and the epoch, so that a position in rows is all that a resumed run needs.
Rows are packed end to end without padding; attention tells them apart by their boundaries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from snugtune.data.encode import EncodedRow
from snugtune.kernels.attention import RowLayout, layout
from snugtune.recipe import Batching, What


@dataclass(frozen=True)
class MicroBatch:
    """Packed rows. T tokens, N label tokens."""

    input_ids_1T: Tensor
    position_ids_1T: Tensor
    label_positions_N: Tensor
    """Where in T the hidden state stands that predicts each label: one before the label itself."""
    labels_N: Tensor
    row_layout: RowLayout
    row_tokens: tuple[int, ...]
    row_label_tokens: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens that the model computes."""
        return sum(self.row_tokens)

    @property
    def label_tokens(self) -> int:
        """Tokens that the loss counts."""
        return sum(self.row_label_tokens)


def row_order(rows: int, *, seed: int, start: int, stop: int) -> Iterator[int]:
    """Row numbers at stream positions start..stop; epoch e is the stream's part from e * rows on, shuffled by (seed, e)."""
    for position in range(start, stop):
        epoch, index = divmod(position, rows)
        yield int(_permutation(rows, seed, epoch)[index])


@lru_cache(maxsize=2)
def _permutation(rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(rows)


def planned_steps(what: What, rows: int) -> int:
    """Optimiser steps of a run over `rows` rows."""
    if what.max_steps is not None:
        return what.max_steps
    return max(1, math.ceil(round(rows * what.num_train_epochs) / what.global_batch_rows))


def global_batches(what: What, rows: int) -> list[list[int]]:
    """Row numbers of every step. A pure function of the recipe: the planner looks at it, and a resumed run repeats it."""
    steps = planned_steps(what, rows)
    stop = steps * what.global_batch_rows
    if what.max_steps is None:
        stop = max(1, round(rows * what.num_train_epochs))
    order = list(row_order(rows, seed=what.seed, start=0, stop=stop))
    return [order[i : i + what.global_batch_rows] for i in range(0, stop, what.global_batch_rows)]


def micro_batches(lengths: Sequence[int], *, capacity: int, batching: Batching = "packing") -> list[list[int]]:
    """Split rows of one global batch into micro-batches of at most `capacity` computed tokens; a longer row stands alone.

    packing takes what fits together; padding takes rows as they come and grouping by their length, and `padded` then
    fills them up to the longest of their micro-batch.
    """
    if batching == "packing":
        return pack(lengths, capacity=capacity)
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i]) if batching == "grouping" else range(len(lengths))
    parts: list[list[int]] = []
    longest = 0
    for index in order:
        longest = max(longest, lengths[index])
        if not parts or longest * (len(parts[-1]) + 1) > capacity:
            parts.append([])
            longest = lengths[index]
        parts[-1].append(index)
    return parts


def computed_tokens(lengths: Sequence[int], batching: Batching) -> int:
    """Tokens that the model computes for a micro-batch of such rows."""
    return sum(lengths) if batching == "packing" else max(lengths) * len(lengths)


def padded(rows: Sequence[EncodedRow], batching: Batching) -> list[EncodedRow]:
    """The rows of a micro-batch as they are computed. Padding stands behind a row, where nothing of it is seen, and is no
    label."""
    if batching == "packing":
        return list(rows)
    longest = max(row.tokens for row in rows)
    return [
        replace(
            row,
            ids=np.pad(row.ids, (0, longest - row.tokens), mode="edge"),
            is_label=np.pad(row.is_label, (0, longest - row.tokens)),
        )
        for row in rows
    ]


def pack(lengths: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Split rows of one global batch into packed micro-batches of at most `capacity` tokens; a longer row stands alone.

    First-fit decreasing finds how few will do; then the load is levelled over that many, since the fullest one makes the
    peak. Indices inside a micro-batch come longest first, which is what attention groups like.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    bins: list[list[int]] = []
    room: list[int] = []
    for index in order:
        place = next((b for b, free in enumerate(room) if free >= lengths[index]), None)
        if place is None:
            bins.append([])
            room.append(capacity)
            place = len(bins) - 1
        bins[place].append(index)
        room[place] -= lengths[index]
    level: list[list[int]] = [[] for _ in bins]
    loads = [0] * len(bins)
    for index in order:
        place = loads.index(min(loads))
        level[place].append(index)
        loads[place] += lengths[index]
    fits = all(load <= capacity or len(rows) == 1 for rows, load in zip(level, loads, strict=True))
    return level if fits else bins


def collate(rows: Sequence[EncodedRow], *, device: torch.device | str = "cpu") -> MicroBatch:
    """The tensors of one micro-batch."""
    lengths = [row.tokens for row in rows]
    starts = np.cumsum([0, *lengths[:-1]])
    labels_at = np.concatenate([np.flatnonzero(row.is_label) + start for row, start in zip(rows, starts, strict=True)])
    ids = np.concatenate([row.ids for row in rows]).astype(np.int64)
    positions = np.concatenate([np.arange(length) for length in lengths])
    return MicroBatch(
        input_ids_1T=_tensor(ids, device)[None],
        position_ids_1T=_tensor(positions, device)[None],
        label_positions_N=_tensor(labels_at - 1, device),
        labels_N=_tensor(ids[labels_at], device),
        row_layout=layout(lengths, device=device),
        row_tokens=tuple(lengths),
        row_label_tokens=tuple(row.label_tokens for row in rows),
    )


def _tensor(values: np.ndarray, device: torch.device | str) -> Tensor:
    # From a list, not from_numpy: the planner collates under fake tensors, which a view of real memory is not.
    return torch.tensor(values.tolist(), dtype=torch.int64, device=device)
