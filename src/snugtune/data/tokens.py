"""All rows of one source as tokens, in a file that is made once and kept: memory does not grow with the data.

A row's tokens are read from the file when they are needed; what is in memory is a few numbers a row. The file is kept in
the user's cache folder under a name that its content decides: the data's bytes, the tokenizer, the chat template and how
rows are read. Records are rendered and tokenised by several processes, a thousand at a time, in the order of the file.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
import zipfile
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np
import platformdirs
import tokenizers
import transformers
from transformers import PreTrainedTokenizerBase as Tokenizer

from snugtune.data import sources
from snugtune.data.encode import EncodedRow, plain_backend, tokenise
from snugtune.data.rows import MOST_LABELS, LeftOut, Row, render_each
from snugtune.data.sources import Record
from snugtune.errors import SnugtuneError
from snugtune.events import Progress, quiet
from snugtune.recipe import DataSource
from snugtune.units import GIB, MIB

log = logging.getLogger("snugtune")

_VERSION = 1
"""Of the files' layout and of how rows are rendered: raise it when either changes."""
CACHE_BYTES = 8 * GIB
"""Files that were not used for longest go when there is more."""
CHUNK_RECORDS = 1000
_MOST_PROCESSES = 16
_IN_USE_SECONDS = 3600
_CHUNK_CHARACTERS = 4 * MIB
_PARALLELISM = "TOKENIZERS_PARALLELISM"
_LABEL = np.uint32(1 << 31)
"""Set in a token's number where the loss counts it."""
SALAD, REPEATED = 1, 2
"""Flags of a row: more signs than words; the same again and again."""
_SALAD_SHARE = 0.4
_REPEATED_SHARE = 0.12
_LOOKED_AT = 200
"""Shorter texts are neither."""


@dataclass(frozen=True)
class Facts:
    """What is kept in memory of N rows."""

    offsets: np.ndarray
    """[N + 1] where each row's tokens begin in the file."""
    label_tokens: np.ndarray
    """[N]"""
    first_label: np.ndarray
    """[N] the position of the first label token; -1 where there is none."""
    places: np.ndarray
    """[N] line or row number in the source."""
    digests: np.ndarray
    """[N] of the text, spaces and case left out."""
    prompt_digests: np.ndarray
    """[N] of what stands before the first answer; that of the text where nothing does."""
    flags: np.ndarray
    """[N] SALAD, REPEATED"""


@dataclass
class Told:
    """What was learnt about a source besides its tokens."""

    prefix: str = ""
    """Before a row's place, for messages: `file.jsonl:`."""
    left_out: LeftOut = field(default_factory=LeftOut)
    largest_id: int = 0
    """Of all token ids."""
    forms: dict[str, int] = field(default_factory=dict)
    """Format -> rows."""
    labels: list[str] | None = None
    """All answers of a set of labelled texts; None where it is no such set."""
    has_choices: bool = False
    """Rows name their possible answers, or `labels` are these."""


class TokenFile:
    """Rows of one source. Reading a row touches the file and nothing else."""

    def __init__(self, path: Path, facts: Facts, told: Told, *, delete: bool = False) -> None:
        self.facts, self.told = facts, told
        self._handle = os.open(path, os.O_RDONLY)
        if delete:
            path.unlink()  # it lives until it is closed

    def __del__(self) -> None:
        with suppress(OSError, AttributeError):
            os.close(self._handle)

    def __len__(self) -> int:
        return len(self.facts.label_tokens)

    @property
    def lengths(self) -> np.ndarray:
        """[N] tokens of each row."""
        return np.diff(self.facts.offsets)

    def where(self, index: int) -> str:
        """`file:line` of a row."""
        return f"{self.told.prefix}{self.facts.places[index]}"

    def row(self, index: int, *, max_length: int) -> EncodedRow:
        """One row, cut at its end to `max_length`."""
        start, stop = (int(self.facts.offsets[i]) for i in (index, index + 1))
        tokens = np.frombuffer(
            os.pread(self._handle, 4 * (min(stop, start + max_length) - start), 4 * start), np.uint32
        )
        return EncodedRow(self.where(index), (tokens & ~_LABEL).astype(np.int32), (tokens & _LABEL) != 0)

    @classmethod
    def load(cls, path: Path) -> Self | None:
        """A kept file; None where there is none that is whole."""
        try:
            with path.with_suffix(".npz").open("rb") as opened, np.load(opened, allow_pickle=False) as kept:
                facts = Facts(**{name: kept[name] for name in Facts.__dataclass_fields__})
                plain = json.loads(kept["told"].tobytes())
            if path.stat().st_size != 4 * int(facts.offsets[-1]):
                return None
            os.utime(path)
            plain["left_out"] = LeftOut(**plain["left_out"])
            return cls(path, facts, Told(**plain))
        except (OSError, ValueError, KeyError, TypeError, IndexError, EOFError, zlib.error, zipfile.BadZipFile):
            return None


def load(
    source: DataSource,
    tokenizer: Tokenizer,
    *,
    part: str = "train",
    progress: Progress = quiet,
    folder: Path | None = None,
) -> TokenFile:
    """The rows of `source` as tokens: those that are kept, else made now and kept.

    Raises:
        DataError: for a missing or damaged file.
    """
    sources.check(source.path)
    name = _name(source, tokenizer, part)
    kept = folder or _folder()
    if name is not None:
        found = TokenFile.load(kept / f"{name}.tokens")
        if found is not None:
            return found
        try:
            kept.mkdir(parents=True, exist_ok=True)
            made = _make(source, tokenizer, part, progress, kept, name)
            _make_room(kept)
            return made
        except OSError as error:
            log.warning("tokens cannot be kept in %s (%s); they are made anew in each run", kept, error)
    # Nothing that could name it, or nowhere to keep it.
    with tempfile.TemporaryDirectory() as scratch:
        return _make(source, tokenizer, part, progress, Path(scratch), None)


def _folder() -> Path:
    return platformdirs.user_cache_path("snugtune") / "tokens"


def _name(source: DataSource, tokenizer: Tokenizer, part: str) -> str | None:
    content = sources.identity(source.path, part)
    if content is None:
        return None
    template = tokenizer.chat_template
    backend = plain_backend(tokenizer).to_str()
    dated = date.today().isoformat() if "strftime_now" in str(template) else None
    read = [source.columns, source.skip_broken_lines, Path(source.path).name]
    versions = [_VERSION, tokenizers.__version__, transformers.__version__]
    told = [content, backend, template, tokenizer.special_tokens_map, tokenizer.eos_token_id, dated, read, versions]
    return hashlib.sha256(json.dumps(told, default=str).encode()).hexdigest()[:40]


def _make_room(folder: Path) -> None:
    """Delete the files that were not used for longest until the rest fits CACHE_BYTES; none that was used within the hour."""
    with suppress(OSError):
        files = [path for path in folder.glob("*.tokens") if not path.name.startswith(".")]
        room = CACHE_BYTES
        for path in sorted(files, key=lambda path: path.stat().st_mtime, reverse=True):
            room -= path.stat().st_size
            if room < 0 and time.time() - path.stat().st_mtime > _IN_USE_SECONDS:
                path.with_suffix(".npz").unlink(missing_ok=True)
                path.unlink(missing_ok=True)


# --- making ----------------------------------------------------------------------------------------------------------


@dataclass
class _Chunk:
    """What came of a thousand records."""

    tokens: np.ndarray
    lengths: list[int]
    label_tokens: list[int]
    first_label: list[int]
    places: list[str]
    digests: list[int]
    prompt_digests: list[int]
    flags: list[int]
    largest_id: int
    left_out: LeftOut
    forms: Counter[str]
    labels: set[str]
    """Answers of texts with a label."""
    has_choices: bool


def _make(
    source: DataSource, tokenizer: Tokenizer, part: str, progress: Progress, folder: Path, name: str | None
) -> TokenFile:
    """Write the tokens aside, then the facts, and give both their names: a kept file is whole or not there."""
    told, columns = (
        Told(),
        {key: [] for key in ("lengths", "label_tokens", "first_label", "digests", "prompt_digests", "flags")},
    )
    places: list[int] = []
    labels: set[str] = set()
    total, reached = sources.size_bytes(source.path), 0

    def told_position(done: int) -> None:
        nonlocal reached
        reached = done

    what, alone = f"reading {Path(source.path).name}", sources.is_small(source.path)
    broken = told.left_out.add if source.skip_broken_lines else None
    records = sources.read(source, part=part, broken=broken, reached=told_position)
    handle, aside = tempfile.mkstemp(prefix=".", suffix=".tokens", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            for chunk in _chunks(records, tokenizer, alone=alone):
                file.write(chunk.tokens.tobytes())
                for key, values in columns.items():
                    values.append(np.asarray(getattr(chunk, key), dtype=_KINDS[key]))
                for where in chunk.places:
                    told.prefix, place = _apart(where)
                    places.append(place)
                told.left_out.merge(chunk.left_out)
                told.largest_id = max(told.largest_id, chunk.largest_id)
                told.forms = dict(Counter(told.forms) + chunk.forms)
                labels = labels | chunk.labels if len(labels) <= MOST_LABELS else labels
                told.has_choices |= chunk.has_choices
                if not alone:
                    progress(what, min(reached, total), total, {})
            file.flush()
            os.fsync(file.fileno())
        if not alone:
            progress(what, total, total, {})
        if 2 <= len(labels) <= MOST_LABELS:
            told.labels, told.has_choices = sorted(labels), True
        facts = _facts(
            {key: np.concatenate([*values, np.empty(0, _KINDS[key])]) for key, values in columns.items()}, places
        )
        if name is None:
            return TokenFile(Path(aside), facts, told, delete=True)
        _keep(folder / f"{name}.npz", facts, told)
        path = folder / f"{name}.tokens"
        Path(aside).replace(path)
        return TokenFile(path, facts, told)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise


_KINDS = {
    "lengths": np.int64, "label_tokens": np.int32, "first_label": np.int32, "digests": np.uint64,
    "prompt_digests": np.uint64, "flags": np.uint8,
}  # fmt: skip


def _facts(columns: dict[str, np.ndarray], places: list[int]) -> Facts:
    offsets = np.concatenate([[0], np.cumsum(columns.pop("lengths"))]).astype(np.int64)
    return Facts(offsets=offsets, places=np.array(places, dtype=np.int64), **columns)


def _keep(path: Path, facts: Facts, told: Told) -> None:
    plain = {name: getattr(told, name) for name in Told.__dataclass_fields__}
    plain["left_out"] = {"reasons": told.left_out.reasons, "changed": told.left_out.changed}
    text = np.frombuffer(json.dumps(plain).encode(), np.uint8)
    handle, aside = tempfile.mkstemp(prefix=".", suffix=".npz", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, told=text, **{name: getattr(facts, name) for name in Facts.__dataclass_fields__})
            file.flush()
            os.fsync(file.fileno())
        Path(aside).replace(path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise


def _apart(where: str) -> tuple[str, int]:
    found = re.fullmatch(r"(.*?)(\d+)", where, re.DOTALL)
    assert found, where
    return found[1], int(found[2])


def _chunks(records: Iterator[Record], tokenizer: Tokenizer, *, alone: bool) -> Iterator[_Chunk]:
    """Chunks in the order of the records. Few are waiting at any time, so that a fast reader does not fill the memory."""
    batches = _batches(records)
    processes = min(len(os.sched_getaffinity(0)), _MOST_PROCESSES) if sys.platform.startswith("linux") else 1
    if alone or processes == 1:
        for batch in batches:
            yield _chunk(batch, tokenizer)
        return
    before = os.environ.get(_PARALLELISM)
    os.environ[_PARALLELISM] = "false"  # each process is one; tokenizers would say so for each of them
    # Forked, so that they have the tokenizer; nothing of torch runs in them.
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), _begin, (tokenizer,))
    try:
        waiting: deque[Future[_Chunk]] = deque()
        for batch in batches:
            waiting.append(pool.submit(_chunk_here, batch))
            if len(waiting) > 2 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise SnugtuneError(
            "a process that tokenised rows was ended from outside; is the machine short of memory?"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)
        os.environ.pop(_PARALLELISM)
        if before is not None:
            os.environ[_PARALLELISM] = before


def _batches(records: Iterator[Record]) -> Iterator[list[Record]]:
    """At most CHUNK_RECORDS, and fewer of long ones."""
    batch: list[Record] = []
    size = 0
    for record in records:
        batch.append(record)
        size += _characters(record.fields)
        if len(batch) == CHUNK_RECORDS or size > _CHUNK_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list) else 8


_tokenizer: Any = None


def _begin(tokenizer: Tokenizer) -> None:
    global _tokenizer
    _tokenizer = tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent was interrupted as well, and ends this one


def _chunk_here(records: list[Record]) -> _Chunk:
    return _chunk(records, _tokenizer)


def _chunk(records: Iterable[Record], tokenizer: Tokenizer) -> _Chunk:
    left_out = LeftOut()
    rows = render_each(records, tokenizer, left_out)
    done = tokenise(rows, tokenizer)
    tokens = [np.where(is_label, ids.astype(np.uint32) | _LABEL, ids.astype(np.uint32)) for _, ids, is_label in done]
    digests = [_digests(row) for row in rows]
    return _Chunk(
        tokens=np.concatenate(tokens) if tokens else np.empty(0, np.uint32),
        lengths=[len(ids) for _, ids, _ in done],
        label_tokens=[int(is_label.sum()) for _, _, is_label in done],
        first_label=[int(is_label.argmax()) if is_label.any() else -1 for _, _, is_label in done],
        places=[row.where for row in rows],
        digests=[text for text, _ in digests],
        prompt_digests=[prompt for _, prompt in digests],
        flags=[_flags(row.text) for row in rows],
        largest_id=max((int(ids.max()) for _, ids, _ in done if len(ids)), default=0),
        left_out=left_out,
        forms=Counter(row.form for row in rows),
        labels=set(
            islice({row.text[row.label_spans[0][0] :]: None for row in rows if row.choices == ()}, MOST_LABELS + 1)
        ),
        has_choices=any(row.choices for row in rows),
    )


def _digests(row: Row) -> tuple[int, int]:
    text = _digest(row.text)
    prompt = row.text[: row.label_spans[0][0]].strip()
    return text, _digest(prompt) if prompt else text


def _digest(text: str) -> int:
    plain = "".join(text.split()).casefold().encode()
    return int.from_bytes(hashlib.blake2b(plain, digest_size=8).digest(), "little")


def _flags(text: str) -> int:
    """Whether a text is no language: signs instead of words, or the same again and again."""
    if len(text) < _LOOKED_AT:
        return 0
    solid = "".join(text.split())
    words = sum(map(str.isalnum, solid))
    flags = SALAD if words < (1 - _SALAD_SHARE) * len(solid) else 0
    raw = text.encode()
    if len(zlib.compress(raw, 1)) < _REPEATED_SHARE * len(raw):
        flags |= REPEATED
    return flags


# --- several sources as one ------------------------------------------------------------------------------------------


class Rows(Sequence[EncodedRow]):
    """Some rows of some token files, in an order; each is read when it is asked for."""

    def __init__(
        self, files: Sequence[TokenFile], file_N: np.ndarray, row_N: np.ndarray, *, max_length: int,
        tasks: Sequence[str | None] | None = None,
    ) -> None:  # fmt: skip
        self.files, self.file_N, self.row_N, self.max_length = files, file_N, row_N, max_length
        self.tasks = tasks or [None] * len(files)
        self.whole_lengths = self._gather(lambda file: file.lengths)
        """[N] tokens of each row before it is cut."""
        self.lengths = np.minimum(self.whole_lengths, max_length)
        """[N] tokens of each row."""

    def _gather(self, of: Callable[[TokenFile], np.ndarray]) -> np.ndarray:
        columns = [of(file) for file in self.files]
        found = np.zeros(len(self.row_N), dtype=columns[0].dtype)
        for number, column in enumerate(columns):
            mine = self.file_N == number
            found[mine] = column[self.row_N[mine]]
        return found

    @property
    def label_lengths(self) -> np.ndarray:
        """[N] label tokens of each row. Those of rows that are cut are counted, which reads them."""
        found = self.fact("label_tokens")
        for index in np.flatnonzero(self.whole_lengths > self.max_length):
            found[index] = self[int(index)].label_tokens
        return found

    def fact(self, name: str) -> np.ndarray:
        """[N] one of Facts, of whole rows."""
        return self._gather(lambda file: getattr(file.facts, name))

    def where(self, index: int) -> str:
        """`file:line` of a row."""
        return self.files[self.file_N[index]].where(int(self.row_N[index]))

    def take(self, indices: np.ndarray) -> Rows:
        """These rows of it, in this order; one may come several times."""
        return Rows(self.files, self.file_N[indices], self.row_N[indices], max_length=self.max_length, tasks=self.tasks)

    def __len__(self) -> int:
        return len(self.row_N)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self.files[self.file_N[index]].row(int(self.row_N[index]), max_length=self.max_length)


def joined(files: Sequence[TokenFile], *, max_length: int, tasks: Sequence[str | None] | None = None) -> Rows:
    """All rows of `files`, one after the other."""
    file_N = np.repeat(np.arange(len(files)), [len(file) for file in files])
    row_N = np.concatenate([np.arange(len(file)) for file in files])
    return Rows(files, file_N, row_N, max_length=max_length, tasks=tasks)


def stacked(parts: Sequence[Rows]) -> Rows:
    """All rows of `parts`, one after the other."""
    files = [file for part in parts for file in part.files]
    firsts = np.cumsum([0, *(len(part.files) for part in parts[:-1])])
    return Rows(
        files, np.concatenate([part.file_N + first for part, first in zip(parts, firsts, strict=True)]),
        np.concatenate([part.row_N for part in parts]), max_length=parts[0].max_length,
        tasks=[task for part in parts for task in part.tasks],
    )  # fmt: skip
