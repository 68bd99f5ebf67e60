"""Tensors that wait outside of the device's memory between forward and backward.

Of a GPU they go to page-locked host memory, copied by a stream of its own beside the computation; of a CPU to an unnamed
file, since the host's memory is the budget's own there. They come back in the opposite order, so that the next one is
fetched while the last one is used.

To whoever records operations (a plan), a tensor dies when nothing but the shelf knows it, and another one is born when
it comes back: what copies hold on the way is held by references here, the same on every device.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_keys = count()


@dataclass(eq=False)
class Waiting:
    """One tensor that is away. Its data is given up when this object is gone."""

    shelf: Shelf
    key: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    back: Tensor | None = None
    """On its way back, or there."""

    def fetch(self) -> None:
        """Begin to bring it back."""
        if self.back is None:
            self.back = bring_back(list(self.shape), self.dtype, self.device, self.key)


class Shelf:
    """What is away, last in first out."""

    def __init__(self) -> None:
        self._waiting: list[weakref.ref[Waiting]] = []  # a graph that is dropped without a backward takes its own along
        self._leaving: Tensor | None = None

    def put(self, x: Tensor) -> Waiting:
        """Send `x` away. Its memory is free when its last other owner lets it go, and the next one is put."""
        waiting = Waiting(self, next(_keys), tuple(x.shape), x.dtype, x.device)
        _left(self._leaving)
        put_away(x.detach(), waiting.key)
        weakref.finalize(waiting, _give_up, waiting.key)
        self._leaving = x.detach()
        self._waiting.append(weakref.ref(waiting))
        return waiting

    def get(self, waiting: Waiting) -> Tensor:
        """The tensor again, and begin to bring back the one that was put before it."""
        _left(self._leaving)
        self._leaving = None
        waiting.fetch()
        x, waiting.back = waiting.back, None
        assert x is not None
        _arrived(x, waiting.key)
        while self._waiting:
            before = self._waiting.pop()()
            if before is not None and before is not waiting:
                self._waiting.append(weakref.ref(before))
                before.fetch()
                break
        return x


@torch.library.custom_op("snugtune::put_away", mutates_args=())
def put_away(x: Tensor, key: int) -> None:
    """Begin to copy `x` to where it waits under `key`."""
    _places[key] = _Pinned(x) if x.is_cuda else _InFile(x)


@put_away.register_fake
def _(x: Tensor, key: int) -> None:
    pass


@torch.library.custom_op("snugtune::bring_back", mutates_args=())
def bring_back(shape: list[int], dtype: torch.dtype, device: torch.device, key: int) -> Tensor:
    """A new tensor, to which the copy of what waits under `key` begins."""
    x = torch.empty(shape, dtype=dtype, device=device)
    _places[key].copy_to(x)
    return x


@bring_back.register_fake
def _(shape: list[int], dtype: torch.dtype, device: torch.device, key: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


_places: dict[int, Any] = {}


def _give_up(key: int) -> None:
    place = _places.pop(key, None)
    if place is not None:
        place.close()


def _left(x: Tensor | None) -> None:
    """Before the memory of `x` may be used again, its copy must be done."""
    if x is not None and x.is_cuda:
        torch.cuda.current_stream(x.device).wait_stream(_copies(x.device))


def _arrived(x: Tensor, key: int) -> None:
    if x.is_cuda:
        torch.cuda.current_stream(x.device).wait_event(_places[key].done)


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _copies(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


class _Pinned:
    """Page-locked host memory. torch keeps such blocks and gives them out again."""

    def __init__(self, x: Tensor) -> None:
        side = _copies(x.device)
        side.wait_stream(torch.cuda.current_stream(x.device))  # which computes x
        self.host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        with torch.cuda.stream(side):
            self.host.copy_(x, non_blocking=True)
        self.done: Any = None

    def copy_to(self, x: Tensor) -> None:
        side = _copies(x.device)
        side.wait_stream(torch.cuda.current_stream(x.device))  # which may still use the memory that x was given
        with torch.cuda.stream(side):
            x.copy_(self.host, non_blocking=True)
            self.done = side.record_event()

    def close(self) -> None:
        if self.done is not None:  # a tensor that was given up on its way back: its memory is written to until then
            torch.cuda.current_stream().wait_event(self.done)


class _File:
    """A file without a name, and which parts of it are free."""

    def __init__(self) -> None:
        # Where /tmp is memory, a file there would save none.
        folder = os.environ.get("TMPDIR") or ("/var/tmp" if Path("/var/tmp").is_dir() else None)
        self.opened = tempfile.TemporaryFile(prefix="snugtune-", dir=folder)  # noqa: SIM115  as long as the process
        self.end = 0
        self.free: dict[int, list[int]] = {}

    def take(self, size: int) -> int:
        if self.free.get(size):
            return self.free[size].pop()
        start, self.end = self.end, self.end + size
        return start


_file: list[_File] = []


class _InFile:
    def __init__(self, x: Tensor) -> None:
        if not _file:
            _file.append(_File())
        self.size = x.nbytes
        self.start = _file[0].take(self.size)
        data, done = _bytes_of(x.contiguous()), 0
        while done < self.size:
            done += os.pwrite(_file[0].opened.fileno(), data[done:], self.start + done)

    def copy_to(self, x: Tensor) -> None:
        data, done = _bytes_of(x), 0
        while done < self.size:
            read = os.preadv(_file[0].opened.fileno(), [data[done:]], self.start + done)
            assert read, "the file of tensors that wait was cut off"
            done += read

    def close(self) -> None:
        _file[0].free.setdefault(self.size, []).append(self.start)


def _bytes_of(x: Tensor) -> memoryview:
    return memoryview(x.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  numpy says so from 2.0 on
