"""A dispatch mode that sees every storage born and die, and prices every operation.

Memory that an operation takes inside its kernel (scratch of a matrix product) is not seen here: the allowance for it is
the device's.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Kind = Literal["weights", "adapter", "gradients", "optimiser", "activations", "loss", "buffers"]


class Seconds(NamedTuple):
    """What operations take, by what of the device they keep busy."""

    product: float = 0.0
    """Matrix products."""
    traffic: float = 0.0
    """What moves bytes within the device's memory."""
    launch: float = 0.0
    """Starting operations."""
    link: float = 0.0
    """Copies to and from the host's memory, which run beside the rest."""

    def plus(self, more: Seconds) -> Seconds:
        """Both, one after the other."""
        return Seconds(*(a + b for a, b in zip(self, more, strict=True)))


Price = Callable[[Any, Any, Any], Seconds]
"""Of one operation, from (operation, arguments, result)."""

_DEVICE = torch.ops.prim.device.default
_ADD = torch.ops.aten.add.Tensor
_WRAPPERS = ("torch/_compile.py", "torch/_dynamo/eval_frame.py")
"""Frames that torch puts around a dispatch mode's method."""


class Blocks(Protocol):
    """An allocator that the stream of births and deaths drives."""

    @property
    def reserved_bytes(self) -> int:
        """What the device has given and not got back."""
        ...

    def allocate(self, key: int, size: int) -> Any:
        """Take `size` bytes."""

    def free(self, key: int) -> Any:
        """Give them back."""

    def empty_cache(self) -> Any:
        """Give unused segments back to the device."""


@dataclass(frozen=True)
class Alive:
    """One storage at the moment of a peak."""

    kind: Kind
    size_bytes: int
    made_by: str
    """The operation, or the tensor's own name."""
    where: str
    """Source line of the nearest caller outside of torch."""


class LiveBytes(TorchDispatchMode):
    """Bytes alive in the storages that operations returned while it is on, and the most that ever were.

    What stood before counts from when an operation first returns it: note it beforehand. Given `blocks`, the peak is that
    of what the allocator holds, else of what is alive.

    autograd adds up gradients in place where nobody else holds the first; under any dispatch mode it makes a new tensor
    instead. Such an addition is looked at when the next operation begins: if one of its inputs has died by then, the real
    run would have written into that one.
    """

    def __init__(self, *, blocks: Blocks | None = None, price: Price | None = None, tell: bool = False) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self.peak_live_bytes = 0
        self.seconds = Seconds()
        """Of all operations since it was last set to zero."""
        self._blocks, self._price, self._tell = blocks, price, tell
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}
        """id of a storage -> (the storage, its serial number)."""
        self._alive: dict[int, int] = {}
        """Serial number of a block -> its bytes."""
        self._serial = 0
        self._sum: int | None = None
        """The block of a sum of gradients that may turn out to be one of its inputs."""
        self._same_as: dict[int, int] = {}
        self._ignored: set[int] = set()
        self._kinds: dict[int, Kind] = {}
        self._origins: dict[int, tuple[str, str]] = {}
        self._peak_is_now = False
        self._at_peak: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, then note the storages of what it returned."""
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # half of all calls
        self.settle()
        out = func(*args, **(kwargs or {}))
        if self._price:
            self.seconds = self.seconds.plus(self._price(func, args, out))
        self._note_all(out, func, adds_gradients=func is _ADD and _called_by_autograd())
        return out

    def note(self, tensors: Any, kind: Kind = "activations", names: Iterable[str] = ()) -> None:
        """Count the storages of these tensors that are not known yet, until they die; `kind` holds for the known ones too."""
        self._note_all(tensors, None, adds_gradients=False)
        named = dict(zip((id(t) for t in tree_leaves(tensors)), names, strict=False))
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor):
                serial = self._known[id(tensor.untyped_storage())][1]
                self._kinds[serial] = kind
                if id(tensor) in named:
                    self._origins[serial] = (named[id(tensor)], "")

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Leave these out: they are in another memory (moments in the host's)."""
        for tensor in tensors:
            serial = self._known[id(tensor.untyped_storage())][1]
            if serial in self._alive:
                self._ignored.add(serial)
                self._give_back(serial)

    def begin(self) -> None:
        """Begin a new part: the peak is what is in use now."""
        self.settle()
        self.peak_bytes, self.peak_live_bytes = self.in_use_bytes, self.live_bytes
        self._peak_is_now = True

    def release(self) -> None:
        """What the run does between phases: hand free memory back."""
        if self._blocks:
            self._blocks.empty_cache()

    @property
    def tells(self) -> bool:
        """Whether `at_peak` can be asked."""
        return self._tell

    @property
    def in_use_bytes(self) -> int:
        """What the device's memory holds now."""
        return self._blocks.reserved_bytes if self._blocks else self.live_bytes

    def at_peak(self) -> dict[int, int]:
        """What was alive at this part's peak of live bytes: for `describe`, which names what is known by then. Only with `tell`."""
        return dict(self._alive if self._peak_is_now else self._at_peak)

    def describe(self, blocks: dict[int, int]) -> list[Alive]:
        """The storages of a peak, largest first."""
        found = [Alive(self._kind(s), size, *self._origins.get(s, ("", ""))) for s, size in blocks.items()]
        return sorted(found, key=lambda alive: -alive.size_bytes)

    def _note_all(self, tensors: Any, func: Any, *, adds_gradients: bool) -> None:
        # Nearly every operation returns one tensor; walking a tree for it costs as much as noting it.
        for tensor in (tensors,) if isinstance(tensors, Tensor) else tree_leaves(tensors):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if id(storage) not in self._known:
                    self._born(storage, func, adds_gradients=adds_gradients)

    def _born(self, storage: Any, func: Any, *, adds_gradients: bool) -> None:
        size, key = storage.nbytes(), id(storage)
        self._serial = serial = self._serial + 1

        def died(_: Any) -> None:
            self._known.pop(key, None)
            self._died(serial, size)

        self._known[key] = (weakref.ref(storage, died), serial)
        if self._tell:
            self._origins[serial] = (str(func) if func is not None else "", _source_line())
        if adds_gradients:
            self._sum = serial
            self._alive[serial] = size
            return
        self._take(serial, size)

    def _take(self, serial: int, size: int) -> None:
        self._alive[serial] = size
        self.live_bytes += size
        if self._blocks and size:
            self._blocks.allocate(serial, size)
        self.peak_bytes = max(self.peak_bytes, self.in_use_bytes)
        if self.live_bytes > self.peak_live_bytes:
            self.peak_live_bytes = self.live_bytes
            self._peak_is_now = True

    def _died(self, serial: int, size: int) -> None:
        if serial in self._ignored:
            self._ignored.discard(serial)
        elif self._sum is not None and serial != self._sum and self._alive[self._sum] == size:
            self._same_as[self._sum] = self._same_as.pop(serial, serial)  # the sum lives on in this block
            self._forget_peak_before_death()
            del self._alive[serial]
            self._sum = None
        elif serial == self._sum:
            self.settle()
            self._give_back(serial)
        else:
            self._give_back(serial)

    def _give_back(self, serial: int) -> None:
        self._forget_peak_before_death()
        size = self._alive.pop(serial)
        self.live_bytes -= size
        block = self._same_as.pop(serial, serial)
        if self._blocks and size:
            self._blocks.free(block)

    def _forget_peak_before_death(self) -> None:
        """The peak was until now: keep what was alive in it."""
        if self._peak_is_now and self._tell:
            self._at_peak = dict(self._alive)
        self._peak_is_now = False

    def settle(self) -> None:
        """A sum of gradients whose inputs still live has memory of its own."""
        if self._sum is not None:
            serial, self._sum = self._sum, None
            self._take(serial, self._alive[serial])

    def _kind(self, serial: int) -> Kind:
        if serial in self._kinds:
            return self._kinds[serial]
        return "loss" if "chunked_loss.py" in self._origins.get(serial, ("", ""))[1] else "activations"


def _called_by_autograd() -> bool:
    """Whether the engine itself asks for this operation, and no Python function of a backward."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.endswith(_WRAPPERS):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name == "_engine_run_backward"


def _source_line() -> str:
    frame: Any = sys._getframe(3)
    nearest = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if "/torch/" not in name and not name.endswith(("planner/live.py", "<string>")):
            for package in ("snugtune/", "transformers/"):
                if package in name:
                    short = name[name.rindex(package) :]
                    return f"{short}:{frame.f_lineno}"
            nearest = nearest or name
        frame = frame.f_back
    return nearest
