"""The device at hand: how much memory it has, how much is in use, and the wall that keeps a run inside its budget.

On a CPU the budget is the resident memory of the whole process; on CUDA it is what the allocator holds. No torch at
import: the CPU part needs none.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import psutil

from snugtune import cards
from snugtune.cards import DeviceSpec
from snugtune.errors import RecipeError
from snugtune.units import MIB

CUDA_CONTEXT_BYTES = 512 * MIB
"""What a process holds on a card before its first tensor. Published figures, none of them measured by us: 274 MiB
(pytorch#86509, lazy loading of kernels), about 300 MB and 400 MB (pytorch#107667 and #109888), 256 MiB (RTX 3090, CUDA
12.8, InvokeAI#9413), 426 MiB (RTX 6000 Ada, CUDA 13.0, unsloth-zoo#1053). It grows by each kernel that is loaded, for which
the rest is left. With a card at hand, measure it instead."""
_TORCH_SETTINGS = {
    # Segments that grow in place leave nearly no gaps; the plan's model of the allocator assumes them.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    # A CPU's 16-bit products are prepared for each shape by oneDNN, which keeps 1,024 of them, and torch as many more: about
    # a MiB each, so that a run grew by 10 MiB with each micro-batch of another length. The blocks of one share some 20 shapes.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32",
    "LRU_CACHE_CAPACITY": "32",
}
"""Set before torch first computes, when it reads them; what the user has set stays."""
_PRELOADED = "SNUGTUNE_ALLOCATOR"
_WALL_SLACK_BYTES = 24 * MIB
"""Pages of libraries that are read in after the wall stands (measured: 11 to 20 MiB)."""


def find(name: str) -> DeviceSpec:
    """The device that a recipe names: auto, cpu or cuda for the one at hand, or a card of the table.

    Raises:
        RecipeError: for a name that is neither, or cuda where there is none.
    """
    return detect(name) if is_at_hand(name) else cards.find(name)


def detect(kind: str = "auto") -> DeviceSpec:
    """The device that a run would use. Raises RecipeError where cuda is asked for and there is none."""
    import torch

    for name, value in _TORCH_SETTINGS.items():
        os.environ.setdefault(name, value)
    available = torch.cuda.is_available()
    if kind == "cuda" and not available:
        raise RecipeError("device cuda was asked for, but torch sees no CUDA device here; set device=cpu")
    if kind == "cpu" or not available:
        # Whether bf16 pays there is measured at the model's own widths; the flags tell it wrongly.
        return DeviceSpec("cpu", _cpu_name(), psutil.virtual_memory().total, has_bf16=False)
    facts = torch.cuda.get_device_properties(0)
    try:
        known = cards.find(facts.name)
    except RecipeError:  # a card that the table does not have is run and planned, but its speed is not known
        known = DeviceSpec("cuda", facts.name, facts.total_memory, has_bf16=False)
    return replace(
        known, name=facts.name, memory_bytes=facts.total_memory, compute_capability=(facts.major, facts.minor),
        has_bf16=torch.cuda.is_bf16_supported(including_emulation=False),
    )  # fmt: skip


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = "CPU"
    return f"{name}, {os.cpu_count()} cores"


def is_at_hand(name: str) -> bool:
    """Whether a recipe's device means the one of this machine, and not a card to plan for."""
    return name in ("auto", "cpu", "cuda")


def free_bytes(spec: DeviceSpec) -> int:
    """Memory that a run could take now; of a card that is not at hand, all of it."""
    if spec.kind == "cuda":
        import torch

        if torch.cuda.is_available() and torch.cuda.get_device_name(0) == spec.name:
            return torch.cuda.mem_get_info()[0]
        return spec.memory_bytes
    return psutil.virtual_memory().available


# --- the process -----------------------------------------------------------------------------------------------------


def _status(key: str) -> int | None:
    """A line of /proc/self/status in bytes, where there is one (Linux)."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def resident_bytes() -> int:
    """Memory of this process now."""
    return psutil.Process().memory_info().rss


def peak_bytes(spec: DeviceSpec) -> int:
    """The most that was in use since the start: of the process on a CPU; on CUDA what the allocator held, and the context."""
    if spec.kind == "cuda":
        import torch

        # The context is what the plan takes for it: torch cannot tell one process's share from the card's other users.
        return torch.cuda.max_memory_reserved() + CUDA_CONTEXT_BYTES
    found = _status("VmHWM")
    if found is not None:
        return found
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def set_wall(spec: DeviceSpec, budget_bytes: int) -> None:
    """Make an allocation past the budget fail, as an exception that can be handled, and not the machine.

    On Linux it is the data segment's limit, which counts private memory: anonymous pages and the map of the weights.
    What else is resident, pages of libraries, is taken off first; what is reserved but untouched (stacks of threads) is
    not resident and is let through.
    """
    if spec.kind == "cuda":
        import torch

        allocator_bytes = max(budget_bytes - CUDA_CONTEXT_BYTES, 0)
        torch.cuda.set_per_process_memory_fraction(min(1.0, allocator_bytes / spec.memory_bytes))
        return
    libraries, private, resident = _status("RssFile"), _status("VmData"), _status("RssAnon")
    if libraries is None or private is None or resident is None:
        return
    untouched = max(private - resident, 0)
    soft = max(budget_bytes - libraries - _WALL_SLACK_BYTES + untouched, private)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def has_wall() -> bool:
    """Whether `set_wall` can hold a CPU run here: Linux counts what the limit needs."""
    return _status("VmData") is not None


def take_down_wall(spec: DeviceSpec) -> None:
    """Let the process be as large as it was allowed to be before the wall stood."""
    if spec.kind == "cuda":
        import torch

        torch.cuda.set_per_process_memory_fraction(1.0)
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that an allocation was refused, on any device."""
    if isinstance(error, MemoryError):
        return True
    text = str(error).lower()
    words = ("can't allocate memory", "cannot allocate memory", "out of memory")
    return isinstance(error, RuntimeError) and any(word in text for word in words)


# --- the allocator ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Allocator:
    """The malloc under torch's CPU tensors."""

    name: Literal["mimalloc", "system"]
    overhead: float
    """Resident over live bytes, for what comes and goes."""
    fragment_share: float
    """Besides, freed pieces between small blocks: this share of what comes and goes ..."""
    fragment_bytes: int
    """... up to so much: large tensors are mapped on their own and leave none."""
    reserve_bytes: int
    """What it maps besides, untouched: the wall counts it, so that a plan must leave it free."""
    reserve_share: float
    """And so much more of it for each byte that comes and goes: addresses that are free but stay mapped."""
    hole_share: float = 0.0
    """Of gradients that gather while activations go: they lie in holes which those left and are a little too large."""

    def resident_bytes(self, changing_bytes: int) -> int:
        """What so many live bytes that come and go make of the process."""
        return round(changing_bytes * self.overhead + min(changing_bytes * self.fragment_share, self.fragment_bytes))


_MIMALLOC = Allocator(
    "mimalloc", overhead=1.04, fragment_share=0.16, fragment_bytes=64 * MIB, reserve_bytes=64 * MIB, reserve_share=0.1,
    hole_share=0.15,
)  # fmt: skip
"""From runs of the demo model whose changing bytes were 100 to 2,500 MiB (docs/LOG.md)."""
_SYSTEM = Allocator(
    "system", overhead=1.75, fragment_share=0.0, fragment_bytes=0, reserve_bytes=64 * MIB, reserve_share=0.1
)
"""glibc keeps freed blocks of a step in fragments: 1.6 to 1.75 times what is alive (measured on the demo model)."""


def allocator() -> Allocator:
    """The allocator that this process runs on."""
    return _MIMALLOC if os.environ.get(_PRELOADED) == "mimalloc" else _SYSTEM


def release_free_memory() -> None:
    """Give freed memory back between phases, so that the peak of one does not stand under the next."""
    import torch

    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    name, argument = ("mi_collect", True) if allocator() is _MIMALLOC else ("malloc_trim", 0)
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError):  # no such call in this C library
        return
    function(argument)


def restart_on_mimalloc() -> None:
    """Start this very command again with mimalloc in front of the C library's malloc, once.

    glibc keeps freed blocks of a training step in fragments, so that a process stays far larger than what is alive in
    it; on mimalloc a peak follows what is alive. (tcmalloc does too, but maps so much besides that the wall is hit early.)
    Does nothing off Linux or where the library is not installed.
    """
    if _PRELOADED in os.environ or not sys.platform.startswith("linux"):
        return
    libraries = (Path(entry) / "cmeel.prefix" / "lib" / "libmimalloc.so" for entry in sys.path)
    library = next((str(file) for file in libraries if file.exists()), None)
    if library is None:
        return
    preload = ":".join(filter(None, [library, os.environ.get("LD_PRELOAD")]))
    # What mimalloc would commit ahead counts against the wall.
    settings = {"LD_PRELOAD": preload, _PRELOADED: "mimalloc", "MIMALLOC_ARENA_EAGER_COMMIT": "0"}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **settings})
