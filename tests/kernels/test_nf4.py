"""NF4: bitsandbytes's own codes and values, row by row; the bytes that a plan counts; a message where it is not there."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.pytorch_utils import Conv1D

from snugtune.errors import RecipeError
from snugtune.kernels import nf4
from snugtune.kernels.nf4 import Nf4Linear
from snugtune.planner.live import LiveBytes

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)

QUANTILES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Appendix E of arXiv 2305.14314."""


def _nearest(weight_NK: torch.Tensor) -> torch.Tensor:
    """NF4 written out: each block over its largest magnitude, each number to the nearest quantile."""
    values = torch.tensor(QUANTILES)
    blocks_XB = weight_NK.reshape(-1, nf4.BLOCK)
    largest_X1 = blocks_XB.abs().amax(1, keepdim=True)
    codes = ((blocks_XB / largest_X1.clamp(min=1e-38))[..., None] - values).abs().argmin(-1)
    return (values[codes] * largest_X1.half().float()).view_as(weight_NK)


@settings(max_examples=25, deadline=None)
@given(
    outputs=st.integers(1, 20), blocks=st.integers(1, 4), seed=st.integers(0, 99), size=st.sampled_from([1e-3, 1.0, 50.0]),
    zeros=st.booleans(),
)  # fmt: skip
def test_each_weight_becomes_the_nearest_of_the_papers_values(
    outputs: int, blocks: int, seed: int, size: float, zeros: bool
):
    weight_NK = torch.randn(outputs, blocks * nf4.BLOCK, generator=torch.Generator().manual_seed(seed)) * size
    if zeros:
        weight_NK[0, : nf4.BLOCK] = 0
    layer = Nf4Linear(weight_NK.shape[1], outputs)
    layer.store(weight_NK)
    got, expected = layer.dense(torch.float32), _nearest(weight_NK)
    ties = (got - weight_NK).abs() <= (expected - weight_NK).abs() * (
        1 + 1e-5
    )  # halfway between two values either is nearest
    assert (torch.isclose(got, expected, rtol=1e-6, atol=0) | ties).all()


def test_codes_are_those_that_bitsandbytes_gives_the_whole_weight(monkeypatch: pytest.MonkeyPatch):
    nf4.require()
    weight_NK = torch.randn(37, 192)
    codes, scales = torch.ops.bitsandbytes.quantize_4bit(weight_NK, nf4.BLOCK, "nf4", torch.uint8)
    monkeypatch.setattr(nf4, "_STORE_SLICE", 1000)
    layer = Nf4Linear(192, 37)
    layer.store(weight_NK)
    assert torch.equal(layer.codes.view(-1), codes.view(-1))
    assert torch.equal(layer.scales.view(-1), scales.half())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_layer_is_a_linear_over_the_weight_that_it_stands_for(dtype: torch.dtype):
    torch.manual_seed(0)
    source = nn.Linear(128, 24, dtype=dtype)
    layer = Nf4Linear.from_linear(source, group=nf4.BLOCK)
    plain = nn.Linear(128, 24, dtype=dtype)
    plain.weight.data, plain.bias = layer.dense(dtype), source.bias
    x, dy = torch.randn(3, 5, 128, dtype=dtype, requires_grad=True), torch.randn(3, 5, 24, dtype=dtype)
    got, expected = layer(x), plain(x)
    assert torch.equal(got, expected)
    assert torch.equal(*(torch.autograd.grad(y, x, dy)[0] for y in (got, expected)))


def test_a_weight_that_the_files_hold_turned_around():
    conv = Conv1D(24, 64)
    layer = Nf4Linear.from_linear(conv, group=nf4.BLOCK)
    assert layer.transposed and (layer.out_features, layer.in_features) == (24, 64)
    other = Nf4Linear(64, 24)
    other.store(conv.weight.t())
    assert torch.equal(layer.dense(torch.float32), other.dense(torch.float32))


def test_rows_by_themselves_are_what_they_are_among_others():
    weight_NK = torch.randn(24, 128)
    layer = Nf4Linear(128, 24)
    layer.store(weight_NK)
    assert torch.equal(layer.as_stored(weight_NK[5:9]), layer.dense(torch.float32)[5:9])


def test_a_width_without_whole_blocks_stays_as_it_is():
    assert Nf4Linear.group_of(8, 96) is None
    assert Nf4Linear.group_of(7, 128) == nf4.BLOCK


def test_the_bytes_are_those_that_the_paper_counts_with_scales_in_16_bits():
    layer = Nf4Linear(4096, 4096, device="meta")
    assert sum(b.nbytes for b in layer.buffers()) * 8 / 4096**2 == 4 + 16 / 64


def test_a_fake_layer_gives_what_a_real_one_does_and_needs_no_data():
    with FakeTensorMode(), LiveBytes() as live:
        layer = Nf4Linear(128, 24)
        live.note(list(layer.buffers()))
        before = live.live_bytes
        y = layer(torch.ones(2, 128, dtype=torch.bfloat16))
        assert (y.shape, y.dtype) == ((2, 24), torch.bfloat16)
        assert live.peak_bytes - before >= 24 * 128 * 2, "the unpacked weight is not seen"


def test_without_bitsandbytes_the_way_to_bring_it_is_told(monkeypatch: pytest.MonkeyPatch):
    found = importlib.util.find_spec

    def absent(name: str, *rest: Any) -> Any:
        return None if name == "bitsandbytes" else found(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", absent)
    with pytest.raises(RecipeError, match=r"snugtune\[nf4\]"):
        Nf4Linear(64, 8).store(torch.ones(8, 64))
