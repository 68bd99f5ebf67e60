"""All rows of a run: those that train and those that are held out, checked before any weight is loaded."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase as Tokenizer

from snugtune.data import sources, tokens
from snugtune.data.encode import EncodedRow, encode, no_label, no_row
from snugtune.data.rows import KNOWN, UNKNOWN, LeftOut, render_each, with_labels
from snugtune.errors import DataError
from snugtune.events import Progress, quiet
from snugtune.recipe import DataSource, Recipe

_MOST_EVAL_ROWS = 200
_EVAL_SHARE = 0.1


@dataclass(frozen=True)
class Dataset:
    """Encoded rows of one run."""

    train: Sequence[EncodedRow]
    held_out: list[EncodedRow]
    left_out: LeftOut = field(default_factory=LeftOut)

    @property
    def largest_id(self) -> int:
        """Of all token ids in it."""
        files = self.train.files if isinstance(self.train, tokens.Rows) else []
        found = [file.told.largest_id for file in files] + [int(row.ids.max()) for row in self.held_out]
        return max(found, default=0)

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each training row."""
        return self.train.lengths.tolist() if isinstance(self.train, tokens.Rows) else [r.tokens for r in self.train]

    @cached_property
    def label_lengths(self) -> list[int]:
        """Label tokens of each training row."""
        if isinstance(self.train, tokens.Rows):
            return self.train.label_lengths.tolist()
        return [row.label_tokens for row in self.train]


def load_evaluation(
    name: str, tokenizer: Tokenizer, *, max_length: int, most_rows: int | None = None, progress: Progress = quiet
) -> Dataset:
    """Every row of `name` (of packaged data, its test part) to be scored; at most `most_rows`, drawn with seed 0.

    Raises:
        DataError: for a missing, broken or empty file, or where no row is usable.
    """
    source, left_out = DataSource(path=name), LeftOut()
    rows = _usable([source], tokenizer, max_length, left_out, part="test", progress=progress)
    drawn = _with_labels_left(_draw(rows, most_rows, seed=0), left_out)
    if not len(drawn):
        raise no_row(_needed(rows), left_out)
    scored = _scored(drawn, [source], tokenizer, part="test")
    return Dataset([], scored, left_out)


def load_dataset(recipe: Recipe, tokenizer: Tokenizer, *, progress: Progress = quiet) -> Dataset:
    """The rows of `recipe`. Which rows are held out is a pure function of the data and the seed.

    Raises:
        DataError: for a missing, broken or empty file, where no row is usable, or where more are left out than the recipe
            lets be.
    """
    found = parts(recipe, tokenizer, progress=progress)
    if found.bad_rows > recipe.most_left_out * found.rows:
        raise DataError(
            f"{found.bad_rows} of {found.rows} rows of {recipe.data_names} cannot be used, and most_left_out is "
            f"{recipe.most_left_out:g}; mend the data, or set it higher"
            + "".join(f"\n  {x}" for x in found.left_out.describe())
        )
    scored = _scored(found.held_out, found.held_from, tokenizer, part=found.part)
    return Dataset(_weighted(found.train, recipe), scored, found.left_out)


@dataclass(frozen=True)
class Parts:
    """Rows that train and rows that are held out, where they come from, and those that neither has."""

    train: tokens.Rows
    """Each with a label token, and each once."""
    held_out: tokens.Rows
    held_from: Sequence[DataSource]
    part: str
    """Of `held_from`: train or test."""
    left_out: LeftOut
    rows: int
    """Of the data that is trained on, whether they can be used or not."""
    bad_rows: int
    """Of these, the ones that cannot."""


def parts(recipe: Recipe, tokenizer: Tokenizer, *, progress: Progress = quiet) -> Parts:
    """The rows of `recipe` as tokens, parted. Raises as `load_dataset`."""
    what, left_out = recipe.what, LeftOut()
    own = recipe.eval_data
    if own is None and len(recipe.data) == 1 and recipe.data[0].path in sources.PACKAGED:
        own = recipe.data[0].path
    rows = _usable(recipe.data, tokenizer, what.max_length, left_out, part="train", progress=progress)
    if own is None:
        train, held_out = (_with_labels_left(part, left_out) for part in _split(rows, recipe))
        if not len(train):
            raise no_row(_needed(rows), left_out)
        bad = sum(left_out.counts.values())
        return Parts(train, held_out, recipe.data, "train", left_out, len(train) + len(held_out) + bad, bad)
    train = _with_labels_left(rows, left_out)
    if not len(train):
        raise no_row(_needed(rows), left_out)
    bad = sum(left_out.counts.values())
    held_from = [recipe.data[0].model_copy(update={"path": own})]
    most = _MOST_EVAL_ROWS if recipe.eval_rows == "auto" else recipe.eval_rows
    held_out = rows.take(np.arange(0))
    if most:
        others = _usable(held_from, tokenizer, what.max_length, left_out, part="test", progress=progress)
        held_out = _with_labels_left(_draw(others, most, seed=what.seed), left_out)
    return Parts(train, held_out, held_from, "test", left_out, len(train) + bad, bad)


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


def _usable(
    data: Sequence[DataSource],
    tokenizer: Tokenizer,
    max_length: int,
    left_out: LeftOut,
    *,
    part: str,
    progress: Progress,
) -> tokens.Rows:
    """Every row that could be rendered, those without a label token among them."""
    files = [tokens.load(source, tokenizer, part=part, progress=progress) for source in data]
    for source, file in zip(data, files, strict=True):
        left_out.merge(file.told.left_out)
        if not len(file):
            raise _no_rows(source.path, file.told.left_out)
    return tokens.joined(files, max_length=max_length, tasks=[source.task for source in data])


def _no_rows(name: str, left_out: LeftOut) -> DataError:
    bad = sum(left_out.counts.values())
    if not bad:
        return DataError(f"{name} holds no rows; it is empty")
    unknown = any(reason.startswith(UNKNOWN) for reason in left_out.counts)
    hint = f"\nA row needs one of: {KNOWN}. Columns with other names are told by data.columns." if unknown else ""
    return DataError(f"{name} has no usable row among {bad}" + "".join(f"\n  {x}" for x in left_out.describe()) + hint)


def _with_labels_left(rows: tokens.Rows, left_out: LeftOut) -> tokens.Rows:
    """Rows that have a label token within max_length; the others are left out."""
    first, limit = rows.fact("first_label"), rows.max_length
    kept = (first >= 0) & (first < limit)
    for index in np.flatnonzero(~kept).tolist():
        left_out.add(no_label(limit if first[index] >= 0 else None), rows.where(index))
    return rows if kept.all() else rows.take(np.flatnonzero(kept))


def _needed(rows: tokens.Rows) -> list[int]:
    """The max_length that would leave each row a label token."""
    first = rows.fact("first_label")
    return (first[first >= 0] + 1).tolist()


def _scored(rows: tokens.Rows, data: Sequence[DataSource], tokenizer: Tokenizer, *, part: str) -> list[EncodedRow]:
    """Held-out rows in memory, with their possible answers where the set knows them. Those need the text again."""
    found = dict(enumerate(rows))
    for number, (source, file) in enumerate(zip(data, rows.files, strict=True)):
        mine = np.flatnonzero(rows.file_N == number).tolist()
        if file.told.has_choices and mine:
            wanted = {rows.where(index): index for index in mine}
            for row in _with_answers(source, file, wanted, tokenizer, rows.max_length, part):
                found[wanted[row.where]] = row
    return [found[index] for index in range(len(rows))]


def _with_answers(
    source: DataSource,
    file: tokens.TokenFile,
    wanted: Collection[str],
    tokenizer: Tokenizer,
    max_length: int,
    part: str,
) -> list[EncodedRow]:
    broken = LeftOut().add if source.skip_broken_lines else None
    records = sources.read(source, part=part, broken=broken)
    rows = render_each((record for record in records if record.where in wanted), tokenizer, LeftOut())
    return encode(
        with_labels(rows, file.told.labels), tokenizer, max_length=max_length, left_out=LeftOut(), with_choices=True
    )


def _split(rows: tokens.Rows, recipe: Recipe) -> tuple[tokens.Rows, tokens.Rows]:
    wanted = min(_MOST_EVAL_ROWS, int(len(rows) * _EVAL_SHARE)) if recipe.eval_rows == "auto" else recipe.eval_rows
    if wanted >= len(rows):
        raise DataError(f"eval_rows={wanted} would leave no row of {recipe.data_names} ({len(rows)} rows) to train on")
    chosen = np.zeros(len(rows), dtype=bool)
    chosen[np.random.default_rng(recipe.what.seed).permutation(len(rows))[:wanted]] = True
    return rows.take(np.flatnonzero(~chosen)), rows.take(np.flatnonzero(chosen))


def _draw(rows: tokens.Rows, most: int | None, *, seed: int) -> tokens.Rows:
    if most is None or len(rows) <= most:
        return rows
    return rows.take(np.sort(np.random.default_rng(seed).permutation(len(rows))[:most]))


def _weighted(rows: tokens.Rows, recipe: Recipe) -> tokens.Rows:
    """Each source's rows as often as its weight says; of a part of one, rows drawn by the seed."""
    if all(source.weight == 1 for source in recipe.data):
        return rows
    generator = np.random.default_rng((recipe.what.seed, 1))
    chosen = []
    for number, source in enumerate(recipe.data):
        mine = np.flatnonzero(rows.file_N == number)
        often, rest = divmod(source.weight, 1)
        chosen += [mine] * int(often) + [generator.permutation(mine)[: round(rest * len(mine)) or int(often == 0)]]
    return rows.take(np.concatenate(chosen))
