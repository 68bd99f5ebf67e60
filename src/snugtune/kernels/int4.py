"""Frozen weights in group-wise 4-bit integers, in plain torch.

    w_nk = (q_nk - z_nG) * s_nG,    q, z in 0..15,    G = the group that k falls into

A group is 128 inputs of one output (64 or 32 where 128 does not divide the width). Codes q, scales s and zero points z
are the very numbers that AWQ's file format holds (Lin et al., arXiv 2306.00978), so that what was trained over can be
served bit for bit. Two codes stand in a byte, the even input in the low half: read as int32 words, that is the
`weight_packed` of compressed-tensors. Costs at group 128: 4 + 16/128 + 8/128 = 4.19 bits a weight.

Scales are float16 as in AWQ's files, whatever the model computes in. q - z has five bits and s eleven, so that their
product is exact in float32: `dense` is exact there, and in 16 bits it is the exact weight rounded once. (In bfloat16 the
scales alone would lose three bits.)

Shapes: T tokens, K input width, N output width, H = K / 2 bytes, g group size, G = K / g groups, R rows of a slice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from snugtune.kernels.packed import PackedLinear, Rows

GROUP_SIZES = (128, 64, 32)
_LEVELS = 15
_SMALLEST_SCALE = 2.0**-24
"""The smallest float16 above zero. A group of zeros has it too: any scale does for codes that equal their zero point."""

_DENSE_SLICE = 1 << 22
"""Weights unpacked at one time: few enough that their temporaries (5 bytes each) are small beside a large weight, so many
that a GPU is not kept waiting by launches."""
DENSE_BYTES_A_WEIGHT = 5
DENSE_BYTES = DENSE_BYTES_A_WEIGHT * _DENSE_SLICE
"""Most that `dense` holds besides its result: a plan adds it, since it does not look inside."""
_QUANTIZE_SLICE = 1 << 20
QUANTIZE_BYTES = 16 * _QUANTIZE_SLICE
"""Most that `quantize` holds besides its result and a weight that is in memory already."""


class Packed(NamedTuple):
    """One weight: codes [N, H] uint8, scales [N, G] float16, zero points [N, G] uint8."""

    codes_NH: Tensor
    scales_NG: Tensor
    zeros_NG: Tensor


def group_size(outputs: int, inputs: int) -> int | None:
    """The largest group that divides the input width; None for a weight that has to stay in 16 bits.

    AWQ's format packs eight outputs into a word, so that their number counts too.
    """
    if outputs % 8:
        return None
    return next((size for size in GROUP_SIZES if inputs % size == 0), None)


def empty(outputs: int, inputs: int, *, group: int, device: torch.device | str | None = None) -> Packed:
    """Room for one weight."""
    assert inputs % group == 0 and group % 2 == 0
    groups = inputs // group
    return Packed(
        torch.empty(outputs, inputs // 2, dtype=torch.uint8, device=device),
        torch.empty(outputs, groups, dtype=torch.float16, device=device),
        torch.empty(outputs, groups, dtype=torch.uint8, device=device),
    )


@torch.no_grad()
def quantize(weight_NK: Rows, into: Packed) -> None:
    """Round a weight to the nearest code, each group by its smallest and largest value.

    The range of a group always holds zero, else its zero point would lie outside of 0..15. So |w - dense(w)| <= s / 2,
    and at the ends of the range what rounding s to float16 takes away. It works through a slice of rows at a time, on the
    device of `into`.
    """
    outputs, width = into.codes_NH.shape
    group = 2 * width // into.scales_NG.shape[1]
    rows = max(1, _QUANTIZE_SLICE // (2 * width))
    for start in range(0, outputs, rows):
        part = slice(start, min(start + rows, outputs))
        found = _quantize(weight_NK[part].to(into.codes_NH.device, torch.float32), group)
        for target, values in zip(into, found, strict=True):
            target[part] = values


def _quantize(weight_RK: Tensor, group: int) -> Packed:
    weight_RGg = weight_RK.unflatten(1, (-1, group))
    low_RG, high_RG = weight_RGg.aminmax(dim=-1)
    low_RG, high_RG = low_RG.clamp(max=0), high_RG.clamp(min=0)
    scales_RG = ((high_RG - low_RG) / _LEVELS).clamp(min=_SMALLEST_SCALE).half()
    step_RG1 = scales_RG.float()[..., None]  # codes are chosen for the scale as it is stored
    zeros_RG1 = (-low_RG[..., None] / step_RG1).round_().clamp_(0, _LEVELS)
    codes_RGg = (weight_RGg / step_RG1).round_().add_(zeros_RG1).clamp_(0, _LEVELS).to(torch.uint8)
    codes_RK = codes_RGg.flatten(1)
    return Packed(codes_RK[:, 0::2] | codes_RK[:, 1::2] << 4, scales_RG, zeros_RG1[..., 0].to(torch.uint8))


def dense(weight: Packed, dtype: torch.dtype) -> Tensor:
    """[N, K] in `dtype`: exact in float32, rounded once in 16 bits. Holds the result and DENSE_BYTES of temporaries."""
    return _dense(*weight, dtype)


@torch.library.custom_op("snugtune::int4_dense", mutates_args=())
def _dense(codes_NH: Tensor, scales_NG: Tensor, zeros_NG: Tensor, dtype: torch.dtype) -> Tensor:
    # One operation to whoever looks from outside, as a compiled kernel would be: a plan of a 7B model sees 600 of them and
    # not 60,000 small ones.
    assert scales_NG.dtype == torch.float16, "the scales of an int4 weight were cast to another dtype"
    (outputs, width), groups = codes_NH.shape, scales_NG.shape[1]
    weight_NGg = torch.empty(outputs, groups, 2 * width // groups, dtype=dtype, device=codes_NH.device)
    rows = max(1, _DENSE_SLICE // (2 * width))
    for start in range(0, outputs, rows):
        part = slice(start, start + rows)
        _fill(weight_NGg[part], codes_NH[part], scales_NG[part], zeros_NG[part])
    return weight_NGg.flatten(1)


@_dense.register_fake
def _(codes_NH: Tensor, scales_NG: Tensor, zeros_NG: Tensor, dtype: torch.dtype) -> Tensor:
    return codes_NH.new_empty(codes_NH.shape[0], 2 * codes_NH.shape[1], dtype=dtype)


def _fill(weight_RGg: Tensor, codes_RH: Tensor, scales_RG: Tensor, zeros_RG: Tensor) -> None:
    codes_RGg = _unpack(codes_RH, zeros_RG)
    is_exact = weight_RGg.dtype == torch.float32
    exact_RGg = weight_RGg if is_exact else torch.empty_like(weight_RGg, dtype=torch.float32)
    exact_RGg.copy_(codes_RGg).mul_(scales_RG[..., None])
    if not is_exact:
        weight_RGg.copy_(exact_RGg)


def _unpack(codes_RH: Tensor, zeros_RG: Tensor) -> Tensor:
    """q - z as int8 [R, G, g]."""
    # A byte becomes two by way of a 16-bit word: 0x00ba -> 0x0bba -> 0x0b0a, which in memory is a, b. Dense bitwise
    # operations are faster on a CPU than a table of 256 pairs, and than writing every second byte.
    words_RH = codes_RH.to(torch.int16)
    words_RH |= words_RH << 4
    words_RH &= 0x0F0F
    codes_RGg = words_RH.view(torch.int8).unflatten(1, (zeros_RG.shape[1], -1))
    codes_RGg -= zeros_RG.view(torch.int8)[..., None]
    return codes_RGg


class Int4Linear(PackedLinear):
    """A linear layer whose weight is frozen in group-wise 4-bit integers."""

    STORE_BYTES = QUANTIZE_BYTES

    def __init__(
        self, inputs: int, outputs: int, *, group: int, bias: nn.Parameter | None = None, transposed: bool = False,
        device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        """A layer without data yet, on `device` or wherever torch makes tensors now (`meta`, fake)."""
        super().__init__(inputs, outputs, group=group, bias=bias, transposed=transposed)
        packed = empty(outputs, inputs, group=group, device=device)
        self.codes: Tensor
        self.scales: Tensor
        self.zeros: Tensor
        for name, tensor in zip(("codes", "scales", "zeros"), packed, strict=True):
            self.register_buffer(name, tensor)

    @classmethod
    def group_of(cls, outputs: int, inputs: int) -> int | None:
        """See `group_size`."""
        return group_size(outputs, inputs)

    @property
    def packed(self) -> Packed:
        """The weight as it is stored."""
        return Packed(self.codes, self.scales, self.zeros)

    @property
    def dense_bytes(self) -> int:
        """Of a slice's temporaries."""
        return min(DENSE_BYTES, DENSE_BYTES_A_WEIGHT * self.weights)

    def store(self, weight_NK: Rows) -> None:
        """Round this weight to 4 bits and keep it."""
        quantize(weight_NK, self.packed)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight [N, K] in `dtype`, made anew on each call."""
        return dense(self.packed, dtype)
