"""Safetensors files a few rows at a time, read and written.

The library maps a file, which counts as a whole against the wall and as far as it was read against the peak, or (its `pread`
backend, 0.8) reads a whole tensor for each few rows of it; and it writes a file from tensors that are all in memory. The
format is plain: the length of a JSON text in 8 bytes, the text, the tensors' bytes in any order.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from snugtune.errors import ModelError

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class Stored:
    """A tensor that is still in its file. `stored[3:5]` reads two of its rows, and nothing else, into memory of their own."""

    file: Path
    begin: int
    """Where in the file its first byte is."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """How many numbers it holds."""
        return torch.Size(self.shape).numel()

    def __getitem__(self, rows: slice) -> Tensor:
        """[R, ...]. A tensor without dimensions has one row. Raises ModelError where the file is shorter than it was."""
        start, stop, _ = rows.indices(self.shape[0] if self.shape else 1)
        shape = (max(stop - start, 0), *self.shape[1:])
        row_bytes = torch.Size(shape[1:]).numel() * self.dtype.itemsize
        buffer = torch.empty(shape[0] * row_bytes, dtype=torch.uint8)
        with self.file.open("rb") as opened:
            opened.seek(self.begin + start * row_bytes)
            if opened.readinto(buffer.numpy().data) != len(buffer):
                raise ModelError(f"{self.file} ended early; did something else write to it?")
        return buffer.view(self.dtype).reshape(shape)


def contents(file: Path) -> dict[str, Stored]:
    """The tensors of a file by name, in the order of their bytes. Raises ModelError for a dtype that is not known here."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        described = json.loads(opened.read(length))
    described.pop("__metadata__", None)
    found = {}
    for name, facts in sorted(described.items(), key=lambda item: item[1]["data_offsets"]):
        dtype = _DTYPES.get(facts["dtype"])
        if dtype is None:
            raise ModelError(
                f"{file}: {name} is stored as {facts['dtype']}, which is not read here; take 16 or 32 bits"
            )
        found[name] = Stored(file, 8 + length + facts["data_offsets"][0], tuple(facts["shape"]), dtype)
    return found


def header(tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]]) -> bytes:
    """The beginning of a file that goes on with the bytes of these tensors (name, dtype, shape), in this order."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape in tensors:
        end = offset + torch.Size(shape).numel() * dtype.itemsize
        described[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor as a file holds them; copied only where it is not contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
