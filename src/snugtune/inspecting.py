"""`snugtune inspect` in Python: what a run would see of its data, and which rows would hurt it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from transformers import PreTrainedTokenizerBase as Tokenizer

from snugtune import device as devices
from snugtune import step as steps
from snugtune.api import compute_precision
from snugtune.data import dataset, sources, survey, tokens
from snugtune.data.encode import EncodedRow
from snugtune.data.pack import collate
from snugtune.events import Progress, quiet
from snugtune.models import load
from snugtune.recipe import Recipe


@dataclass(frozen=True)
class InspectReport:
    """What a run would see of its data; the keys are the contract's."""

    rows: int
    """That can be used, those that would be held out among them."""
    held_out_rows: int
    left_out: dict[str, int]
    formats: dict[str, int]
    tokens: int
    label_tokens: int
    token_lengths: dict[str, int]
    histogram: list[tuple[int, int, int]]
    """(shortest, longest, rows)"""
    padding: dict[str, float]
    """Share of computed positions without a token: rows padded to max_length, to the longest of a batch of 8, packed."""
    warnings: list[str]
    shown: list[list[tuple[str, bool]]] = field(default_factory=list)
    """The first rows in pieces of text, and whether the loss counts them."""


def inspect(recipe: Recipe, *, loss_rows: int = 0, shown_rows: int = 3, progress: Progress = quiet) -> InspectReport:
    """Look at the data of `recipe` as a run of it would see them. No weights are loaded but for losses.

    Args:
        recipe: its data, model (for the tokenizer) and max_length count.
        loss_rows: look at the model's loss on so many rows, drawn by the seed, for outliers.
        shown_rows: rows of which pieces are given.
        progress: told how far it is.

    Raises:
        InputError: as `train`.
    """
    for one in recipe.data:
        sources.check(one.path)
    source = load.resolve(recipe.model)
    tokenizer = load.load_tokenizer(source)
    found = dataset.parts(recipe, tokenizer, progress=progress)
    both = tokens.stacked([found.train, found.held_out])
    told = [
        *found.left_out.describe(),
        *map(str, survey.findings(found.train)),
        *map(str, survey.leaks(found.train, found.held_out)),
    ]
    if loss_rows:
        told += map(str, _high_losses(found.train, source, loss_rows, recipe, progress))
    files = found.train.files
    return InspectReport(
        rows=len(both), held_out_rows=len(found.held_out), left_out=found.left_out.counts,
        formats=dict(sum((Counter(file.told.forms) for file in files), Counter())), tokens=int(both.lengths.sum()),
        label_tokens=int(both.label_lengths.sum()), token_lengths=survey.token_lengths(both.lengths),
        histogram=survey.histogram(both.lengths), padding=survey.padding(found.train.lengths, recipe.what), warnings=told,
        shown=[_pieces(row, tokenizer) for row in found.train[:shown_rows]],
    )  # fmt: skip


def _pieces(row: EncodedRow, tokenizer: Tokenizer) -> list[tuple[str, bool]]:
    cuts = [0, *(np.flatnonzero(np.diff(row.is_label)) + 1).tolist(), row.tokens]
    return [(str(tokenizer.decode(row.ids[a:b].tolist())), bool(row.is_label[a])) for a, b in pairwise(cuts)]


def _high_losses(
    rows: tokens.Rows, source: load.ModelSource, most: int, recipe: Recipe, progress: Progress
) -> list[survey.Finding]:
    spec = devices.find(recipe.device)
    model = load.load_model(
        source, dtype=load.DTYPES[compute_precision(recipe, spec)], device=spec.kind, packing=source.packing
    )
    scorer = steps.Scorer(model)
    drawn = np.random.default_rng(recipe.what.seed).permutation(len(rows))[:most].tolist()
    losses = []
    for done, index in enumerate(drawn, 1):
        row = rows[index]
        losses.append(float(scorer.loss(collate([row], device=spec.kind))) / row.label_tokens)
        progress("looking at losses", done, len(drawn), {})
    return survey.high_losses([rows.where(index) for index in drawn], losses)
