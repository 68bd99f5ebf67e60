"""Files, hub data sets and packaged data to records: one plain dict a row, with the line that it stands on.

A row is passed on as written. A file that is damaged (a line that is no JSON, bytes that are no UTF-8) stops the run with
file and line, unless the recipe says that such lines are left out; what is wrong with a single row is judged later, by
rows.py. A file is read a row at a time, but for a .json, which is one value and is read whole.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import importlib
import io
import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

from snugtune.errors import DataError
from snugtune.recipe import DataSource
from snugtune.units import MIB

PACKAGED = ("demo", "banking77")
DEMO_INTENTS = (
    "age_limit", "cancel_transfer", "card_arrival", "card_swallowed", "change_pin", "exchange_rate",
    "lost_or_stolen_card", "receiving_money", "request_refund", "top_up_failed",
)  # fmt: skip
"""Ten intents that a person tells apart at a glance."""
_FORMATS = (".jsonl", ".json", ".csv", ".parquet", ".txt")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_SMALL_BYTES = 2 * MIB
BROKEN = "the line is no JSON"
Broken = Callable[[str, str], None]
"""Called with (reason, place) for a line that is left out."""


@dataclass(frozen=True)
class Record:
    """One row as it stands in its file."""

    where: str
    """`file:line` for messages."""
    fields: dict[str, Any]


def check(name: str) -> None:
    """Raise DataError where `name` is neither packaged data, nor a file of a format that we read, nor an id of the hub."""
    path = Path(name).expanduser()
    if name in PACKAGED or _is_hub_id(name):
        return
    if path.is_dir():
        raise DataError(f"{name} is a folder; give a file ({', '.join(_FORMATS)}, also .gz) or demo")
    if not path.is_file():
        raise DataError(f"there is no data at {name}; give a file ({', '.join(_FORMATS)}, also .gz) or demo")
    if _kind(path) not in _FORMATS:
        raise DataError(f"{name} is in no format that is read here; there are: {', '.join(_FORMATS)}, also .gz")
    if _kind(path) == ".parquet":
        if path.suffix.lower() == ".gz":
            raise DataError(f"{name}: a .parquet is packed inside already; unpack it once (gunzip)")
        _library("pyarrow.parquet", f"reading {name}")


def _is_hub_id(name: str) -> bool:
    path = Path(name).expanduser()
    return (
        bool(_HUB_ID.fullmatch(name)) and not path.exists() and _kind(path) not in _FORMATS and not path.parent.is_dir()
    )


def _library(module: str, what: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise DataError(f"{what} needs {module.split('.')[0]}; bring it with: pip install 'snugtune[data]'") from None


def read(
    name: str | DataSource,
    *,
    part: str = "train",
    broken: Broken | None = None,
    reached: Callable[[int], None] | None = None,
) -> Iterator[Record]:
    """Records of packaged data (its `train` or `test` part), a file or a data set of the hub, in order.

    Args:
        name: of the data, or with it what its columns are called.
        part: of data that has several.
        broken: takes the lines of a .jsonl that are no JSON; None: such a line stops it.
        reached: told now and then how many bytes of the file are read (see `size_bytes`).

    Raises:
        DataError: as `check`, and for a damaged file.
    """
    source = DataSource(path=name) if isinstance(name, str) else name
    check(source.path)
    for record in _records(source.path, part, broken, reached):
        yield _renamed(record, source.columns) if source.columns else record


def size_bytes(name: str) -> int:
    """Of a file, for progress; 0 of other data."""
    path = Path(name).expanduser()
    return path.stat().st_size if name not in PACKAGED and path.is_file() else 0


def identity(name: str, part: str) -> str | None:
    """Changes whenever the content of the data does; None where that cannot be told."""
    packaged = name in PACKAGED
    if _is_hub_id(name) and not packaged:
        return None
    try:
        with (
            _packaged_file(part) if packaged else nullcontext(Path(name).expanduser()) as path,
            path.open("rb") as file,
        ):
            return f"{name if packaged else 'file'} {hashlib.file_digest(file, 'sha256').hexdigest()}"
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error}") from None


def is_small(name: str) -> bool:
    """Whether it is read before other processes would have begun to help."""
    return name in PACKAGED or 0 < size_bytes(name) < _SMALL_BYTES


def _packaged_file(part: str) -> AbstractContextManager[Path]:
    return resources.as_file(resources.files("snugtune.data") / "packaged" / f"banking77_{part}.csv.gz")


def _records(name: str, part: str, broken: Broken | None, reached: Callable[[int], None] | None) -> Iterator[Record]:
    if name in PACKAGED:
        yield from _packaged(name, part)
        return
    if _is_hub_id(name):
        yield from _hub(name, part)
        return
    path = Path(name).expanduser()
    if _kind(path) == ".parquet":
        yield from _parquet(path)
        return
    with _open(path, reached) as file:
        if _kind(path) == ".jsonl":
            yield from _jsonl(file, path.name, broken)
        else:
            yield from {".json": _json, ".csv": _csv, ".txt": _txt}[_kind(path)](file, path.name)


def _renamed(record: Record, columns: dict[str, str]) -> Record:
    """The fields under the names that we know them by. Where a column of `columns` is absent, a name of ours stands for itself."""
    fields = record.fields
    there = {ours: theirs for ours, theirs in columns.items() if theirs in fields}
    kept = {key: value for key, value in fields.items() if key not in there and key not in there.values()}
    return Record(record.where, kept | {ours: fields[theirs] for ours, theirs in there.items()})


def _kind(path: Path) -> str:
    return Path(path.stem).suffix.lower() if path.suffix.lower() == ".gz" else path.suffix.lower()


@contextmanager
def _open(path: Path, reached: Callable[[int], None] | None = None) -> Generator[TextIO]:
    """Text of a file, unpacked; a byte-order mark never becomes part of it."""
    try:
        with path.open("rb") as file, _unpacked(path, file) as raw:
            yield _Watched(raw, file, reached)
    except UnicodeDecodeError as error:
        where = f"{path.name}:{_undecodable_line(path)}"
        raise DataError(f"{where} is not UTF-8 text ({error.reason}); save the file as UTF-8") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged: {error}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from None


class _Watched(io.TextIOWrapper):
    """Tells how far it has come, a block at a time."""

    def __init__(self, raw: BinaryIO, file: BinaryIO, reached: Callable[[int], None] | None) -> None:
        super().__init__(raw, encoding="utf-8-sig", newline="")
        self._file, self._reached, self._lines = file, reached, 0

    def __next__(self) -> str:
        self._lines += 1
        if self._reached and self._lines % 1000 == 0:
            self._reached(os.lseek(self._file.fileno(), 0, os.SEEK_CUR))
        return super().__next__()


def _unpacked(path: Path, file: BinaryIO) -> BinaryIO:
    return cast(BinaryIO, gzip.open(file, "rb") if path.suffix.lower() == ".gz" else file)


def _undecodable_line(path: Path) -> int:
    """The first line that is no UTF-8. Text is decoded in blocks, so that the error itself does not know it."""
    with path.open("rb") as file, _unpacked(path, file) as raw:
        for number, line in enumerate(raw, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                return number
    return 1


def _jsonl(file: TextIO, name: str, broken: Broken | None) -> Iterator[Record]:
    for number, line in enumerate(file, 1):  # newline="": only \n, \r\n and \r end a line, not U+2028 inside a string
        if not line.strip():
            continue
        where = f"{name}:{number}"
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            if broken is None:
                raise DataError(
                    f"{where} is not JSON ({error}); the file is damaged or no .jsonl. To use its other lines, set "
                    "data.skip_broken_lines=true"
                ) from None
            broken(BROKEN, where)
            continue
        yield _record(where, fields)


def _json(file: TextIO, name: str) -> Iterator[Record]:
    text = file.read()
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name} is not JSON: {error}") from None
    if isinstance(rows, dict):  # {"data": [...]}, as some exports wrap their rows
        lists = [value for value in rows.values() if isinstance(value, list)]
        rows = lists[0] if len(lists) == 1 else rows
    if not isinstance(rows, list):
        raise DataError(f"{name} holds no list of rows")
    for number, fields in enumerate(rows, 1):
        yield _record(f"{name} row {number}", fields)


def _csv(file: TextIO, name: str) -> Iterator[Record]:
    csv.field_size_limit(sys.maxsize)  # else a cell of over 131072 characters is an error
    reader = csv.reader(file, strict=True)
    try:
        header = next(reader, None)
        if header is None:
            return
        if len(set(header)) != len(header):
            raise DataError(f"{name}:1 names a column twice: {', '.join(header)}")
        first = reader.line_num + 1
        for cells in reader:
            where, first = f"{name}:{first}", reader.line_num + 1
            if not cells:
                continue
            if len(cells) != len(header):
                raise DataError(f"{where} has {len(cells)} cells, the header has {len(header)}")
            yield Record(where, dict(zip(header, cells, strict=True)))
    except csv.Error as error:
        raise DataError(f"{name}:{reader.line_num} is not CSV: {error}") from None


def _txt(file: TextIO, name: str) -> Iterator[Record]:
    """Paragraphs: what stands between blank lines."""
    paragraph: list[str] = []
    start = 1
    for number, line in enumerate(file, 1):
        if line.strip():
            start = start if paragraph else number
            paragraph.append(line.rstrip("\r\n"))
        elif paragraph:
            yield Record(f"{name}:{start}", {"text": "\n".join(paragraph)})
            paragraph = []
    if paragraph:
        yield Record(f"{name}:{start}", {"text": "\n".join(paragraph)})


def _parquet(path: Path) -> Iterator[Record]:
    """Batches of rows; values as Python has them."""
    pyarrow, parquet = _library("pyarrow", f"reading {path}"), _library("pyarrow.parquet", f"reading {path}")
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1000):
                for fields in batch.to_pylist():
                    number += 1
                    yield Record(f"{path.name} row {number}", fields)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read after row {number}: {error}") from None


def _hub(name: str, part: str) -> Iterator[Record]:
    """A data set of the hub, through `datasets` and its cache."""
    datasets = _library("datasets", f"{name} is no file here, and reading the hub")
    try:
        found = datasets.load_dataset(name, split=part)
    except Exception as error:  # noqa: BLE001  # whatever the network, the hub or the data set's own script raises
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DataError(f"there is no data at {name}: it is no file here, and the hub gave none ({first})") from None
    for number, fields in enumerate(found, 1):
        yield Record(f"{name} row {number}", dict(fields))


def _record(where: str, fields: Any) -> Record:
    if not isinstance(fields, dict):
        raise DataError(f"{where} is a {type(fields).__name__}, not an object with keys")
    return Record(where, fields)


def _packaged(name: str, part: str) -> Iterator[Record]:
    """BANKING77 as prompt and completion; intents are written as words, and each row names all answers of the set."""
    with _packaged_file(part) as path, _open(path) as text:
        rows = [r for r in _csv(text, path.name) if name == "banking77" or r.fields["category"] in DEMO_INTENTS]
    choices = sorted({_answer(r.fields["category"]) for r in rows})
    for row in rows:
        prompt = f"Customer message: {row.fields['text']}\nIntent:"
        answer = _answer(row.fields["category"])
        yield Record(row.where, {"prompt": prompt, "completion": answer, "choices": choices})


def _answer(category: str) -> str:
    return " " + category.rstrip("?").replace("_", " ").lower()
