"""Attention over packed rows against its definition; whole models are held by tests/models."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tiny
from snugtune.kernels import attention


def _inputs(tokens: int, heads: int, kv_heads: int, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, h, tokens, 16).to(dtype).requires_grad_() for h in (heads, kv_heads, kv_heads)]


def _run(qkv: list[Tensor], lengths: list[int], **options: float) -> list[Tensor]:
    layout = attention.layout(lengths)
    out, _ = attention.packed_attention(torch.nn.Module(), *qkv, None, row_layout=layout, **options)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, qkv, dout)]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5).filter(lambda found: max(found) > 1),
    heads=st.sampled_from([(2, 2), (4, 2), (6, 1)]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    scaling=st.sampled_from([None, 0.3]),
)
def test_short_rows_in_16_bits_have_the_gradients_of_float32(lengths, heads, dtype, scaling):
    qkv = _inputs(sum(lengths), *heads, dtype)
    narrow = _run(qkv, lengths, scaling=scaling)
    wide = _run([x.detach().float().requires_grad_() for x in qkv], lengths, scaling=scaling)
    for got, expected, name in zip(narrow, wide, ("output", "dq", "dk", "dv"), strict=True):
        assert got.dtype == dtype
        tiny.assert_close(got.float(), expected, within=2e-2 if dtype == torch.bfloat16 else 4e-3, name=name)


@pytest.mark.parametrize(("dtype", "tokens", "ours"), [
    (torch.bfloat16, 40, True), (torch.bfloat16, 500, False), (torch.float32, 40, False),
])  # fmt: skip
def test_the_backward_in_float32_is_for_short_rows_in_16_bits(dtype, tokens, ours, monkeypatch):
    used = []
    apply = attention._ShortRows.apply
    monkeypatch.setattr(attention._ShortRows, "apply", lambda *a: used.append(a) or apply(*a))
    _run(_inputs(tokens, 2, 2, dtype), [tokens])
    assert bool(used) == ours
