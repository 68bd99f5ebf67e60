"""Attention over packed rows: one sequence of T tokens that holds many rows, none of which sees another.

No square mask over T exists. Rows of like length stand together in a group and go through one batched
scaled_dot_product_attention call; right padding inside a group needs no mask, since a causal row never looks right.

Shapes: B batch (always 1), T packed tokens, H query heads, K key/value heads, D head width, R rows of a group,
L longest row of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "snugtune_packed"
"""What `attn_implementation` is set to."""

_GROUP_FILL = 7 / 8
"""A row joins a group when its length is at least this part of the group's longest; attention is the only part of a
step that computes the padding, and it is a few per cent of one."""


_SHORT = 384
"""Tokens of a row up to which a CPU's backward of attention in 16 bits goes through float32 (docs/LOG.md)."""


@dataclass(frozen=True)
class RowGroup:
    """Rows that share one attention call: T positions start..start+tokens, `rows` rows padded to `length`."""

    start: int
    tokens: int
    rows: int
    length: int
    pad_index: Tensor | None
    """[R*L] positions relative to start; a padded slot repeats its row's last token. None: nothing is padded."""
    unpad_index: Tensor | None
    """[tokens] slots in R*L that hold real tokens."""
    mask_LL: Tensor | None = None
    """[L, L] bool, True where a query may look; None: causal."""


RowLayout = tuple[RowGroup, ...]


def layout(lengths: Sequence[int], *, device: torch.device | str = "cpu") -> RowLayout:
    """Groups for packed rows of these lengths, in this order. Sorted lengths give the fewest groups."""
    groups: list[RowGroup] = []
    start = first = 0
    while first < len(lengths):
        longest = lengths[first]
        last = first + 1
        while last < len(lengths) and _GROUP_FILL * longest <= lengths[last] <= longest:
            last += 1
        groups.append(_group(lengths[first:last], start, device))
        start += groups[-1].tokens
        first = last
    return tuple(groups)


def tree_group(start: int, rows: int, mask_LL: Tensor) -> RowGroup:
    """`rows` equally long rows whose tokens see what `mask_LL` says (answers that branch from one prompt)."""
    length = mask_LL.shape[0]
    return RowGroup(start, rows * length, rows, length, None, None, mask_LL)


def _group(lengths: Sequence[int], start: int, device: torch.device | str) -> RowGroup:
    rows, longest, tokens = len(lengths), max(lengths), sum(lengths)
    if rows * longest == tokens:
        return RowGroup(start, tokens, rows, longest, None, None)
    pad: list[int] = []
    unpad: list[int] = []
    offset = 0
    for row, length in enumerate(lengths):
        pad += [offset + min(i, length - 1) for i in range(longest)]
        unpad += [row * longest + i for i in range(length)]
        offset += length
    return RowGroup(start, tokens, rows, longest, torch.tensor(pad, device=device), torch.tensor(unpad, device=device))


def packed_attention(
    module: nn.Module,
    query_BHTD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    attention_mask: Tensor | None,
    *,
    row_layout: RowLayout,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface. Returns ([B, T, H, D], None)."""
    assert attention_mask is None and query_BHTD.shape[0] == 1
    q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1) for x in (query_BHTD, key_BKTD, value_BKTD))
    outputs = [_attend(q_THD, k_TKD, v_TKD, group, dropout, scaling, sliding_window, softcap) for group in row_layout]
    out_THD = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return out_THD.unsqueeze(0), None


def _attend(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, group: RowGroup,
    dropout: float, scaling: float | None, sliding_window: int | None, softcap: float | None,
) -> Tensor:  # fmt: skip
    q_RHLD, k_RKLD, v_RKLD = (_rows(x, group) for x in (q_THD, k_TKD, v_TKD))
    mask_LL = group.mask_LL
    if sliding_window is not None and group.length > sliding_window:
        mask_LL = _window(group.length, sliding_window, q_THD.device, mask_LL)
    if softcap is None and mask_LL is None and dropout == 0 and _backward_is_slow(q_RHLD):
        out_RHLD = _ShortRows.apply(q_RHLD, k_RKLD, v_RKLD, scaling)
    elif softcap is None:
        out_RHLD = F.scaled_dot_product_attention(
            q_RHLD, k_RKLD, v_RKLD, attn_mask=mask_LL, dropout_p=dropout, is_causal=mask_LL is None,
            scale=scaling, enable_gqa=q_RHLD.shape[1] != k_RKLD.shape[1],
        )  # fmt: skip
    else:
        out_RHLD = reference(q_RHLD, k_RKLD, v_RKLD, mask_LL, dropout=dropout, scaling=scaling, softcap=softcap)
    out_SHD = out_RHLD.transpose(1, 2).flatten(0, 1)
    return out_SHD if group.unpad_index is None else out_SHD.index_select(0, group.unpad_index)


class _ShortRows(torch.autograd.Function):
    """Causal attention on a CPU in 16 bits, whose backward is computed in float32."""

    @staticmethod
    def forward(ctx: Any, q_RHLD: Tensor, k_RKLD: Tensor, v_RKLD: Tensor, scaling: float | None) -> Tensor:
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out_RHLD, lse_RHL = op(q_RHLD, k_RKLD, v_RKLD, 0.0, True, scale=scaling)
        ctx.save_for_backward(q_RHLD, k_RKLD, v_RKLD, out_RHLD, lse_RHL)
        ctx.scaling = scaling
        return out_RHLD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # type: ignore[override]
        q, k, v, out, lse_RHL = ctx.saved_tensors
        wide = [x.float() for x in (*grad_outputs, q, k, v, out)]
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return *(x.to(q.dtype) for x in op(*wide, lse_RHL, 0.0, True, scale=ctx.scaling)), None


def _backward_is_slow(q_RHLD: Tensor) -> bool:
    """Whether torch's own backward costs more than one in float32 and the casts: it takes some 60 microseconds for each row
    and head, however short the row is."""
    if q_RHLD.device.type != "cpu" or q_RHLD.dtype.itemsize > 2 or not torch.is_grad_enabled():
        return False
    return q_RHLD.shape[-2] <= _SHORT


def _rows(x_THD: Tensor, group: RowGroup) -> Tensor:
    rows_SHD = x_THD[group.start : group.start + group.tokens]
    if group.pad_index is not None:
        rows_SHD = rows_SHD.index_select(0, group.pad_index)
    return rows_SHD.unflatten(0, (group.rows, group.length)).transpose(1, 2)


def _window(length: int, window: int, device: torch.device, mask_LL: Tensor | None) -> Tensor:
    """Causal mask of a sliding window: a token sees itself and the window - 1 tokens before it."""
    assert mask_LL is None, "answers that branch are not scored under a sliding window shorter than the row"
    here_L = torch.arange(length, device=device)
    back_LL = here_L[:, None] - here_L[None, :]
    return (back_LL >= 0) & (back_LL < window)


def reference(
    q_RHLD: Tensor, k_RKLD: Tensor, v_RKLD: Tensor, mask_LL: Tensor | None,
    *, dropout: float = 0.0, scaling: float | None = None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """softmax(softcap * tanh(q k^T * scaling / softcap) + mask) v, written out; the truth that tests compare with."""
    repeats = q_RHLD.shape[1] // k_RKLD.shape[1]
    k_RHLD, v_RHLD = (x.repeat_interleave(repeats, dim=1) for x in (k_RKLD, v_RKLD))
    scale = scaling if scaling is not None else q_RHLD.shape[-1] ** -0.5
    scores_RHLL = q_RHLD @ k_RHLD.transpose(-1, -2) * scale
    if softcap is not None:
        scores_RHLL = softcap * torch.tanh(scores_RHLL / softcap)
    if mask_LL is None:
        mask_LL = torch.ones(scores_RHLL.shape[-2:], dtype=torch.bool, device=scores_RHLL.device).tril()
    scores_RHLL = scores_RHLL.masked_fill(~mask_LL, torch.finfo(scores_RHLL.dtype).min)
    weights_RHLL = torch.softmax(scores_RHLL, dim=-1, dtype=torch.float32).to(q_RHLD.dtype)
    return F.dropout(weights_RHLL, dropout) @ v_RHLD


def _no_mask(*_: Any, **__: Any) -> None:
    """Rows are told apart by their boundaries, so there is no mask to build."""


def register() -> None:
    """Make `attn_implementation=NAME` known to transformers (its own door for attention functions)."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, packed_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _no_mask)
