"""Seconds of a step from what its operations ask and what the device gives.

An operation takes the longer of its arithmetic and its memory traffic (the roofline of Williams et al., 2009), and some
time to be started. A GPU works while the next operations are being started, a CPU does one thing after the other.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import platformdirs
import torch
from torch import Tensor

from snugtune.cards import DeviceSpec
from snugtune.events import replace_text
from snugtune.planner.live import Seconds
from snugtune.planner.simulate import Profile

_PRECISIONS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_CUDA_PRODUCTS = 0.65
"""Share of a card's peak that large products reach. A guess, not measured by us; docs/memory.md has the predictions that it
leads to beside published ones."""
_CUDA_TRAFFIC = 0.8
"""Share of the memory bandwidth that elementwise kernels reach, likewise."""
_CUDA_LAUNCH_SECONDS = 9e-6
"""Starting one operation from Python through autograd, likewise."""
_CPU_LAUNCH_SECONDS = 25e-6
"""The same on a CPU: Python, autograd and the threads that wait for each other. From the demo model's tokens/s with
micro-batches of 128, 256 and 512 tokens (results/plan_accuracy.jsonl, two cores)."""
_DENSE_PASSES = 4
"""How often unpacking 4-bit weights goes over its bytes."""
_HOST_PASSES, _CODE_PASSES = 6, 34
"""The same for an update whose moments come from the host, or from 8 bits: 3 and 12 times what torch's fused AdamW takes
(docs/LOG.md, measured on a CPU)."""
_FILE_BANDWIDTH = 1.5e9
"""Bytes/s to and from a file that the system keeps in its cache: a guess, which the probe corrects."""
_BACKWARD_PER_FORWARD = 2.5
"""Products of attention's backward for each of its forward (five for two: scores again, dV, dP, dQ, dK)."""


@dataclass(frozen=True)
class Rates:
    """What a device really reaches."""

    flops: Mapping[str, float]
    """FLOP/s of products by precision."""
    bandwidth: float
    """Bytes/s of elementwise operations, reads and writes together."""
    launch_seconds: float
    link_bandwidth: float = 0.0
    overlaps: bool = False
    """Whether starting operations runs beside them."""
    source: str = ""

    def price(self, func: Any, args: Any, out: Any) -> Seconds:
        """Seconds of one operation."""
        if _is_free(func):
            return Seconds()
        if _name(func) in ("put_away", "bring_back"):
            return Seconds(launch=self.launch_seconds, link=self.link_seconds(_bytes(args) + _bytes(out)))
        moved = _bytes(args) + (0 if _name(func).endswith("_") else _bytes(out))
        flops, dtype = _flops(func, args)
        traffic = moved * _passes(_name(func), args) / self.bandwidth
        if dtype is None:
            return Seconds(0.0, traffic, self.launch_seconds)
        # A product in a precision that has no figure (LoRA's float32 side, say) is small beside those that have one.
        rate = self.flops.get(_PRECISIONS.get(dtype, "")) or next(iter(self.flops.values()))
        return Seconds(max(flops / rate, traffic), 0.0, self.launch_seconds)

    def gradient_seconds(self, profile: Profile, *, share: float = 1.0) -> float:
        """Forward and backward of a micro-batch that has `share` of the tokens of the profile's first one."""
        took = profile.seconds
        busy, link = share * (took.product + took.traffic), share * took.link
        return max(busy, took.launch, link) if self.overlaps else busy + took.launch + link

    def link_seconds(self, moved_bytes: float) -> float:
        """Moving so many bytes between the device and the host; from and to a file where they are the same."""
        return moved_bytes / (self.link_bandwidth or _FILE_BANDWIDTH)


def rates(spec: DeviceSpec) -> Rates:
    """What a card of the table should reach, from its peaks. A CPU is measured."""
    return Rates(
        {precision: _CUDA_PRODUCTS * peak for precision, peak in spec.flops.items()}, _CUDA_TRAFFIC * spec.memory_bandwidth,
        _CUDA_LAUNCH_SECONDS, spec.link_bandwidth, overlaps=True, source=spec.source,
    )  # fmt: skip


def _file(spec: DeviceSpec) -> Path:
    name = "".join(c if c.isalnum() else "-" for c in spec.name)
    return platformdirs.user_cache_path("snugtune") / "rates" / f"{name}.json"


def keep(measured: Rates, spec: DeviceSpec) -> None:
    """Remember what was measured of this device."""
    _file(spec).parent.mkdir(parents=True, exist_ok=True)
    replace_text(_file(spec), json.dumps(asdict(measured), indent=2) + "\n")


def kept(spec: DeviceSpec) -> Rates | None:
    """What `keep` remembered of this device."""
    try:
        return Rates(**json.loads(_file(spec).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def measure(spec: DeviceSpec, *, precision: str, tokens: int, width: int, inner: int) -> Rates:
    """What the device at hand reaches now, at a model's own shapes: under a second.

    Args:
        spec: the device.
        precision: of the products.
        tokens: rows of the products.
        width: the model's hidden size.
        inner: its MLP's.
    """
    dtype = {name: kind for kind, name in _PRECISIONS.items()}[precision]
    device = spec.kind
    x_TD = torch.randn(tokens, width, device=device).to(dtype)
    y_TI = torch.randn(tokens, inner, device=device).to(dtype)
    weight_ID = torch.randn(inner, width, device=device).to(dtype)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    forward = _best_seconds(lambda: x_TD @ weight_ID.t(), wait)
    backward = _best_seconds(lambda: y_TI @ weight_ID, wait)
    traffic = _best_seconds(lambda: y_TI * y_TI, wait)
    launch = _CUDA_LAUNCH_SECONDS if device == "cuda" else _CPU_LAUNCH_SECONDS
    return Rates(
        {precision: 2 * 2.0 * tokens * width * inner / (forward + backward)},
        3 * y_TI.nbytes / traffic, launch, spec.link_bandwidth, overlaps=device == "cuda", source="measured now",
    )  # fmt: skip


BF16_PAYS = 1.5
"""From so many times the speed of float32 products on, a CPU computes in bf16 where the recipe leaves it open."""


def bf16_pays(*, width: int, inner: int, tokens: int = 512) -> bool:
    """Whether this machine's CPU multiplies in bf16 so much faster that one would train in it; under a second.

    Args as `measure`.
    """
    x_TD, weight_ID = torch.randn(tokens, width), torch.randn(inner, width)
    x16_TD, weight16_ID = x_TD.bfloat16(), weight_ID.bfloat16()
    seconds = _best_seconds(lambda: x_TD @ weight_ID.t(), lambda: None)
    return seconds >= BF16_PAYS * _best_seconds(lambda: x16_TD @ weight16_ID.t(), lambda: None)


def _best_seconds(work: Callable[[], Any], wait: Callable[[], Any], *, budget_seconds: float = 0.1) -> float:
    """The quickest of several runs: what disturbs a measurement only makes it longer."""
    best, until = float("inf"), time.perf_counter() + budget_seconds
    work()  # kernels are prepared by the first
    while best == float("inf") or time.perf_counter() < until:
        wait()
        started = time.perf_counter()
        work()
        wait()
        best = min(best, time.perf_counter() - started)
    return best


_free: dict[Any, bool] = {}


def _is_free(func: Any) -> bool:
    """Views and questions about a tensor move nothing."""
    if func not in _free:
        _free[func] = func.namespace == "prim" or func.is_view or _name(func) in _EMPTY
    return _free[func]


def _name(func: Any) -> str:
    return func.name().split("::")[-1].split(".")[0]


_EMPTY = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "lift_fresh", "_unsafe_view"})


def _passes(name: str, args: Any) -> int:
    if name in ("int4_dense", "nf4_dense"):
        return _DENSE_PASSES
    if name == "adamw_slices":
        return _CODE_PASSES if any(held.dtype == torch.uint8 for held in args[2]) else _HOST_PASSES
    return 1


def _bytes(values: Any) -> int:
    if isinstance(values, Tensor):
        return values.numel() * values.element_size()
    if isinstance(values, tuple | list):
        return sum(_bytes(value) for value in values)
    return 0


def _flops(func: Any, args: Any) -> tuple[float, torch.dtype | None]:
    """Multiplications and additions of a product, and what it computes in."""
    name = _name(func).rstrip("_")
    if name in ("mm", "bmm", "addmm", "baddbmm"):
        a, b = args[-2:] if name in ("mm", "bmm") else args[1:3]
        return 2.0 * a.numel() * b.shape[-1], a.dtype
    if name.startswith("_scaled_dot_product"):
        backward = name.endswith("_backward")
        q, k = (args[1], args[2]) if backward else (args[0], args[1])
        scores = q.numel() // q.shape[-1] * k.shape[-2]
        causal = 0.5  # ours is causal, or a tree's few tokens
        return 4.0 * causal * scores * q.shape[-1] * (_BACKWARD_PER_FORWARD if backward else 1.0), q.dtype
    return 0.0, None
