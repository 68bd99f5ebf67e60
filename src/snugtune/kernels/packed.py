"""The linear layer over a frozen weight that is stored in few bits. How it is stored, a subclass says.

    y = x W^T + b

The dense weight exists while a product needs it: in forward, and again in backward. Nothing is kept for backward.

Shapes: K input width, N output width, R rows of a slice.
"""

from __future__ import annotations

from typing import Any, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

_STORE_SLICE = 1 << 18
"""Weights that are cast at one time."""


class Rows(Protocol):
    """A weight [N, K] that gives some of its rows at a time: a tensor, or one that is still in its file."""

    def __getitem__(self, rows: slice, /) -> Tensor:
        """[R, K] in any floating dtype."""
        ...


class _PackedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: PackedLinear, bias_N: Tensor | None) -> Tensor:
        ctx.layer = layer  # which the model holds anyway: nothing is kept for backward
        return F.linear(x, layer.dense(x.dtype), bias_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # type: ignore[override]
        (dy,) = grad_outputs
        needs_x, _, needs_bias = ctx.needs_input_grad
        dx = dy @ ctx.layer.dense(dy.dtype) if needs_x else None
        dbias_N = dy.flatten(0, -2).sum(0) if needs_bias else None
        return dx, None, dbias_N


class PackedLinear(nn.Module):
    """A linear layer whose weight is frozen in few bits."""

    STORE_BYTES: int
    """Most that `store` holds besides its result and a weight that is in memory already."""

    def __init__(
        self, inputs: int, outputs: int, *, group: int, bias: nn.Parameter | None = None, transposed: bool = False
    ) -> None:
        """Args as `like` finds them.

        Args:
            inputs: K.
            outputs: N.
            group: inputs that share a scale; see `group_of`.
            bias: of the layer that this one stands for; it is kept as it is.
            transposed: the model's files hold this weight as [K, N] (GPT-2).
        """
        super().__init__()
        self.in_features, self.out_features, self.group, self.transposed = inputs, outputs, group, transposed
        self.bias = bias

    @classmethod
    def require(cls) -> None:
        """Raises RecipeError where a package that packs or unpacks is not installed."""

    @classmethod
    def group_of(cls, outputs: int, inputs: int) -> int | None:
        """Inputs that share a scale; None for a weight that has to stay as it is."""
        raise NotImplementedError

    @classmethod
    def like(cls, linear: nn.Linear | Conv1D, *, group: int, device: torch.device | str | None = None) -> Self:
        """A layer without data in the place of `linear`, with its bias, on `device` or where that one is."""
        transposed = isinstance(linear, Conv1D)
        outputs, inputs = reversed(linear.weight.shape) if transposed else linear.weight.shape
        device = device or linear.weight.device
        return cls(inputs, outputs, group=group, bias=linear.bias, transposed=transposed, device=device)  # type: ignore[call-arg]

    @classmethod
    def from_linear(cls, linear: nn.Linear | Conv1D, *, group: int, device: torch.device | str | None = None) -> Self:
        """As `like`, with the layer's weight packed."""
        made = cls.like(linear, group=group, device=device)
        made.store(linear.weight.t() if made.transposed else linear.weight)
        return made

    @property
    def device(self) -> torch.device:
        """Where the packed weight is."""
        return next(self.buffers()).device

    @property
    def weights(self) -> int:
        """How many there are: N * K."""
        return self.in_features * self.out_features

    @property
    def dense_bytes(self) -> int:
        """Most that `dense` holds besides its result: a plan adds it, since it does not look inside."""
        raise NotImplementedError

    def store(self, weight_NK: Rows) -> None:
        """Pack this weight and keep it. Each row is packed by itself."""
        raise NotImplementedError

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight [N, K] in `dtype`, made anew on each call."""
        raise NotImplementedError

    def as_stored(self, weight_RK: Tensor) -> Tensor:
        """Rows of a weight (or whole groups of their inputs) as this layer would give them back, float32."""
        outputs, inputs = weight_RK.shape
        part = type(self)(inputs, outputs, group=self.group, device=weight_RK.device)  # type: ignore[call-arg]
        part.store(weight_RK)
        return part.dense(torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N] in the dtype of the input."""
        return _PackedFunction.apply(x, self, self.bias)

    def extra_repr(self) -> str:
        """What `print` shows."""
        return f"in_features={self.in_features}, out_features={self.out_features}, group={self.group}"


class _NarrowLinear(PackedLinear):
    """A linear layer that stores its weight in 16 bits and computes in whatever its input has: the cast weight exists for a
    product alone. Of a model whose files hold 16 bits nothing is lost by it."""

    STORE_BYTES = 0
    DTYPE: torch.dtype

    def __init__(
        self, inputs: int, outputs: int, *, group: int, bias: nn.Parameter | None = None, transposed: bool = False,
        device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(inputs, outputs, group=group, bias=bias, transposed=transposed)
        self.stored_NK: Tensor
        self.register_buffer("stored_NK", torch.empty(outputs, inputs, dtype=self.DTYPE, device=device))

    @classmethod
    def group_of(cls, outputs: int, inputs: int) -> int | None:
        """No scales are shared."""
        return 1

    @property
    def dense_bytes(self) -> int:
        """A cast is seen as it is."""
        return 0

    @torch.no_grad()
    def store(self, weight_NK: Rows) -> None:
        """Cast each weight, a slice of rows at a time."""
        rows = max(1, _STORE_SLICE // self.in_features)
        for start in range(0, self.out_features, rows):
            part = slice(start, min(start + rows, self.out_features))
            self.stored_NK[part] = weight_NK[part]

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight [N, K] in `dtype`."""
        return self.stored_NK.to(dtype)


class Bf16Linear(_NarrowLinear):
    """Stored in bfloat16."""

    DTYPE = torch.bfloat16


class Fp16Linear(_NarrowLinear):
    """Stored in float16."""

    DTYPE = torch.float16
