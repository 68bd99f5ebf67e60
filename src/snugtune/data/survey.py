"""What a run would see of its data, and which rows would hurt it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from snugtune.data.pack import global_batches
from snugtune.data.tokens import REPEATED, SALAD, Rows
from snugtune.recipe import What

_BINS = 10
_FAR = 6.0
"""Deviations from the median, in units of the spread of the middle half, from which a row is an outlier."""
_MOST_NAMED = 1000


@dataclass(frozen=True)
class Finding:
    """Rows of which one thing is to be said."""

    what: str
    where: tuple[str, ...]
    """The first of them by file and line."""
    rows: int

    def __str__(self) -> str:
        named = ", ".join(self.where[:5])
        more = f" and {self.rows - 5} more" if self.rows > 5 else ""
        return f"{self.rows} row{'s' * (self.rows != 1)}, {self.what}: {named}{more}"


def token_lengths(lengths: np.ndarray) -> dict[str, int]:
    """Median, 95th percentile and maximum."""
    p50, p95 = np.percentile(lengths, [50, 95], method="higher")
    return {"p50": int(p50), "p95": int(p95), "max": int(lengths.max())}


def histogram(lengths: np.ndarray) -> list[tuple[int, int, int]]:
    """(from, to, rows) of equal ranges of length."""
    low, high = int(lengths.min()), int(lengths.max())
    bins = max(1, min(_BINS, high - low + 1))
    edges = np.linspace(low, high + 1, bins + 1).round().astype(int)
    counts, _ = np.histogram(lengths, edges)
    return [(int(a), int(b) - 1, int(n)) for a, b, n in zip(edges, edges[1:], counts, strict=False)]


def padding(lengths: np.ndarray, what: What) -> dict[str, float]:
    """Share of the computed positions that hold no token: rows padded to max_length, to the longest of their batch of 8,
    and packed."""
    order = [i for batch in global_batches(what, len(lengths)) for i in batch]
    batches = [lengths[order[i : i + 8]] for i in range(0, len(order), 8)]
    real = sum(int(batch.sum()) for batch in batches)
    dynamic = sum(int(batch.max()) * len(batch) for batch in batches)
    return {
        "max_length": 1 - real / (what.max_length * len(order)),
        "dynamic": 1 - real / dynamic,
        "packing": 0.0,
    }


def findings(rows: Rows) -> list[Finding]:
    """Rows that would teach little or something wrong: duplicates, contradictions, and texts that are unlike the others."""
    lengths, flags = rows.fact("label_tokens").astype(float), rows.fact("flags")
    digests, prompts = rows.fact("digests"), rows.fact("prompt_digests")
    again = _not_first(digests)
    found = [
        ("the same as an earlier row", again),
        ("the prompt of an earlier row with another answer", _not_first(prompts) & ~again & (prompts != digests)),
        ("signs rather than words", flags & SALAD > 0),
        ("the same thing again and again", flags & REPEATED > 0),
        ("far more label tokens than the others", _far_above(lengths)),
        ("cut at max_length", rows.whole_lengths > rows.max_length),
    ]
    return [_finding(what, rows, chosen) for what, chosen in found if chosen.any()]


def leaks(train: Rows, held_out: Rows) -> list[Finding]:
    """Held-out rows that are trained on as well."""
    if not len(held_out):
        return []
    same = np.isin(held_out.fact("digests"), train.fact("digests"))
    prompt = np.isin(held_out.fact("prompt_digests"), train.fact("prompt_digests")) & ~same
    told = (
        ("held out and trained on as well", same),
        ("held out, and the prompt is trained on with another answer", prompt),
    )
    return [_finding(what, held_out, chosen) for what, chosen in told if chosen.any()]


def high_losses(rows: Sequence[str], losses: Sequence[float]) -> list[Finding]:
    """Rows whose loss a token is far above the others': their text, or its label, may be wrong."""
    chosen = _far_above(np.asarray(losses))
    order = sorted(np.flatnonzero(chosen).tolist(), key=lambda i: -losses[i])
    named = tuple(f"{rows[i]} ({losses[i]:.1f})" for i in order[:_MOST_NAMED])
    return [Finding("a loss far above the others'", named, len(order))] if order else []


def _finding(what: str, rows: Rows, chosen: np.ndarray) -> Finding:
    indices = np.flatnonzero(chosen)
    return Finding(what, tuple(rows.where(int(i)) for i in indices[:_MOST_NAMED]), len(indices))


def _not_first(values: np.ndarray) -> np.ndarray:
    """Where a value stood earlier."""
    _, first = np.unique(values, return_index=True)
    found = np.ones(len(values), dtype=bool)
    found[first] = False
    return found


def _far_above(values: np.ndarray) -> np.ndarray:
    low, middle, high = np.percentile(values, [25, 50, 75])
    spread = max(high - low, 0.25 * middle, 1e-9)  # of rows that are all alike, a little more is not far
    return values > middle + _FAR * spread
