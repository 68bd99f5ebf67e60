"""Norms and gated MLPs that keep less: the families' own results and gradients, and the bytes that are kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import PreTrainedModel

import tiny
from snugtune.memory import lean

FAMILIES = [name for name, (family, _) in tiny.VARIANTS.items() if family in lean._NORMS | lean._GATED]


def _stood_in(model: nn.Module, *kinds: type) -> list[nn.Module]:
    return [m for m in model.modules() if isinstance(vars(m).get("forward"), kinds)]


def _results(model: PreTrainedModel, *, within: torch.dtype) -> dict[str, Tensor]:
    model.requires_grad_().train()
    ids = torch.tensor([[5, 9, 77, 3, 40, 41, 8]])
    with torch.autocast("cpu", enabled=False):
        logits = model(input_ids=ids, use_cache=False).logits
    logits.float().square().mean().backward()
    grads = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    return grads | {"logits": logits.detach().float()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_gives_its_own_logits_and_gradients(name: str, dtype: torch.dtype):
    plain, with_it = (tiny.model(name, attn="eager", dtype=dtype) for _ in range(2))
    lean.apply(with_it)
    family = with_it.config.model_type
    if family in lean._NORMS:
        assert _stood_in(with_it, lean._Norm), name
    if family in lean._GATED:
        assert len(_stood_in(with_it, lean._Gated)) == 2, name
    got, expected = (_results(model, within=dtype) for model in (with_it, plain))
    assert got.keys() == expected.keys()
    for key, tensor in expected.items():
        tiny.assert_close(got[key], tensor, within=2e-5 if dtype == torch.float32 else 0.04, name=f"{name}: {key}")


@pytest.mark.parametrize("name", ["gpt2", "phi", "starcoder2", "gpt_neox"])
def test_other_forms_stay_as_they_are(name: str):
    model = tiny.model(name, attn="eager")
    lean.apply(model)
    assert not _stood_in(model, lean._Norm, lean._Gated)


def test_an_activation_of_another_kind_stays_as_it_is():
    model = tiny.model("llama", attn="eager", hidden_act="relu")
    lean.apply(model)
    assert not _stood_in(model, lean._Gated)


def test_a_module_that_something_stands_in_for_is_left_alone():
    model = tiny.model("llama", attn="eager")
    norm: Any = model.model.norm
    taken = norm.forward = lambda x: x
    lean.apply(model)
    assert norm.forward is taken


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_the_gated_function_has_the_gradients_of_what_it_stands_for(act: str, dtype: torch.dtype):
    from transformers.activations import ACT2FN

    module = ACT2FN[act]
    gate, up = (torch.randn(3, 5, dtype=dtype, requires_grad=True) for _ in range(2))
    dh = torch.randn(3, 5, dtype=dtype)
    got = lean._GatedFunction.apply(gate, up, module)
    expected = module(gate) * up
    assert torch.equal(got, expected)
    for a, b in zip(
        torch.autograd.grad(got, (gate, up), dh), torch.autograd.grad(expected, (gate, up), dh), strict=True
    ):
        tiny.assert_close(a, b, within=1e-6, name=act)


@settings(max_examples=30, deadline=None)
@given(
    size=st.sampled_from([1e-4, 1.0, 1e3]), width=st.integers(1, 70), tokens=st.integers(1, 5), seed=st.integers(0, 99)
)
def test_a_norm_has_the_gradients_of_its_formula(size: float, width: int, tokens: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(tokens, width, generator=generator) * size).requires_grad_()
    weight, dy = (
        torch.randn(width, generator=generator, requires_grad=True),
        torch.randn(tokens, width, generator=generator),
    )
    got = lean._NormFunction.apply(x, weight, 1e-5)
    wide = x.double()
    expected = weight * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
    tiny.assert_close(got, expected.float(), within=1e-5, name="norm")
    for a, b in zip(*(torch.autograd.grad(y, (x, weight), dy) for y in (got, expected.float())), strict=True):
        assert (a - b).abs().max() <= 1e-5 * (dy.norm() * weight.norm() / size + b.abs().max()), (size, width)


def test_less_is_kept():
    kept: dict[str, int] = {}
    for name in ("plain", "lean"):
        sizes: dict[int, int] = {}

        def keep(t: Tensor, sizes: dict[int, int] = sizes) -> Tensor:
            if not isinstance(t, nn.Parameter):
                sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        model = tiny.model("llama", attn="sdpa", dtype=torch.bfloat16).requires_grad_()
        if name == "lean":
            lean.apply(model)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            model(input_ids=torch.arange(40)[None] % 100, use_cache=False)
            kept[name] = sum(sizes.values())
    block = 40 * (48 * 2 + 2 * 32 * 4)  # act(gate) in 16 bits, and the copies in float32 of two norms' inputs
    assert kept["plain"] - kept["lean"] >= 2 * block, kept
