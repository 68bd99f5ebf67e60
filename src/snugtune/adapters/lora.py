"""LoRA (arXiv 2106.09685) on any linear layer of a transformers decoder, by `target_modules`.

    y = x W^T + b + (alpha / r) * dropout(x) A^T B^T

The linear is one autograd function. It keeps its input once, in the model's dtype, and nothing else of the micro-batch's
size: x A^T is r wide and is computed again in backward, and the frozen weight's product needs no input. q and v of one
block share the tensor that they keep. A and B are float32 whatever the base is stored in; they are cast for the product
and updated in float32. A packed base is unpacked for its product, and again for the one in backward.

Shapes: T tokens (all leading dimensions), K input width, N output width, r rank.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from snugtune.errors import RecipeError
from snugtune.kernels.packed import PackedLinear
from snugtune.recipe import Lora

Linear = nn.Linear | Conv1D | PackedLinear
"""Conv1D is GPT-2's linear: the same product with its weight stored [K, N]."""


class _LoraFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_NK: Tensor | PackedLinear, bias_N: Tensor | None,
        a_rK: Tensor, b_Nr: Tensor, scale: float, dropout: float,
    ) -> Tensor:  # fmt: skip
        x_TK = x.reshape(-1, x.shape[-1])
        y_TN = F.linear(x_TK, _dense(weight_NK, x.dtype), bias_N)
        keep_TK = None
        dropped_TK = x_TK
        if dropout > 0:
            dropped_TK, keep_TK = torch.native_dropout(x_TK, dropout, train=True)
        low_Tr = dropped_TK @ a_rK.to(x.dtype).t()
        y_TN.addmm_(low_Tr, b_Nr.to(x.dtype).t(), alpha=scale)
        packed = isinstance(weight_NK, PackedLinear)
        ctx.save_for_backward(x, None if packed else weight_NK, a_rK, b_Nr, keep_TK)
        ctx.packed_NK = weight_NK if packed else None
        ctx.scale, ctx.dropout = scale, dropout
        return y_TN.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # type: ignore[override]
        (dy,) = grad_outputs
        x, weight_NK, a_rK, b_Nr, keep_TK = ctx.saved_tensors
        x_TK, dy_TN = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        a, b = a_rK.to(x.dtype), b_Nr.to(x.dtype)
        dlow_Tr = (dy_TN @ b).mul_(ctx.scale)
        kept = 1 / (1 - ctx.dropout)
        dropped_TK = x_TK if keep_TK is None else x_TK * keep_TK * kept
        da_rK = (dlow_Tr.t() @ dropped_TK).to(a_rK.dtype)
        db_Nr = (dy_TN.t() @ (dropped_TK @ a.t())).mul_(ctx.scale).to(b_Nr.dtype)
        del dropped_TK
        dx = None
        if ctx.needs_input_grad[0]:
            dx_TK = dy_TN @ _dense(weight_NK if ctx.packed_NK is None else ctx.packed_NK, x.dtype)
            if keep_TK is None:
                dx_TK.addmm_(dlow_Tr, a)
            else:
                dx_TK += (dlow_Tr @ a).mul_(keep_TK).mul_(kept)
            dx = dx_TK.view(x.shape)
        return dx, None, None, da_rK, db_Nr, None, None


def _dense(weight_NK: Tensor | PackedLinear, dtype: torch.dtype) -> Tensor:
    return weight_NK.dense(dtype) if isinstance(weight_NK, PackedLinear) else weight_NK


class LoraLinear(nn.Module):
    """A frozen linear layer with a trainable low-rank side path."""

    def __init__(self, base: Linear, *, r: int, alpha: float, dropout: float) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        if isinstance(base, PackedLinear):
            outputs, inputs, device = base.out_features, base.in_features, base.device
        else:
            outputs, inputs = reversed(base.weight.shape) if isinstance(base, Conv1D) else base.weight.shape
            device = base.weight.device
        self.lora_A = nn.Parameter(torch.empty(r, inputs, dtype=torch.float32, device=device))
        self.lora_B = nn.Parameter(torch.zeros(outputs, r, dtype=torch.float32, device=device))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.scale = alpha / r
        self.dropout = dropout
        self.transposed = base.transposed if isinstance(base, PackedLinear) else isinstance(base, Conv1D)
        """Whether the model's files hold the weight as [K, N]."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N] in the dtype of the input."""
        base = self.base
        weight = base if isinstance(base, PackedLinear) else base.weight.t() if self.transposed else base.weight
        dropout = self.dropout if self.training else 0.0
        return _LoraFunction.apply(x, weight, base.bias, self.lora_A, self.lora_B, self.scale, dropout)


def apply(model: nn.Module, cfg: Lora) -> None:
    """Freeze `model` and put LoRA on every module that `cfg.target_modules` names. A is random from torch's generator.

    Raises:
        RecipeError: where a target names no linear layer (with those that exist), or names the output head, whose
            adapter the chunked loss would not see.
    """
    model.requires_grad_(False)
    for name in targets(model, cfg):
        parent_name, _, child = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        base = getattr(parent, child)
        setattr(parent, child, LoraLinear(base, r=cfg.r, alpha=cfg.lora_alpha, dropout=cfg.lora_dropout))


def targets(model: nn.Module, cfg: Lora) -> list[str]:
    """Full names of the modules that `cfg.target_modules` means, in the model's order. Raises as `apply`."""
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    linears = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    if cfg.target_modules == "all-linear":
        return [name for name, module in linears.items() if module is not head]
    chosen: set[str] = set()
    for target in cfg.target_modules:
        matching = [name for name in linears if name == target or name.endswith(f".{target}")]
        if not matching:
            raise RecipeError(
                f"target module '{target}' is not a linear layer of {type(model).__name__}; it has: {_overview(linears, head)}"
            )
        if any(linears[name] is head for name in matching):
            raise RecipeError(
                f"target module '{target}' is the output head, which is kept as it is; take away '{target}' or name "
                f"some of: {_overview(linears, head)}"
            )
        chosen.update(matching)
    return [name for name in linears if name in chosen]


def _overview(linears: dict[str, Any], head: nn.Module | None) -> str:
    return (
        ", ".join(dict.fromkeys(name.rsplit(".", 1)[-1] for name, module in linears.items() if module is not head))
        or "none"
    )


def layers(model: nn.Module) -> dict[str, LoraLinear]:
    """Every adapted linear by its name in the model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}
