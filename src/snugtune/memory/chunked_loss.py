"""Cross-entropy straight from hidden states, a chunk of label tokens at a time.

    loss = sum_n [ logsumexp_v(z_nv) - z_n,y(n) ],   z = cap(scale * h W^T)

The logits z of a whole micro-batch never exist: a chunk's logits are made, give their part of the loss and of the
gradient, and are dropped. The gradient is taken in the forward, where the logits are at hand, so that the head's
product is computed twice (forward and gradient) and not three times.

    dz = (softmax(z) - onehot(y)) * cap'(z),  dh = scale * dz W,  dW = scale * dz^T h,  db = scale * sum dz

Cut Cross-Entropy (arXiv 2411.09009) and Liger's fused linear cross-entropy have the same aim; exactness is held against
the plain loss by tests. Costs: one [chunk, V] buffer in float32 (one more under a softcap, half of one under 16-bit
hidden states), [N, D] for dh, and [V, D] in float32 where the head is trained.

A float32 head under 16-bit hidden states (training over float32 weights) computes as one that was cast: one 16-bit copy
lives as long as the forward, and the gradient, float32 all along, is handed on as it is.

Shapes: N label tokens, D model width, V vocabulary, C chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Head:
    """The way from hidden states to logits. scale and softcap are the family's (Granite, Cohere; Gemma 2)."""

    weight_VD: Tensor
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None,
        labels_N: Tensor, scale: float, softcap: float | None, chunk: int,
    ) -> Tensor:  # fmt: skip
        head = _cast(Head(weight_VD, bias_V, scale, softcap), h_ND.dtype)
        needs_h, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dh_ND = torch.empty_like(h_ND) if needs_h else None
        dweight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if needs_weight else None
        dbias_V = torch.zeros_like(bias_V, dtype=torch.float32) if needs_bias and bias_V is not None else None
        losses = []
        for start in range(0, h_ND.shape[0], chunk):
            z_CV = dz_CV = slope_CV = None  # the last chunk's die before the next one's are made
            h_CD, labels_C = h_ND[start : start + chunk], labels_N[start : start + chunk]
            z_CV = _logits(h_CD, head)
            label_z_C1 = z_CV.gather(1, labels_C[:, None])
            needs_any = needs_h or needs_weight or needs_bias
            if softcap is not None and needs_any:
                slope_CV = (z_CV / softcap).square_().neg_().add_(1)
            norm_C1, total_C1 = _exponentials(z_CV)
            losses.append((norm_C1 - label_z_C1).sum())
            if not needs_any:
                continue
            dz_CV = z_CV.div_(total_C1)  # softmax
            dz_CV.scatter_add_(1, labels_C[:, None], torch.full_like(label_z_C1, -1.0))
            if slope_CV is not None:
                dz_CV.mul_(slope_CV)
            if dbias_V is not None:
                dbias_V.add_(dz_CV.sum(0), alpha=scale)
            if dweight_VD is not None:
                dweight_VD.addmm_(dz_CV.t(), h_CD.float(), alpha=scale)
            if dh_ND is not None:
                torch.mul(dz_CV.to(h_ND.dtype) @ head.weight_VD, scale, out=dh_ND[start : start + chunk])
        ctx.save_for_backward(dh_ND, dweight_VD, dbias_V)
        ctx.dtypes = (weight_VD.dtype, bias_V.dtype if bias_V is not None else None)
        return torch.stack(losses).sum() if losses else h_ND.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dh_ND, dweight_VD, dbias_V = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        # In place: these buffers were made for this one backward.
        return (
            None if dh_ND is None else dh_ND.mul_(grad_loss),
            None if dweight_VD is None else dweight_VD.mul_(grad_loss).to(weight_dtype),
            None if dbias_V is None else dbias_V.mul_(grad_loss).to(bias_dtype),
            None, None, None, None,
        )  # fmt: skip


def _cast(head: Head, dtype: torch.dtype) -> Head:
    """`head` in the dtype of the hidden states; where it has that already, its own tensors."""
    bias_V = None if head.bias_V is None else head.bias_V.to(dtype)
    return replace(head, weight_VD=head.weight_VD.to(dtype), bias_V=bias_V)


def _logits(h_CD: Tensor, head: Head) -> Tensor:
    """[C, V] in float32."""
    z_CV = h_CD @ head.weight_VD.t()
    if head.bias_V is not None:
        z_CV += head.bias_V
    z_CV = z_CV.float()
    if head.scale != 1.0:
        z_CV *= head.scale
    if head.softcap is not None:
        z_CV.div_(head.softcap).tanh_().mul_(head.softcap)
    return z_CV


def _exponentials(z_CV: Tensor) -> tuple[Tensor, Tensor]:
    """logsumexp(z) and sum(exp(z - max)), both [C, 1]; z becomes exp(z - max).

    Written out because torch's logsumexp takes a second [C, V] buffer inside, which no plan would see.
    """
    top_C1 = z_CV.amax(1, keepdim=True)
    total_C1 = z_CV.sub_(top_C1).exp_().sum(1, keepdim=True)
    return top_C1 + total_C1.log(), total_C1


def chunked_loss(h_ND: Tensor, labels_N: Tensor, head: Head, *, chunk_tokens: int) -> Tensor:
    """Sum of the token losses (float32, no mean: the caller knows the label tokens of the whole global batch).

    Args:
        h_ND: hidden states after the last norm, at the positions that predict a label.
        labels_N: int64 token ids; every one counts, there is no ignore index.
        head: the output projection; weight and bias get gradients where they require them.
        chunk_tokens: label tokens whose logits exist at one time.
    """
    inputs = [h_ND, head.weight_VD, head.bias_V]
    if not torch.is_grad_enabled():  # autograd tells a function only what could need a gradient, not that none is taken
        inputs = [None if x is None else x.detach() for x in inputs]
    return _ChunkedLoss.apply(*inputs, labels_N, head.scale, head.softcap, chunk_tokens)


@torch.no_grad()
def token_log_probs(
    h_ND: Tensor, head: Head, *, pair_position_M: Tensor, pair_token_M: Tensor, pairs_per_chunk: tuple[int, ...],
    chunk_tokens: int,
) -> Tensor:  # fmt: skip
    """log p(token | position) for M (position, token) pairs, a chunk of positions at a time, float32 [M].

    Several pairs may ask one position (answers that branch there). Pairs are sorted by position;
    `pairs_per_chunk[i]` of them fall into the i-th chunk of `chunk_tokens` positions.
    """
    head = _cast(head, h_ND.dtype)
    parts, done = [], 0
    for index, pairs in enumerate(pairs_per_chunk):
        start = index * chunk_tokens
        z_CV = _logits(h_ND[start : start + chunk_tokens], head)
        position_P = pair_position_M[done : done + pairs] - start
        z_P = z_CV[position_P, pair_token_M[done : done + pairs]]
        norm_C1, _ = _exponentials(z_CV)
        del z_CV  # before the next chunk's is made
        parts.append(z_P - norm_C1[position_P, 0])
        done += pairs
    return torch.cat(parts)
