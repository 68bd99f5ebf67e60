"""What happened in a run, one JSON object a line, written as it happens; and how a file is replaced whole or not at all."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Progress = Callable[[str, int, int, dict[str, float]], None]
"""Called with (what is being done, done, total, facts) as something long goes on."""


def quiet(what: str, done: int, total: int, facts: dict[str, float]) -> None:
    """Progress that nobody looks at."""


class EventLog:
    """Append-only `events.jsonl`. Values are plain numbers and text, never tensors, so that no graph is kept alive."""

    def __init__(self, path: Path) -> None:
        # Half a surrogate pair (a file name that is no UTF-8) is written as JSON's own escape of it.
        self._file = path.open("a", encoding="utf-8", errors="backslashreplace")

    def write(self, event: str, **facts: Any) -> None:
        """Write one line and flush it, so that a killed run still tells what it did."""
        line = {"time": round(time.time(), 3), "event": event, **{key: _strict(value) for key, value in facts.items()}}
        self._file.write(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; further writes are an error."""
        self._file.close()


def _strict(value: Any) -> Any:
    """JSON knows no NaN and no infinity; they are written as text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def replace_text(path: Path, text: str) -> None:
    """Write `text` to `path` so that a reader sees the old file or the whole new one, even after a power cut."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable (POSIX needs the folder itself synced)."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
