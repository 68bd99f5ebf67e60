"""Weights in 4 bits: near the ones that they were made from, and a linear layer like any other over what they are now."""

from __future__ import annotations

import weakref
from typing import Any

import hypothesis.extra.numpy as arrays
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.pytorch_utils import Conv1D

from snugtune.kernels import int4
from snugtune.kernels.int4 import Int4Linear, Packed

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def _packed(weight_NK: Tensor, group: int = 32) -> Packed:
    packed = int4.empty(*weight_NK.shape, group=group, device=weight_NK.device)
    int4.quantize(weight_NK, packed)
    return packed


def _codes(packed: Packed) -> Tensor:
    """[N, K], taken out one by one."""
    codes_NH = packed.codes_NH
    return torch.stack([codes_NH & 15, codes_NH >> 4], dim=-1).flatten(1)


def _written_out(packed: Packed) -> Tensor:
    """(q - z) * s in float64."""
    group = packed.codes_NH.shape[1] * 2 // packed.scales_NG.shape[1]
    scales_NK, zeros_NK = (x.double().repeat_interleave(group, dim=1) for x in packed[1:])
    return (_codes(packed).double() - zeros_NK) * scales_NK


def _assert_near(weight_NK: Tensor, packed: Packed, group: int = 32) -> None:
    """Half a step, and what the ends lose where the stored scale is smaller than the range asks for."""
    weight_NGg = weight_NK.double().unflatten(1, (-1, group))
    range_NG = weight_NGg.amax(-1).clamp(min=0) - weight_NGg.amin(-1).clamp(max=0)
    scales_NG = packed.scales_NG.double()
    bound_NG = scales_NG / 2 + (range_NG - 15 * scales_NG).clamp(min=0)
    off_NGg = (weight_NGg - int4.dense(packed, torch.float32).double().unflatten(1, (-1, group))).abs()
    worst_NG = off_NGg.amax(-1)
    assert (worst_NG <= bound_NG * (1 + 1e-5)).all(), f"{(worst_NG / bound_NG).max()} times the bound"


# --- rounding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_a_weight_is_at_most_half_a_step_off(dtype: torch.dtype, group: int):
    weight_NK = (torch.randn(24, 256, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)
    packed = _packed(weight_NK, group)
    _assert_near(weight_NK, packed, group)
    step_NG = (weight_NK.float().unflatten(1, (-1, group)).amax(-1) - weight_NK.float().unflatten(1, (-1, group)).amin(-1)) / 15  # fmt: skip
    assert (packed.scales_NG.float() / step_NG - 1).abs().max() < 2**-10, "no wider than the range asks for"


@settings(deadline=None)
@given(
    arrays.arrays("float32", (8, 64), elements=st.floats(-1e4, 1e4, width=32)),
    st.sampled_from(DTYPES),
    st.sampled_from([32, 64]),
)
def test_any_weight_is_at_most_half_a_step_off(values, dtype: torch.dtype, group: int):
    weight_NK = torch.from_numpy(values).to(dtype)
    _assert_near(weight_NK, _packed(weight_NK, group), group)


@settings(deadline=None)
@given(
    codes=arrays.arrays("uint8", (8, 64), elements=st.integers(0, 15)),
    zeros=arrays.arrays("uint8", (8, 2), elements=st.integers(0, 15)),
    scales=arrays.arrays("float16", (8, 2), elements=st.floats(2**-20, 1e3, width=16)),
)
def test_weights_on_the_grid_come_back_exactly(codes, zeros, scales):
    """With the smallest and largest code in each group, the grid can be told from the weights."""
    codes[:, [3, 40]], codes[:, [17, 63]] = 0, 15
    made = Packed(
        torch.from_numpy(codes[:, 0::2] | codes[:, 1::2] << 4), torch.from_numpy(scales), torch.from_numpy(zeros)
    )
    for got, expected, name in zip(_packed(int4.dense(made, torch.float32)), made, Packed._fields, strict=True):
        assert torch.equal(got, expected), name


@pytest.mark.parametrize(
    ("values", "codes"),
    [
        ([0.0] * 32, {0}),
        ([3.0] * 32, {15}),
        ([-3.0] * 32, {0}),
        ([0.0, 4.5] * 16, {0, 15}),
        ([-4.5, -0.3] * 16, {0, 14}),
    ],
    ids=["zeros", "a positive constant", "a negative constant", "none below zero", "none above zero"],
)
def test_one_sided_groups_are_exact_where_they_can_be(values: list[float], codes: set[int]):
    """A zero point outside of 0..15 does not exist, so that the range is stretched to hold zero."""
    weight_NK = torch.tensor([values] * 8)
    packed = _packed(weight_NK)
    assert set(_codes(packed).flatten().tolist()) == codes
    torch.testing.assert_close(int4.dense(packed, torch.float32), weight_NK, rtol=2**-11, atol=0)


@pytest.mark.parametrize("size", [1e-9, 3e-7, 6e-5])
def test_scales_too_small_for_float16_lose_little(size: float):
    weight_NK = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)) * size
    packed = _packed(weight_NK)
    assert (packed.scales_NG > 0).all()
    _assert_near(weight_NK, packed)


def test_not_a_number_does_not_become_one():
    weight_NK = torch.zeros(8, 64)
    weight_NK[2, 40] = torch.nan
    got = int4.dense(_packed(weight_NK), torch.float32)
    assert got[2, 32:].isnan().all()
    assert not got[2, :32].isnan().any()


@pytest.mark.parametrize(
    ("outputs", "inputs", "group"),
    [(64, 256, 128), (64, 576, 64), (64, 1536, 128), (64, 96, 32), (64, 48, None), (64, 33, None), (12, 128, None)],
)
def test_the_largest_group_that_divides_the_width(outputs: int, inputs: int, group: int | None):
    assert int4.group_size(outputs, inputs) == group


def test_slices_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch):
    weight_NK = torch.randn(23, 96)
    whole = _packed(weight_NK)
    dense = int4.dense(whole, torch.float32)
    for rows in (1, 5, 22):
        monkeypatch.setattr(int4, "_QUANTIZE_SLICE", rows * 96)
        monkeypatch.setattr(int4, "_DENSE_SLICE", rows * 96)
        assert all(torch.equal(a, b) for a, b in zip(_packed(weight_NK), whole, strict=True))
        assert torch.equal(int4.dense(whole, torch.float32), dense)


def test_the_weight_is_not_written_to():
    weight_NK = torch.randn(16, 64)
    before = weight_NK.clone()
    _packed(weight_NK)
    assert torch.equal(weight_NK, before)


# --- the dense weight ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_is_the_formula_rounded_once(dtype: torch.dtype):
    packed = _packed(torch.randn(16, 128), 64)
    got, exact = int4.dense(packed, dtype), _written_out(packed)
    assert got.dtype == dtype
    assert torch.equal(got, exact.float().to(dtype)), "rounded more than once"
    assert torch.equal(exact, exact.float().double()), "float32 holds every product"


def test_bytes_are_those_of_compressed_tensors():
    """int32 words along the input with the first of eight codes in the lowest four bits."""
    packed = _packed(torch.randn(8, 64))
    words = packed.codes_NH.view(torch.int32)
    codes = torch.stack([(words >> 4 * i) & 15 for i in range(8)], dim=-1).flatten(1)
    assert torch.equal(codes.to(torch.uint8), _codes(packed))


class _Live(TorchDispatchMode):
    """Sizes of the storages that operations make, and the most that ever stood at one time, `standing` ones left out."""

    def __init__(self, *standing: Tensor) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.live = self.peak = 0
        self._known: dict[int, Any] = {id(storage): storage for t in standing for storage in [t.untyped_storage()]}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and id(tensor.untyped_storage()) not in self._known:
                self._born(tensor.untyped_storage())
        return out

    def _born(self, storage: Any) -> None:
        key, size = id(storage), storage.nbytes()

        def died(_: Any) -> None:
            self.live -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, died)
        self.sizes.append(size)
        self.live += size
        self.peak = max(self.peak, self.live)


@pytest.mark.parametrize("dtype", DTYPES)
def test_only_one_dense_weight_and_a_slice_exist_at_one_time(dtype: torch.dtype):
    with FakeTensorMode():
        packed = int4.empty(4096, 11008, group=128)
        with _Live(*packed) as live:
            int4._dense._init_fn(*packed, dtype)  # inside of the operation
        seen_inside = live.peak
        with _Live(*packed) as live:
            int4.dense(packed, dtype)
    dense_bytes = 4096 * 11008 * dtype.itemsize
    assert live.peak == dense_bytes
    assert int4.DENSE_BYTES / 3 < seen_inside - dense_bytes <= int4.DENSE_BYTES


def test_the_operation_keeps_torchs_rules():
    torch.library.opcheck(int4._dense, (*_packed(torch.randn(16, 64)), torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_holds_no_more_than_it_says(dtype: torch.dtype):
    with FakeTensorMode():
        weight_NK, packed = torch.empty(4096, 11008, dtype=dtype), int4.empty(4096, 11008, group=128)
        with _Live(*packed, weight_NK) as live:
            int4.quantize(weight_NK, packed)
    assert int4.QUANTIZE_BYTES / 3 < live.peak <= int4.QUANTIZE_BYTES


def test_scales_that_were_cast_are_noticed():
    layer = Int4Linear.from_linear(nn.Linear(32, 8), group=32).to(torch.bfloat16)
    with pytest.raises(AssertionError, match="scales"):
        layer(torch.randn(3, 32))


def test_it_costs_little_more_than_four_bits():
    layer = Int4Linear(4096, 4096, group=128, device="meta")
    bits = 8 * sum(b.nbytes for b in layer.buffers()) / 4096**2
    assert bits == 4 + 16 / 128 + 8 / 128


# --- the layer -------------------------------------------------------------------------------------------------------


def _pair(dtype: torch.dtype, *, bias: bool = True, conv: bool = False) -> tuple[Int4Linear, nn.Linear]:
    """(the layer in 4 bits, a plain one with the weight that it stands for)."""
    torch.manual_seed(0)
    source = Conv1D(24, 64).to(dtype) if conv else nn.Linear(64, 24, bias=bias, dtype=dtype)
    if source.bias is not None:
        nn.init.normal_(source.bias)
    layer = Int4Linear.from_linear(source, group=32)
    plain = nn.Linear(64, 24, bias=source.bias is not None, dtype=dtype)
    plain.weight.data = layer.dense(dtype)
    if source.bias is not None:
        plain.bias.data = source.bias.data.clone()
    return layer, plain


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 64), (1, 5, 64), (2, 5, 64)])
@pytest.mark.parametrize(("bias", "conv"), [(True, False), (False, False), (True, True)])
def test_output_and_gradients_are_those_of_a_plain_linear(dtype, shape, bias, conv):
    layer, plain = _pair(dtype, bias=bias, conv=conv)
    x = torch.randn(shape, dtype=dtype)
    dy = torch.randn(*shape[:-1], 24, dtype=dtype)
    results = []
    for module in (layer, plain):
        leaf = x.clone().requires_grad_()
        out = module(leaf)
        inputs = [leaf, module.bias] if bias else [leaf]
        results.append([out.detach(), *torch.autograd.grad(out, inputs, dy)])
    for got, expected, name in zip(*results, ("output", "input", "bias"), strict=False):
        assert got.dtype == dtype
        assert torch.equal(got, expected), f"{name} differs"


def test_conv1d_is_packed_by_its_output():
    conv = Conv1D(24, 64)
    layer = Int4Linear.from_linear(conv, group=64)
    assert (layer.out_features, layer.in_features, layer.transposed) == (24, 64, True)
    assert all(torch.equal(a, b) for a, b in zip(layer.packed, _packed(conv.weight.t(), 64), strict=True))


def test_nothing_is_kept_for_backward():
    layer, _ = _pair(torch.float32)
    kept: list[Tensor] = []
    x = torch.randn(7, 64, requires_grad=True)
    standing = (x, *layer.buffers(), *layer.parameters())
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t), _Live(*standing) as live:
        out = layer(x)
        assert live.live == out.nbytes, "the dense weight outlived its product"
    assert not kept
    assert out.requires_grad


@pytest.mark.parametrize("dtype", DTYPES)
def test_fake_tensors_take_the_same_way(dtype: torch.dtype):
    def run() -> list[tuple[torch.Size, torch.dtype, torch.Size]]:
        layer = Int4Linear.from_linear(nn.Linear(64, 24, dtype=dtype), group=64)
        x = torch.randn(2, 5, 64, dtype=dtype, requires_grad=True)
        with _Live() as live:
            out = layer(x)
            out.sum().backward()
        assert x.grad is not None
        return [(t.shape, t.dtype) for t in (out, x.grad, *layer.packed)] + [sorted(live.sizes)]  # type: ignore[list-item]

    real = run()
    with FakeTensorMode():
        assert run() == real


def test_no_gradient_no_graph():
    layer, plain = _pair(torch.float32)
    layer.requires_grad_(False)
    x = torch.randn(3, 64)
    assert not layer(x).requires_grad
    assert torch.equal(layer(x), F.linear(x, plain.weight, plain.bias))


@pytest.mark.gpu
def test_a_gpu_packs_and_unpacks_the_same_numbers():
    weight_NK = torch.randn(256, 1024) * 0.02
    here, there = _packed(weight_NK, 128), _packed(weight_NK.cuda(), 128)
    for a, b in zip(here, there, strict=True):
        assert torch.equal(a, b.cpu())
    for dtype in DTYPES:
        assert torch.equal(int4.dense(here, dtype), int4.dense(there, dtype).cpu())
