"""Frozen weights in NF4, the 4-bit normal float of QLoRA (Dettmers et al., arXiv 2305.14314), through bitsandbytes.

    w_nk = value[code_nk] * s_nB,    value: 16 quantiles of a normal distribution in [-1, 1],    B = the block of 64 that k is in

Codes are bitsandbytes's, two to a byte, the even input in the high half. Its scales (the largest magnitude of a block)
are kept here in float16, so that each row stands by itself and can be merged by itself: 4.25 bits a weight. QLoRA's
double quantisation takes 4.13 with 8-bit scales that depend on the whole weight.

bitsandbytes is needed where data is; a plan needs the shapes alone.

Shapes: K input width, N output width, H = K / 2 bytes, B = K / 64 blocks.
"""

from __future__ import annotations

import importlib.util
import logging

import torch
from torch import Tensor, nn

from snugtune.errors import RecipeError
from snugtune.kernels.packed import PackedLinear, Rows

BLOCK = 64
_STORE_SLICE = 1 << 20
_LARGEST_SCALE = 65504.0
"""Of float16."""


def require() -> None:
    """Import bitsandbytes, which the operations below call. Raises RecipeError where it is not installed."""
    if importlib.util.find_spec("bitsandbytes") is None:
        raise RecipeError(
            "what.base=nf4 needs bitsandbytes; bring it with: pip install 'snugtune[nf4]', or set what.base=int4, which "
            "needs nothing"
        )
    logging.getLogger("bitsandbytes").setLevel(
        logging.ERROR
    )  # of kernels that it would fetch, and that nothing here calls
    import bitsandbytes  # noqa: F401


@torch.library.custom_op("snugtune::nf4_dense", mutates_args=())
def _dense(codes_NH: Tensor, scales_NB: Tensor, dtype: torch.dtype) -> Tensor:
    require()
    shape = (codes_NH.shape[0], 2 * codes_NH.shape[1])
    return torch.ops.bitsandbytes.dequantize_4bit(
        codes_NH.view(-1, 1), scales_NB.float().view(-1), BLOCK, "nf4", shape, dtype
    )


@_dense.register_fake
def _(codes_NH: Tensor, scales_NB: Tensor, dtype: torch.dtype) -> Tensor:
    return codes_NH.new_empty(codes_NH.shape[0], 2 * codes_NH.shape[1], dtype=dtype)


class Nf4Linear(PackedLinear):
    """A linear layer whose weight is frozen in NF4."""

    STORE_BYTES = 32 * _STORE_SLICE

    def __init__(
        self, inputs: int, outputs: int, *, group: int = BLOCK, bias: nn.Parameter | None = None, transposed: bool = False,
        device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        """A layer without data yet, on `device` or wherever torch makes tensors now (`meta`, fake)."""
        super().__init__(inputs, outputs, group=group, bias=bias, transposed=transposed)
        assert group == BLOCK and inputs % BLOCK == 0
        self.codes: Tensor
        self.scales: Tensor
        self.register_buffer("codes", torch.empty(outputs, inputs // 2, dtype=torch.uint8, device=device))
        self.register_buffer("scales", torch.empty(outputs, inputs // BLOCK, dtype=torch.float16, device=device))

    @classmethod
    def require(cls) -> None:
        """See `require`."""
        require()

    @classmethod
    def group_of(cls, outputs: int, inputs: int) -> int | None:
        """A block never reaches over the end of a row."""
        return None if inputs % BLOCK else BLOCK

    @property
    def dense_bytes(self) -> int:
        """Of the scales in float32."""
        return 4 * self.scales.numel()

    @torch.no_grad()
    def store(self, weight_NK: Rows) -> None:
        """Round each weight to the nearest of the 16 values, a slice of rows at a time, where this layer is."""
        require()
        rows = max(1, _STORE_SLICE // self.in_features)
        for start in range(0, self.out_features, rows):
            part = slice(start, min(start + rows, self.out_features))
            weight_RK = weight_NK[part].to(self.device, torch.float32).contiguous()
            codes, scales = torch.ops.bitsandbytes.quantize_4bit(weight_RK, BLOCK, "nf4", torch.uint8)
            self.codes[part] = codes.view(len(weight_RK), -1)
            self.scales[part] = scales.clamp_(max=_LARGEST_SCALE).view(len(weight_RK), -1)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight [N, K] in `dtype`, made anew on each call."""
        return _dense(self.codes, self.scales, dtype)
