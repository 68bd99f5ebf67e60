"""All rows of a run: those that train and those that are held out, checked before any weight is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase as Tokenizer

from snugtune.data import sources
from snugtune.data.encode import EncodedRow, encode
from snugtune.data.rows import LeftOut, Row, render
from snugtune.errors import DataError
from snugtune.recipe import Recipe

_MOST_EVAL_ROWS = 200
_EVAL_SHARE = 0.1


@dataclass(frozen=True)
class Dataset:
    """Encoded rows of one run."""

    train: list[EncodedRow]
    held_out: list[EncodedRow]
    left_out: LeftOut = field(default_factory=LeftOut)


def load_evaluation(name: str, tokenizer: Tokenizer, *, max_length: int, most_rows: int | None = None) -> Dataset:
    """Every row of `name` (of packaged data, its test part) to be scored; at most `most_rows`, drawn with seed 0."""
    left_out = LeftOut()
    rows = _draw(_rows(name, tokenizer, left_out, part="test"), most_rows, seed=0)
    encoded = encode(rows, tokenizer, max_length=max_length, left_out=left_out, with_choices=True)
    return Dataset([], encoded, left_out)


def load_dataset(recipe: Recipe, tokenizer: Tokenizer) -> Dataset:
    """The rows of `recipe`. Which rows are held out is a pure function of the data and the seed.

    Raises:
        DataError: for a missing, broken or empty file, or where no row is usable.
    """
    what, left_out = recipe.what, LeftOut()
    train = _rows(recipe.data, tokenizer, left_out, part="train")
    if recipe.eval_data is not None or recipe.data in sources.PACKAGED:
        most = _MOST_EVAL_ROWS if recipe.eval_rows == "auto" else recipe.eval_rows
        held_out = _draw(_rows(recipe.eval_data or recipe.data, tokenizer, left_out, part="test"), most, seed=what.seed)
    else:
        train, held_out = _split(train, recipe)
    return Dataset(
        train=encode(train, tokenizer, max_length=what.max_length, left_out=left_out),
        held_out=encode(held_out, tokenizer, max_length=what.max_length, left_out=left_out, with_choices=True)
        if held_out else [],
        left_out=left_out,
    )  # fmt: skip


def stand_in(token_lengths: str) -> Dataset:
    """Rows of given lengths without content, for a plan: `1024x4096` (length x rows, comma-separated) or a file with one
    length a line. Every token but the first counts as a label, which is the most that a row can ask for.

    Raises:
        DataError: where it is neither.
    """
    path = Path(token_lengths)
    parts = path.read_text().split() if path.is_file() else token_lengths.split(",")
    lengths: list[int] = []
    for part in parts:
        length, _, rows = part.strip().partition("x")
        if not (length.isdecimal() and (rows or "1").isdecimal()) or int(length) < 2:
            raise DataError(
                f"'{part}' is no length x rows (as 1024x4096; a row has 2 tokens at least) and no such file is there"
            )
        lengths += [int(length)] * int(rows or 1)
    if not lengths:
        raise DataError(f"{token_lengths} holds no lengths")
    blank = {n: (np.full(n, 3, dtype=np.int32), np.arange(n) > 0) for n in set(lengths)}
    return Dataset([EncodedRow(f"row {i}", *blank[n]) for i, n in enumerate(lengths, 1)], [])


def _rows(name: str, tokenizer: Tokenizer, left_out: LeftOut, *, part: str) -> list[Row]:
    before = sum(left_out.counts.values())
    rows = render(sources.read(name, part=part), tokenizer, left_out)
    if rows:
        return rows
    bad = sum(left_out.counts.values()) - before
    if bad:
        raise DataError(f"{name} has no usable row among {bad}" + "".join(f"\n  {x}" for x in left_out.describe()))
    raise DataError(f"{name} holds no rows; it is empty")


def _split(rows: Sequence[Row], recipe: Recipe) -> tuple[list[Row], list[Row]]:
    wanted = min(_MOST_EVAL_ROWS, int(len(rows) * _EVAL_SHARE)) if recipe.eval_rows == "auto" else recipe.eval_rows
    if wanted >= len(rows):
        raise DataError(f"eval_rows={wanted} would leave no row of {recipe.data} ({len(rows)} rows) to train on")
    chosen = set(np.random.default_rng(recipe.what.seed).permutation(len(rows))[:wanted].tolist())
    return [r for i, r in enumerate(rows) if i not in chosen], [r for i, r in enumerate(rows) if i in chosen]


def _draw(rows: list[Row], most: int | None, *, seed: int) -> list[Row]:
    if most is None or len(rows) <= most:
        return rows
    chosen = sorted(np.random.default_rng(seed).permutation(len(rows))[:most].tolist())
    return [rows[i] for i in chosen]
