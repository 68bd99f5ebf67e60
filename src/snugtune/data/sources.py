"""Files to records: one plain dict a row, with the line that it stands on.

A row is passed on as written. A file that is damaged (a line that is no JSON, bytes that are no UTF-8) stops the run with
file and line; what is wrong with a single row is judged later, by rows.py.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

from snugtune.errors import DataError

PACKAGED = ("demo", "banking77")
DEMO_INTENTS = (
    "age_limit", "cancel_transfer", "card_arrival", "card_swallowed", "change_pin", "exchange_rate",
    "lost_or_stolen_card", "receiving_money", "request_refund", "top_up_failed",
)  # fmt: skip
"""Ten intents that a person tells apart at a glance."""
_FORMATS = (".jsonl", ".json", ".csv", ".txt")


@dataclass(frozen=True)
class Record:
    """One row as it stands in its file."""

    where: str
    """`file:line` for messages."""
    fields: dict[str, Any]


def check(name: str) -> None:
    """Raise DataError where `name` is neither packaged data nor a file of a format that we read."""
    if name in PACKAGED:
        return
    path = Path(name).expanduser()
    if path.is_dir():
        raise DataError(f"{name} is a folder; give a file ({', '.join(_FORMATS)}, also .gz) or demo")
    if not path.is_file():
        raise DataError(f"there is no data at {name}; give a file ({', '.join(_FORMATS)}, also .gz) or demo")
    if _kind(path) not in _FORMATS:
        raise DataError(f"{name} is in no format that is read here; there are: {', '.join(_FORMATS)}, also .gz")


def read(name: str, *, part: str = "train") -> Iterator[Record]:
    """Records of packaged data (its `train` or `test` part) or of a file, in order. Raises DataError as above."""
    check(name)
    if name in PACKAGED:
        yield from _packaged(name, part)
        return
    path = Path(name).expanduser()
    reader = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".txt": _txt}[_kind(path)]
    with _open(path) as file:
        yield from reader(file, path.name)


def _kind(path: Path) -> str:
    return Path(path.stem).suffix.lower() if path.suffix.lower() == ".gz" else path.suffix.lower()


@contextmanager
def _open(path: Path) -> Generator[TextIO]:
    """Text of a file, unpacked; a byte-order mark never becomes part of it."""
    try:
        with _raw(path) as raw:
            yield io.TextIOWrapper(raw, encoding="utf-8-sig", newline="")
    except UnicodeDecodeError as error:
        where = f"{path.name}:{_undecodable_line(path)}"
        raise DataError(f"{where} is not UTF-8 text ({error.reason}); save the file as UTF-8") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged: {error}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def _raw(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb"))


def _undecodable_line(path: Path) -> int:
    """The first line that is no UTF-8. Text is decoded in blocks, so that the error itself does not know it."""
    with _raw(path) as raw:
        for number, line in enumerate(raw, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError:
                return number
    return 1


def _jsonl(file: TextIO, name: str) -> Iterator[Record]:
    for number, line in enumerate(file, 1):  # newline="": only \n, \r\n and \r end a line, not U+2028 inside a string
        if not line.strip():
            continue
        where = f"{name}:{number}"
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is not JSON ({error}); the file is damaged or no .jsonl") from None
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


def _record(where: str, fields: Any) -> Record:
    if not isinstance(fields, dict):
        raise DataError(f"{where} is a {type(fields).__name__}, not an object with keys")
    return Record(where, fields)


def _packaged(name: str, part: str) -> Iterator[Record]:
    """BANKING77 as prompt and completion; intents are written as words, and each row names all answers of the set."""
    file = resources.files("snugtune.data") / "packaged" / f"banking77_{part}.csv.gz"
    with resources.as_file(file) as path, _open(path) as text:
        rows = [r for r in _csv(text, path.name) if name == "banking77" or r.fields["category"] in DEMO_INTENTS]
    choices = sorted({_answer(r.fields["category"]) for r in rows})
    for row in rows:
        prompt = f"Customer message: {row.fields['text']}\nIntent:"
        answer = _answer(row.fields["category"])
        yield Record(row.where, {"prompt": prompt, "completion": answer, "choices": choices})


def _answer(category: str) -> str:
    return " " + category.rstrip("?").replace("_", " ").lower()
