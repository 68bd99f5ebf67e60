"""The device at hand: how much memory it has, how much is in use, and the wall that keeps a run inside its budget.

On a CPU the budget is the resident memory of the whole process; on CUDA it is what the allocator holds. No torch at
import: the CPU part needs none.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from snugtune.errors import RecipeError
from snugtune.units import MIB

Kind = Literal["cpu", "cuda"]
_PRELOADED = "SNUGTUNE_ALLOCATOR"
_WALL_SLACK_BYTES = 24 * MIB
"""Pages of libraries that are read in after the wall stands (measured: 11 to 20 MiB)."""


@dataclass(frozen=True)
class DeviceSpec:
    """What a plan needs to know about a device."""

    kind: Kind
    name: str
    memory_bytes: int
    has_bf16: bool
    """Whether products in bf16 are the faster choice there."""


def detect(kind: Literal["auto", "cpu", "cuda"] = "auto") -> DeviceSpec:
    """The device that a run would use. Raises RecipeError where cuda is asked for and there is none."""
    import torch

    available = torch.cuda.is_available()
    if kind == "cuda" and not available:
        raise RecipeError("device cuda was asked for, but torch sees no CUDA device here; set device=cpu")
    if kind == "cpu" or not available:
        # fp32 products are about 1.8 times as fast as bf16 ones on the CPUs that we measured, whatever the flags say.
        return DeviceSpec("cpu", _cpu_name(), psutil.virtual_memory().total, has_bf16=False)
    facts = torch.cuda.get_device_properties(0)
    return DeviceSpec("cuda", facts.name, facts.total_memory, has_bf16=torch.cuda.is_bf16_supported())


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = "CPU"
    return f"{name}, {os.cpu_count()} cores"


def free_bytes(spec: DeviceSpec) -> int:
    """Memory that a run could take now."""
    if spec.kind == "cuda":
        import torch

        return torch.cuda.mem_get_info()[0]
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
    """The most that was in use since the start: of the process on a CPU, of the allocator on CUDA."""
    if spec.kind == "cuda":
        import torch

        return torch.cuda.max_memory_reserved()
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

        torch.cuda.set_per_process_memory_fraction(min(1.0, budget_bytes / spec.memory_bytes))
        return
    libraries, private, resident = _status("RssFile"), _status("VmData"), _status("RssAnon")
    if libraries is None or private is None or resident is None:
        return
    untouched = max(private - resident, 0)
    soft = max(budget_bytes - libraries - _WALL_SLACK_BYTES + untouched, private)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


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
    text = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in text or "out of memory" in text.lower())


# --- the allocator ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Allocator:
    """The malloc under torch's CPU tensors."""

    name: Literal["mimalloc", "system"]
    overhead: float
    """Resident over live bytes, for what a step allocates."""
    reserve_bytes: int
    """What it maps besides, untouched: the wall counts it, so that a plan must leave it free."""
    reserve_share: float
    """And so much more of it for each byte that comes and goes: addresses that are free but stay mapped."""


_MIMALLOC = Allocator("mimalloc", overhead=1.08, reserve_bytes=64 * MIB, reserve_share=0.1)
_SYSTEM = Allocator("system", overhead=1.75, reserve_bytes=64 * MIB, reserve_share=0.1)
"""glibc keeps freed blocks of a step in fragments: 1.6 to 1.75 times what is alive (measured on the demo model)."""


def allocator() -> Allocator:
    """The allocator that this process runs on."""
    return _MIMALLOC if os.environ.get(_PRELOADED) == "mimalloc" else _SYSTEM


def release_free_memory() -> None:
    """Give freed memory back between phases, so that the peak of one does not stand under the next."""
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
