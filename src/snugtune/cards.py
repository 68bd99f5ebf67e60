"""What a plan needs to know about a device, and the cards that can be planned for without having them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from snugtune.errors import RecipeError, nearest
from snugtune.units import GIB, MIB

Kind = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class DeviceSpec:
    """One device: how much memory, and how fast. Speeds are peaks; what of them is reached is the speed model's part."""

    kind: Kind
    name: str
    memory_bytes: int
    has_bf16: bool
    """Whether products in bf16 are the faster choice there."""
    flops: Mapping[str, float] = field(default_factory=dict)
    """FLOP/s of dense products by precision: fp32, bf16, fp16. Empty where nobody measured or published them."""
    memory_bandwidth: float = 0.0
    """Bytes/s between the device and its own memory."""
    link_bandwidth: float = 0.0
    """Bytes/s between the device and the host's memory, one way."""
    compute_capability: tuple[int, int] | None = None
    """CUDA's version of the card's features, which decides the workspaces of its libraries."""
    source: str = "detected"
    """Where the figures come from."""


# --- the table -------------------------------------------------------------------------------------------------------

# Sixteen lanes one way, 128 of every 130 bits payload: 8, 16 and 32 GT/s a lane (the PCIe base specification, from memory).
_PCIE_3, _PCIE_4, _PCIE_5 = (16 * rate * 128 / 130 / 8 for rate in (8e9, 16e9, 32e9))


def _tera(*, fp32: float, half: float) -> dict[str, float]:
    """FLOP/s from TFLOP/s: fp32 on the plain cores, `half` for bf16 and fp16 on the matrix cores, summed in fp32."""
    return {"fp32": fp32 * 1e12, "bf16": half * 1e12, "fp16": half * 1e12}


CARDS: Mapping[str, DeviceSpec] = MappingProxyType({
    "a100-40gb": DeviceSpec(
        "cuda", "NVIDIA A100-SXM4-40GB", 42_405_855_232, has_bf16=True, compute_capability=(8, 0),
        flops=_tera(fp32=19.5, half=312), memory_bandwidth=1555e9, link_bandwidth=_PCIE_4,
        source="A100 data sheet 1758950 r4, in glennklockwood.com/garden/processors/A100; "
        "memory: deviceQuery of PC2 Paderborn, the same in logs of torch 2.11",
    ),
    "a100-40gb-pcie": DeviceSpec(
        "cuda", "NVIDIA A100-PCIE-40GB", 40_377 * MIB, has_bf16=True, compute_capability=(8, 0),
        flops=_tera(fp32=19.5, half=312), memory_bandwidth=1555e9, link_bandwidth=_PCIE_4,
        source="A100 data sheet 1758950 r4, in thundercompute.com's A100 guide; memory: a log of torch 2.3",
    ),
    "a100-80gb": DeviceSpec(
        "cuda", "NVIDIA A100-SXM4-80GB", 85_094_825_984, has_bf16=True, compute_capability=(8, 0),
        flops=_tera(fp32=19.5, half=312), memory_bandwidth=2039e9, link_bandwidth=_PCIE_4,
        source="A100 data sheet 1758950 r4, in torch's device_info.py; memory: logs of torch 2.7",
    ),
    "a100-80gb-pcie": DeviceSpec(
        "cuda", "NVIDIA A100 80GB PCIe", 85_094_825_984, has_bf16=True, compute_capability=(8, 0),
        flops=_tera(fp32=19.5, half=312), memory_bandwidth=1935e9, link_bandwidth=_PCIE_4,
        source="A100 data sheet 1758950 r4, in thundercompute.com's A100 guide; memory: torch under driver 595",
    ),
    # The data sheets of Hopper and Ada print twice the dense rate, with a star: 2:4 sparsity.
    "h100-80gb": DeviceSpec(
        "cuda", "NVIDIA H100 80GB HBM3", 81_089 * MIB, has_bf16=True, compute_capability=(9, 0),
        flops=_tera(fp32=66.9, half=989.4), memory_bandwidth=3350e9, link_bandwidth=_PCIE_5,
        source="H100 data sheet, in glennklockwood.com/garden/processors/h100; memory: a log of torch 2.7",
    ),
    "h100-pcie": DeviceSpec(
        "cuda", "NVIDIA H100 PCIe", 81_008 * MIB, has_bf16=True, compute_capability=(9, 0),
        flops=_tera(fp32=51.2, half=756.5), memory_bandwidth=2000e9, link_bandwidth=_PCIE_5,
        source="H100 data sheet (1,513 with sparsity), in archive-lib.hpctech.co.jp; memory: a log of an early torch 2",
    ),
    "h200": DeviceSpec(
        "cuda", "NVIDIA H200", 143_156 * MIB, has_bf16=True, compute_capability=(9, 0),
        flops=_tera(fp32=66.9, half=989.4), memory_bandwidth=4800e9, link_bandwidth=_PCIE_5,
        source="H200 data sheet, in github.com/alpharomercoma/MI300X-vs-H200, fp32 in hmc-tech.com; "
        "memory: logs of torch 2.11",
    ),
    "l4": DeviceSpec(
        "cuda", "NVIDIA L4", 22_563 * MIB, has_bf16=True, compute_capability=(8, 9),
        flops=_tera(fp32=30.3, half=121), memory_bandwidth=300e9, link_bandwidth=_PCIE_4,
        source="L4 data sheet (242 with sparsity), in github.com/winston-zhang-orz/gpu-specs and store.sourcecode.com; "
        "memory: logs of torch 2.11",
    ),
    "l40s": DeviceSpec(
        # Printed as 44.39 GiB: the least that rounds to it.
        "cuda", "NVIDIA L40S", int(44.385 * GIB), has_bf16=True, compute_capability=(8, 9),
        flops=_tera(fp32=91.6, half=362.05), memory_bandwidth=864e9, link_bandwidth=_PCIE_4,
        source="L40S data sheet (733 with sparsity), in mullet.se; memory: torch 2.9 under driver 580",
    ),
    "t4": DeviceSpec(
        "cuda", "Tesla T4", 15_637_086_208, has_bf16=False, compute_capability=(7, 5),
        # No bf16 in the hardware (compute capability 7.5): the fp32 rate is a bound, not a promise.
        flops={"fp32": 8.1e12, "bf16": 8.1e12, "fp16": 65e12}, memory_bandwidth=320e9, link_bandwidth=_PCIE_3,
        source="T4 data sheet 951643, in Lightning's throughput.py and sysrqmts.com; "
        "memory: Colab, torch 2.11 under driver 580",
    ),
    "a10": DeviceSpec(
        # Printed as 22.07 GiB: the least that rounds to it.
        "cuda", "NVIDIA A10", int(22.065 * GIB), has_bf16=True, compute_capability=(8, 6),
        flops=_tera(fp32=31.2, half=125), memory_bandwidth=600e9, link_bandwidth=_PCIE_4,
        source="A10 data sheet, in github.com/winston-zhang-orz/gpu-specs and baseten.co; memory: Lambda, torch 2.7",
    ),
    "a10g": DeviceSpec(
        "cuda", "NVIDIA A10G", 22_587 * MIB, has_bf16=True, compute_capability=(8, 6),
        flops=_tera(fp32=35, half=70), memory_bandwidth=600e9, link_bandwidth=_PCIE_4,
        source="AWS A10G data sheet of 2022-02-17, in baseten.co's A10 vs A10G; memory: a log of torch 2.15",
    ),
    # GeForce cards sum fp16 products in fp32 at half the rate of fp16 sums; bf16 is always summed in fp32. The rates are at
    # the stated boost clock, which cards exceed: github.com/xzwgit/gpu-flops-bench measured 254 TFLOP/s in bf16 on a 5090.
    "rtx-3090": DeviceSpec(
        "cuda", "NVIDIA GeForce RTX 3090", 24_124 * MIB, has_bf16=True, compute_capability=(8, 6),
        flops=_tera(fp32=35.6, half=71), memory_bandwidth=936e9, link_bandwidth=_PCIE_4,
        source="GA102 whitepaper 2.0, appendix A, as public code quotes it; memory: a log of torch 2.13",
    ),
    "rtx-4090": DeviceSpec(
        "cuda", "NVIDIA GeForce RTX 4090", 25_252_724_736, has_bf16=True, compute_capability=(8, 9),
        flops=_tera(fp32=82.6, half=165.2), memory_bandwidth=1008e9, link_bandwidth=_PCIE_4,
        source="Ada whitepaper, in hmc-tech.com; memory: torch under driver 595",
    ),
    "rtx-5090": DeviceSpec(
        "cuda", "NVIDIA GeForce RTX 5090", 32_102 * MIB, has_bf16=True, compute_capability=(12, 0),
        flops=_tera(fp32=104.8, half=209.5), memory_bandwidth=1792e9, link_bandwidth=_PCIE_5,
        source="RTX Blackwell whitepaper, as public code quotes it; bandwidth and link: spheron.network; "
        "memory: a log of torch 2.12",
    ),
    "mi300x": DeviceSpec(
        # As a virtual function, which is how clouds rent it; on bare metal ROCm 6 showed 196,592 MiB.
        "cuda", "AMD Instinct MI300X", 205_822_885_888, has_bf16=True, compute_capability=(9, 4),
        flops=_tera(fp32=163.4, half=1307.4), memory_bandwidth=5300e9, link_bandwidth=_PCIE_5,
        source="MI300X data sheet, in torch's device_info.py; link: MLPerf inference 4.1's system file; "
        "memory: rocm-smi of ROCm 7",
    ),
})  # fmt: skip
"""Cards by their short name. `name` is what torch calls the card, and `memory_bytes` what torch showed as its total on
Linux, the newest reading that we found: less than nvidia-smi shows, and other drivers keep 0.1 to 1.3 % more or less.
Compute capabilities are those of CUDA's programming guide (MI300X: what torch shows for gfx942), from memory. Rates are dense and at the vendor's boost clock; torch multiplies float32 without TF32 unless told otherwise. A source
`in` a page was read there, not in the vendor's own document."""

_ALSO = {
    "h100-80gb": "sxm", "h100-pcie": "80gb", "h200": "sxm 141gb", "l4": "24gb", "l40s": "48gb", "t4": "16gb",
    "a10": "24gb", "a10g": "24gb", "rtx-3090": "24gb", "rtx-4090": "24gb", "rtx-5090": "32gb", "mi300x": "192gb vf",
}  # fmt: skip
"""Words that a card may be called by, besides those of its key and its name."""

# --- names -----------------------------------------------------------------------------------------------------------

_MAKERS = frozenset({"nvidia", "amd", "tesla", "geforce", "instinct", "gpu"})


def find(name: str) -> DeviceSpec:
    """The card of that name: a key of CARDS, or what torch calls a card, in any case, with spaces, dashes or underscores.

    A name that leaves open only whether the card is SXM or PCIe means SXM.

    Raises:
        RecipeError: where the name fits no card of the table, or cards that differ in memory.
    """
    words = _words(name)
    if "-".join(words) in CARDS:
        return CARDS["-".join(words)]
    asked = set(words) - {"rtx"}
    fits = [key for key in CARDS if _model(key) in asked and asked <= _called(key)]
    if len(fits) == 1:
        return CARDS[fits[0]]
    sxm = [key for key in fits if "sxm" in _called(key)]
    if len(sxm) == 1:
        return CARDS[sxm[0]]
    if fits:
        raise RecipeError(f"the card '{name}' may be any of {', '.join(fits)}; name one of them")
    hint = nearest("-".join(words), CARDS)
    if hint.endswith("?"):
        hint += f" There are: {', '.join(sorted(CARDS))}"
    raise RecipeError(f"no card '{name}' is known{hint}")


def _words(name: str) -> list[str]:
    """`NVIDIA A100-SXM4-80GB` -> a100, sxm, 80gb."""
    text = " ".join(re.findall(r"[a-z0-9]+", name.lower()))
    text = re.sub(r"\b(\d+) ?(?:gib|gb|g)\b", r"\1gb", text)
    text = re.sub(r"\bsxm\d\b", "sxm", re.sub(r"\brtx(?=\d)", "rtx ", text))
    return [word for word in text.split() if word not in _MAKERS]


def _model(key: str) -> str:
    """The word that a name must have to mean this card: a100, 4090."""
    return next(word for word in _words(key) if word != "rtx")


def _called(key: str) -> set[str]:
    """Every word that a name of this card may have."""
    return {*_words(key), *_words(CARDS[key].name), *_ALSO.get(key, "").split()}
