"""What happened in a run, one JSON object a line, written as it happens; and how a file is replaced whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any


class EventLog:
    """Append-only `events.jsonl`. Values are plain numbers and text, never tensors, so that no graph is kept alive."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, event: str, **facts: Any) -> None:
        """Write one line and flush it, so that a killed run still tells what it did."""
        self._file.write(json.dumps({"time": round(time.time(), 3), "event": event, **facts}, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; further writes are an error."""
        self._file.close()


def replace_text(path: Path, text: str) -> None:
    """Write `text` to `path` so that a reader sees the old file or the whole new one, even after a power cut."""
    handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(aside).replace(path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable (POSIX needs the folder itself synced)."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
