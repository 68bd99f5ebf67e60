"""Norms and gated MLPs that keep only what they cannot cheaply compute again.

    norm       y = w * x * r,  r = 1 / sqrt(mean(x^2) + eps)        keeps x and r
    gated      h = act(g) * u                                       keeps g and u, not act(g)

The families' own forms keep a float32 copy of x where the model computes in 16 bits, and act(g), a fifth of all that a
model of float32 keeps. Written out by hand they also take half as many passes over memory in backward.

Which modules: RMSNorms whose formula is Llama's, and MLPs of a gate, an up and a down projection, in the families that a
test holds against their own forward. Everything else stays as it is.

Zhang and Sennrich, arXiv 1910.07467; Shazeer, arXiv 2002.05202.

Shapes: T tokens (all leading dimensions), D width, I the MLP's inner width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from snugtune.kernels.packed import PackedLinear

_NORMS = frozenset({
    "exaone4", "glm", "glm4", "granite", "llama", "ministral", "mistral", "phi3", "qwen2", "qwen3", "smollm3",
})  # fmt: skip
_GATED = frozenset({
    "cohere", "cohere2", "exaone4", "gemma", "gemma2", "gemma3_text", "granite", "helium", "llama", "ministral", "mistral",
    "olmo2", "olmo3", "qwen2", "qwen3", "smollm3",
})  # fmt: skip


def apply(model: PreTrainedModel) -> None:
    """Let the norms and MLPs of `model` keep less. Call it before recompute is put on.

    A module that another technique stands in for already (16-bit compute over float32 weights) is left to it.
    """
    family = model.config.model_type
    for module in model.modules():
        if "forward" in vars(module):
            continue
        if family in _NORMS and type(module).__name__.endswith("RMSNorm"):
            module.forward = _Norm(module)  # type: ignore[method-assign]
        elif family in _GATED and type(module).__name__.endswith("MLP") and _known(getattr(module, "act_fn", None)):
            module.forward = _Gated(module)  # type: ignore[method-assign]


class _NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        wide = x.float()
        rate_T1 = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, rate_T1, weight_D)
        return (wide * rate_T1).to(x.dtype).mul_(weight_D)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # type: ignore[override]
        (dy,) = grad_outputs
        x, rate_T1, weight_D = ctx.saved_tensors
        wide, dwide = x.float(), dy.float()
        dweight_D = None
        if ctx.needs_input_grad[1]:
            dweight_D = (dwide * wide).mul_(rate_T1).flatten(0, -2).sum(0).to(weight_D.dtype)
        dx = None
        if ctx.needs_input_grad[0]:
            # With a = dy * w:  dx = r * a - x * r^3 * mean(a * x)
            a = dwide * weight_D
            share_T1 = torch.linalg.vecdot(a, wide)[..., None].mul_(rate_T1.pow(3)).div_(x.shape[-1])
            dx = a.mul_(rate_T1).addcmul_(wide, share_T1, value=-1).to(x.dtype)
        return dx, dweight_D, None


class _Norm:
    """Stands in for one norm's forward; modules look `forward` up on themselves first."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, hidden_states: Tensor) -> Tensor:
        return _NormFunction.apply(hidden_states, self.module.weight, self.module.variance_epsilon)


class _GatedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, act: nn.Module) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.slope = _known(act)
        ctx.act = act
        return act(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # type: ignore[override]
        (dh,) = grad_outputs
        gate, up = ctx.saved_tensors
        dup = ctx.act(gate).mul_(dh)
        dgate = ctx.slope(dh * up, gate)
        return dgate, dup, None


class _Gated:
    def __init__(self, module: Any) -> None:
        self.module = module

    def __call__(self, x: Tensor) -> Tensor:
        return self.module.down_proj(self.before_down(x))

    def before_down(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., I], all but the last projection."""
        mlp = self.module
        return _GatedFunction.apply(mlp.gate_proj(x), mlp.up_proj(x), mlp.act_fn)

    def pull_back(self, dy: Tensor) -> Tensor | None:
        """The gradient of what `before_down` gives from the gradient of the MLP's output, where that takes a frozen weight
        alone."""
        down = self.module.down_proj
        if any(p.requires_grad for p in down.parameters()) or "forward" in vars(down):
            return None
        if isinstance(down, PackedLinear):
            return dy @ down.dense(dy.dtype)
        return dy @ down.weight if type(down) is nn.Linear else None


def _known(act: object) -> Callable[[Tensor, Tensor], Tensor] | None:
    """(gradient of the activation's output, its input) -> gradient of its input; None for an activation of another kind."""
    return _SLOPES.get(type(act).__name__)


def _silu(dy: Tensor, x: Tensor) -> Tensor:
    return torch.ops.aten.silu_backward(dy, x)


def _gelu(dy: Tensor, x: Tensor) -> Tensor:
    return torch.ops.aten.gelu_backward(dy, x)


def _gelu_tanh(dy: Tensor, x: Tensor) -> Tensor:
    return torch.ops.aten.gelu_backward(dy, x, approximate="tanh")


_SLOPES = {"SiLU": _silu, "SiLUActivation": _silu, "GELUActivation": _gelu, "GELUTanh": _gelu_tanh}
