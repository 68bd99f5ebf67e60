"""A04: frozen embeddings send an input without gradient into a recomputed block; its adapters learn all the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tiny
from snugtune import step
from snugtune.adapters import lora
from snugtune.data.pack import collate
from snugtune.memory import recompute

WHAT = {"lora": {"r": 4, "target_modules": ["q_proj", "v_proj"]}}


def _gradients(recomputed: slice) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = tiny.model("llama")
    built = step.build(tiny.recipe(what=WHAT), model)
    for layer in lora.layers(model).values():
        layer.lora_B.data.normal_(generator=torch.Generator().manual_seed(1))
    recompute.apply_to(built.parts.blocks[recomputed])
    built.forward_backward(collate(tiny.rows([9, 7, 5])), label_tokens=15)
    without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not without, f"trainable weights without a gradient: {without}"
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("recomputed", [slice(0, 1), slice(0, 2), slice(1, 2)], ids=["layer 0", "all", "layer 1"])
def test_a04_every_trainable_weight_gets_the_gradient_of_the_run_without_recompute(recomputed: slice):
    expected = _gradients(slice(0, 0))
    got = _gradients(recomputed)
    assert len(expected) == 2 * 2 * 2
    assert got.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, f"{name} has a gradient of zero"
        assert torch.equal(got[name], gradient), f"gradient of {name}"


def test_a04_the_steps_own_recompute_trains_every_adapter():
    torch.manual_seed(0)
    model = tiny.model("llama")
    built = step.build(tiny.recipe(what=WHAT, how={"recompute": "block"}), model)
    for _ in range(2):  # B is zero before the first update, so A's gradient is zero until then
        built.forward_backward(collate(tiny.rows([9, 7, 5])), label_tokens=15)
        built.update(factor=1.0, learning_rate=1e-2)
    unmoved = [name for name, layer in lora.layers(model).items() if not layer.lora_B.abs().max() > 0]
    assert not unmoved, f"lora_B stayed zero: {unmoved}"
