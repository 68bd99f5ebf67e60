"""Full fine-tuning in bf16 or fp16 over float32 ("master") weights.

An update is often smaller than a 16-bit weight can tell apart from nothing, so weights, gradients and moments stay
float32 and the model computes as if its weights had been cast: what a forward gives is bit for bit what the cast model
gives, and so are the gradients of its linears and norms (then widened to float32). No 16-bit copy of a linear's weight
outlives the product that it is made for: backward makes it anew (6 bytes read and written a weight, next to nothing
beside a product over hundreds of tokens) instead of keeping two bytes for every weight of the model.

The parameters stay where they are and keep their names; a module's `forward` alone is stood in for, on the module
itself. The output head's weight reaches the chunked loss as it is, in float32, and is cast there.

Micikevicius et al., arXiv 1710.03740, section 3.1.

Shapes: T tokens (all leading dimensions), K input width, N output width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D


class _CastLinear(torch.autograd.Function):
    """x W^T + b with W and b in `dtype`. Keeps x and the float32 weight itself, which costs nothing."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias_N: Tensor | None,
        dtype: torch.dtype, transposed: bool,  # noqa: FBT001
    ) -> Tensor:  # fmt: skip
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.transposed = transposed
        cast = weight.to(dtype)
        return F.linear(x, cast.t() if transposed else cast, None if bias_N is None else bias_N.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # type: ignore[override]
        (dy,) = grad_outputs
        x, weight = ctx.saved_tensors
        dy_TN = dy.reshape(-1, dy.shape[-1])
        dx = dweight = dbias_N = None
        if weight is not None:
            cast = weight.to(dy.dtype)
            dx_TK = dy_TN @ (cast.t() if ctx.transposed else cast)
            del cast
            dx = dx_TK.view(*dy.shape[:-1], -1)
        if x is not None:
            x_TK = x.reshape(-1, x.shape[-1])
            # In the layout of the weight, so that autograd takes the tensor as the gradient and copies nothing.
            dweight = (x_TK.t() @ dy_TN if ctx.transposed else dy_TN.t() @ x_TK).float()
        if ctx.needs_input_grad[2]:
            dbias_N = dy_TN.sum(0).float()
        return dx, dweight, dbias_N, None, None


class _StandIn:
    """In place of one module's forward: its parameters are 16-bit copies while it runs.

    Right for any module whose parameters are read in its own forward alone. The copies that autograd keeps are as large as
    the parameters, which is nothing for norms; linears and embeddings have a way of their own below.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.module, self.dtype = module, dtype
        self.forward = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        held = self.module._parameters
        own = {name: p for name, p in held.items() if p is not None and p.is_floating_point()}
        try:
            # Into the module's own table: assignment by name would register each copy as a new parameter.
            held.update({name: p.to(self.dtype) for name, p in own.items()})  # type: ignore[misc]
            return self.forward(*args, **kwargs)
        finally:
            held.update(own)


class _LinearStandIn(_StandIn):
    def __call__(self, x: Tensor) -> Tensor:
        module = self.module
        return _CastLinear.apply(x, module.weight, module.bias, self.dtype, isinstance(module, Conv1D))


class _EmbeddingStandIn(_StandIn):
    """Casts the rows that were looked up and not the table; their gradients are summed in float32."""

    def __call__(self, ids: Tensor) -> Tensor:
        assert isinstance(self.module, nn.Embedding)
        rows_TK = nn.Embedding.forward(self.module, ids).to(self.dtype)
        scale = _scale(self.module)
        return rows_TK if scale is None else rows_TK * scale.to(self.dtype)


def apply(model: nn.Module, dtype: torch.dtype) -> None:
    """Let `model`, whose parameters are float32 and stay so, compute in `dtype`; gradients arrive in float32.

    Call it before recompute is put on, and once. The adapters of `adapters.lora` read the weights beneath them directly:
    this is for models that are trained whole. Buffers stay as they are, as in a model that is loaded in `dtype`.
    """
    if dtype == torch.float32:
        return
    for module in model.modules():
        if any(p.is_floating_point() for p in module.parameters(recurse=False)):
            assert "forward" not in vars(module), "another technique stands in for this forward already"
            module.forward = _stand_in(module)(module, dtype)  # type: ignore[method-assign]


def remove(model: nn.Module) -> None:
    """Take `apply` off again: the model computes in float32. Parameters and their names were never touched."""
    for module in model.modules():
        if isinstance(vars(module).get("forward"), _StandIn):
            del module.forward


def _stand_in(module: nn.Module) -> type[_StandIn]:
    """A subclass with a forward of its own may do anything, so it is taken as any module, unless we know that forward."""
    own_forward = type(module).forward
    if own_forward in (nn.Linear.forward, Conv1D.forward):
        return _LinearStandIn
    if own_forward is nn.Embedding.forward or (isinstance(module, nn.Embedding) and _scale(module) is not None):
        return _EmbeddingStandIn
    return _StandIn


def _scale(module: nn.Embedding) -> Tensor | None:
    """What the Gemmas multiply the looked-up rows by, after a cast to the weight's dtype."""
    scale = getattr(module, "embed_scale", None)
    return scale if isinstance(scale, Tensor) else None
