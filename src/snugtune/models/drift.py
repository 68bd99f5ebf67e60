"""How far one model's answers are from another's: what was trained against what will be shipped.

    kl = mean_p sum_v p1(v) [log p1(v) - log p2(v)],  in nats; p1 is the model before the hop, p2 the one after it

The two are never in memory together: the first one's logits at a few positions are kept, in float32 on the host, and the
second's are held against them.

Shapes: T tokens of packed rows, P positions that are compared, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from transformers import PreTrainedModel

from snugtune.kernels import attention
from snugtune.units import MIB

KEPT_BYTES = 64 * MIB
"""Logits of the first model that are kept."""
MOST_POSITIONS = 256
PACKED_TOKENS = 512
"""Tokens of one forward (a longer row stands alone)."""
_POSITIONS_AT_ONCE = 4
"""They are compared in float64, since a KL of 1e-6 is lost in float32, and so many at one time: 5 MB each at a vocabulary of
150,000."""


@dataclass(frozen=True)
class Row:
    """Token ids, and those of its positions whose next token is asked for."""

    ids: tuple[int, ...]
    positions: tuple[int, ...]


@dataclass(frozen=True)
class Drift:
    """The second model against the first."""

    max_logit_drift: float
    """Largest difference of a logit."""
    kl: float
    """Nats a position."""
    greedy_agreement: float
    """Share of positions where both hold the same token for the most probable one."""
    positions: int


def choose(rows: Iterable[tuple[ArrayLike, ArrayLike]], *, vocabulary: int) -> list[Row]:
    """The positions that predict the labels of `rows`; of many, evenly spaced ones.

    As many as KEPT_BYTES hold, and MOST_POSITIONS at most.

    Args:
        rows: token ids [L], and which of them are labels [L].
        vocabulary: V.
    """
    tokens, found = [], []
    for ids, is_label in rows:
        found += [(len(tokens), int(at) - 1) for at in np.flatnonzero(is_label) if at > 0]
        tokens.append(tuple(np.asarray(ids).tolist()))
    most = min(MOST_POSITIONS, max(1, KEPT_BYTES // (4 * vocabulary)))
    if len(found) > most:
        found = [found[i * len(found) // most] for i in range(most)]
    chosen: dict[int, list[int]] = {}
    for row, at in found:
        chosen.setdefault(row, []).append(at)
    return [Row(tokens[row], tuple(positions)) for row, positions in chosen.items()]


def keep(model: PreTrainedModel, rows: Sequence[Row]) -> Tensor:
    """[P, V] logits of `model` at the positions of `rows`, float32 on the host."""
    positions = sum(len(row.positions) for row in rows)
    kept_PV = torch.empty(positions, model.config.get_text_config().vocab_size)
    done = 0
    for part_PV in _logits(model, rows):
        kept_PV[done : done + len(part_PV)] = part_PV
        done += len(part_PV)
    return kept_PV


def measure(kept_PV: Tensor, model: PreTrainedModel, rows: Sequence[Row]) -> Drift:
    """`model` against the one whose logits at the same positions were kept. Not finite where one of the two is not."""
    largest, divergences, agreed, done = [], [], 0, 0
    for part_PV in _logits(model, rows):
        for second_PV in part_PV.split(_POSITIONS_AT_ONCE):
            first_PV = kept_PV[done : done + len(second_PV)].double()
            second_PV = second_PV.cpu().double()
            done += len(second_PV)
            largest.append((first_PV - second_PV).abs().max())
            agreed += int((first_PV.argmax(1) == second_PV.argmax(1)).sum())
            first_PV, second_PV = first_PV.log_softmax(1), second_PV.log_softmax(1)
            divergences.append((first_PV.exp() * (first_PV - second_PV)).sum())
    return Drift(
        max_logit_drift=float(torch.stack(largest).max()),  # which hands a NaN on, as Python's max would not
        kl=float(torch.stack(divergences).sum()) / done,
        greedy_agreement=agreed / done,
        positions=done,
    )


@torch.no_grad()
def _logits(model: PreTrainedModel, rows: Sequence[Row]) -> Iterator[Tensor]:
    """Float32 logits at the positions of `rows`, in order, some of them at a time; through the model's own head."""
    model.eval()
    device = next(model.parameters()).device
    # The families that we know see where a row ends when several stand in one sequence; any other runs one at a time.
    packs = model.config._attn_implementation == attention.NAME
    chooses = "logits_to_keep" in inspect.signature(model.forward).parameters
    for group in _groups(rows) if packs else ([row] for row in rows):
        lengths = [len(row.ids) for row in group]
        starts = [sum(lengths[:i]) for i in range(len(group))]
        at = [start + p for start, row in zip(starts, group, strict=True) for p in row.positions]
        at_P = torch.tensor(at, device=device)
        extra: dict[str, Any] = {"logits_to_keep": at_P} if chooses else {}
        if packs:
            order = [i for length in lengths for i in range(length)]
            extra["position_ids"] = torch.tensor([order], device=device)
            extra["row_layout"] = attention.layout(lengths, device=device)
        ids_1T = torch.tensor([[token for row in group for token in row.ids]], device=device)
        logits_PV = model(input_ids=ids_1T, use_cache=False, **extra).logits[0]
        yield (logits_PV if chooses else logits_PV[at_P]).float()


def _groups(rows: Sequence[Row]) -> Iterator[list[Row]]:
    group: list[Row] = []
    for row in rows:
        if group and sum(len(r.ids) for r in group) + len(row.ids) > PACKED_TOKENS:
            yield group
            group = []
        group.append(row)
    yield group
