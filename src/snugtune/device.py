"""The device at hand: how much memory it has, how much is in use, and the wall that keeps a run inside its budget.

On a CPU the budget is the resident memory of the whole process; on CUDA it is what the allocator holds. No torch at
import: the CPU part needs none.
"""

from __future__ import annotations

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
_SYSTEM_TCMALLOC = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")
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
    What else is resident, pages of libraries, is taken off first.
    """
    if spec.kind == "cuda":
        import torch

        torch.cuda.set_per_process_memory_fraction(min(1.0, budget_bytes / spec.memory_bytes))
        return
    libraries = _status("RssFile")
    if libraries is None:
        return
    soft = max(budget_bytes - libraries - _WALL_SLACK_BYTES, _status("VmData") or 0)
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
    """The malloc under torch's CPU tensors. `overhead` is resident over live bytes for what a step allocates."""

    name: Literal["tcmalloc", "mimalloc", "system"]
    overhead: float


_ALLOCATORS = {
    # Measured on the demo model: (peak of the process - what was resident before the step) / live bytes.
    "tcmalloc": Allocator("tcmalloc", 1.04),
    "mimalloc": Allocator("mimalloc", 1.10),
    "system": Allocator("system", 1.45),
}


def allocator() -> Allocator:
    """The allocator that this process runs on."""
    return _ALLOCATORS[os.environ.get(_PRELOADED, "system")]


def restart_on_better_allocator() -> None:
    """Start this very command again on tcmalloc (if the system has it) or mimalloc (a package of ours), once.

    glibc keeps freed blocks of a training step in fragments, so that a process stays far larger than what is alive in
    it; with either of these a peak follows what is alive. Does nothing off Linux or where neither is found.
    """
    if _PRELOADED in os.environ or not sys.platform.startswith("linux"):
        return
    found = _find_tcmalloc() or _find_mimalloc()
    if found is None:
        return
    name, library = found
    preload = ":".join(filter(None, [library, os.environ.get("LD_PRELOAD")]))
    # Memory that mimalloc reserves ahead would count against the wall.
    settings = {"LD_PRELOAD": preload, _PRELOADED: name, "MIMALLOC_ARENA_EAGER_COMMIT": "0"}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **settings})


def _find_tcmalloc() -> tuple[str, str] | None:
    folders = (Path("/usr/lib"), Path("/usr/lib64"), Path(f"/usr/lib/{os.uname().machine}-linux-gnu"), Path("/usr/local/lib"))
    for folder in folders:
        for file in _SYSTEM_TCMALLOC:
            if (folder / file).exists():
                return "tcmalloc", str(folder / file)
    return None


def _find_mimalloc() -> tuple[str, str] | None:
    for entry in sys.path:
        library = Path(entry) / "cmeel.prefix" / "lib" / "libmimalloc.so"
        if library.exists():
            return "mimalloc", str(library)
    return None
