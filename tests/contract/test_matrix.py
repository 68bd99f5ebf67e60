"""The behaviour matrix: every technique gives the training that a step without it gives, and the plan sees every byte of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from snugtune import step
from snugtune.adapters import lora
from snugtune.data.pack import collate
from snugtune.memory import recompute
from snugtune.models import load
from snugtune.planner import simulate
from snugtune.planner.simulate import Means, Micro, Work

METHODS: dict[str, dict[str, Any]] = {
    "lora": {"lora": {"target_modules": ["q_proj", "v_proj", "up_proj"]}},
    "lora with dropout": {"lora": {"target_modules": ["q_proj", "down_proj"], "lora_dropout": 0.1}},
    "full": {"method": "full"},
}
TECHNIQUES: dict[str, dict[str, Any]] = {
    "selective": {"recompute": "selective"},
    "block": {"recompute": "block"},
    "offload": {"recompute": "offload"},
    "small chunks": {"loss_chunk_tokens": 5},
    "8-bit moments": {"optimizer": "adamw_8bit"},
    "moments on the host": {"optimizer": "adamw_host"},
}
"""What `how` may be beside the plain step."""
IN_BACKWARD = {
    "updates in the backward": {"update": "in_backward"},
    "and 8-bit moments": {"update": "in_backward", "optimizer": "adamw_8bit"},
}
"""Another way to drive the step."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WIDE = {"hidden_size": 64, "intermediate_size": 128}
"""So that every linear has groups of 4-bit weights."""
LENGTHS = [30, 28, 27, 9]
WORK = Work(
    micro_batches=(Micro(tuple(tiny.rows(LENGTHS))), Micro(tuple(tiny.rows([40, 20])), onto_gradients=True)),
    eval_batches=(tuple(tiny.choice_rows([(20, [(10, 2), (11, 12, 2)]), (18, [(10, 2), (11, 12, 2)])])), tuple(tiny.rows([30]))),
    eval_capacity=50,
)  # fmt: skip


@pytest.fixture(params=[1024, 16], ids=["", "tiles"])
def tile_tokens(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """MLPs over the whole micro-batch, and over tiles of it."""
    monkeypatch.setattr(recompute, "TILE_TOKENS", request.param)
    monkeypatch.setattr(recompute, "PACKED_TILES", 1)
    return request.param


def _built(what: dict[str, Any], how: dict[str, Any], precision: str) -> step.Step:
    recipe = tiny.recipe(what={"precision": precision, "base": "auto"} | what, how=how)
    stored = step.stored_dtype(recipe.what, DTYPES[precision])
    torch.manual_seed(0)
    built = step.build(recipe, tiny.model("llama", dtype=stored))
    for layer in lora.layers(built.model).values():
        layer.lora_B.data.normal_(std=0.1)
    return built


def _trained(built: step.Step) -> dict[str, Tensor]:
    """The loss, gradients by name, and weights after an update."""
    torch.manual_seed(5)
    batch = collate(WORK.micro_batches[0].rows)
    found = {"loss": built.forward_backward(batch, label_tokens=batch.label_tokens)}
    named = {name: p for name, p in built.model.named_parameters() if p.requires_grad}
    assert not built.without_gradient()
    found |= {f"gradient of {name}": p.grad.clone() for name, p in named.items() if p.grad is not None}
    built.update(factor=1.0, learning_rate=1e-3)
    return found | {f"{name} after a step": p.detach().clone() for name, p in named.items()}


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("technique", TECHNIQUES)
def test_the_same_loss_gradients_and_update_as_without_it(
    technique: str, method: str, precision: str, tile_tokens: int
):
    plain, with_it = (
        _trained(_built(METHODS[method], how, precision)) for how in ({"recompute": "none"}, TECHNIQUES[technique])
    )
    assert plain.keys() == with_it.keys()
    exact = tile_tokens == 1024 or technique not in ("selective", "block", "offload")
    within = {"fp32": 1e-5, "bf16": 0.02, "fp16": 0.005}[precision]
    for name, expected in plain.items():
        if "after a step" in name and (technique in ("8-bit moments", "small chunks") or not exact):
            # An update of the first step is the learning rate times the gradient's sign, which is open where that is near 0.
            assert (with_it[name] - expected).abs().mean() < 0.05 * 1e-3, name
        elif exact and technique != "small chunks":
            assert torch.equal(with_it[name], expected), f"{technique}, {method}, {precision}: {name}"
        else:
            tiny.assert_close(
                with_it[name], expected, within=within, name=f"{technique}, {method}, {precision}: {name}"
            )


@contextmanager
def _real_tensors(**_: Any) -> Iterator[None]:
    yield


@pytest.mark.parametrize(
    ("method", "base", "precision"),
    [("lora", "auto", "fp32"), ("lora", "auto", "bf16"), ("lora", "int4", "fp32"), ("lora", "nf4", "bf16"), ("full", "auto", "fp32"),
     ("full", "auto", "bf16")],
)  # fmt: skip
@pytest.mark.parametrize("technique", ["none", *TECHNIQUES, *IN_BACKWARD])
def test_the_simulated_peak_is_the_replayed_one(
    technique: str, method: str, base: str, precision: str, tile_tokens: int, monkeypatch: pytest.MonkeyPatch
):
    if base == "nf4":
        pytest.importorskip("bitsandbytes")
    recipe = tiny.recipe(
        what=METHODS[method] | {"base": base, "precision": precision},
        how={"loss_chunk_tokens": 16} | (TECHNIQUES | IN_BACKWARD).get(technique, {}),
    )
    config, means = tiny.config("llama", **WIDE), Means(DTYPES[precision])
    simulated = simulate.simulate_whole(recipe, config, WORK, means)
    monkeypatch.setattr(simulate, "FakeTensorMode", _real_tensors)
    assert simulated == simulate.simulate_whole(recipe, config, WORK, means)


@pytest.mark.parametrize("packing", load.PACKINGS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("technique", ["none", *TECHNIQUES])
def test_over_packed_weights_as_over_the_dense_ones_that_they_stand_for(technique: str, packing: Any, precision: str):
    if packing == "nf4":
        pytest.importorskip("bitsandbytes")
    recipe = tiny.recipe(
        what=METHODS["lora"] | {"base": packing, "precision": precision}, how=TECHNIQUES.get(technique, {})
    )
    found = []
    for dense in (False, True):
        model = tiny.model("llama", dtype=DTYPES[precision], **WIDE)
        load.pack_linears(model, load.PACKINGS[packing], filled=True)
        if dense:
            for name, layer in [(n, m) for n, m in model.named_modules() if isinstance(m, load.PackedLinear)]:
                linear = torch.nn.Linear(layer.in_features, layer.out_features, bias=False)
                linear.weight.data = layer.dense(DTYPES[precision])
                model.set_submodule(name, linear)
        torch.manual_seed(0)
        built = step.build(recipe, model)
        for layer in lora.layers(model).values():
            layer.lora_B.data.normal_(std=0.1)
        found.append({name.replace(".base", ""): tensor for name, tensor in _trained(built).items()})
    for name, expected in found[1].items():
        tiny.assert_close(
            found[0][name], expected, within=1e-6 if precision == "fp32" else 0.01, name=f"{technique}: {name}"
        )


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "adamw_host"])
@pytest.mark.parametrize("method", METHODS)
def test_updates_in_the_backward_are_those_after_it(method: str, optimizer: str, precision: str):
    """Tied embeddings get two gradients, which are one before they are used."""
    results = []
    for update in ("after_backward", "in_backward"):
        recipe = tiny.recipe(
            what=METHODS[method] | {"precision": precision, "weight_decay": 0.1},
            how={"optimizer": optimizer, "update": update, "recompute": "block"},
        )
        torch.manual_seed(0)
        model = tiny.model("llama-tied", dtype=step.stored_dtype(recipe.what, DTYPES[precision]))
        built = step.build(recipe, model)
        batch, norms = collate(WORK.micro_batches[0].rows), []
        for _ in range(3):
            torch.manual_seed(5)
            if built.updates_in_backward:
                _, norm = built.norm_in_backward(batch, label_tokens=batch.label_tokens, loss_scale=8.0)
                assert not built.without_gradient()
                torch.rand(7)  # the second pass draws what the first did, whatever happens between them
                built.update_in_backward(
                    batch, label_tokens=batch.label_tokens, loss_scale=8.0, factor=0.1, learning_rate=1e-2
                )
            else:
                built.forward_backward(batch, label_tokens=batch.label_tokens, loss_scale=8.0)
                norm = built.grad_norm()
                built.update(factor=0.1, learning_rate=1e-2)
            norms.append(norm)
            assert all(p.grad is None for p in built.trainable)
        results.append((torch.stack(norms), {name: p.detach() for name, p in model.named_parameters()}))
    (norms, weights), (norms_inside, weights_inside) = results
    tiny.assert_close(norms_inside, norms, within=1e-6, name="gradient norms")
    for name, weight in weights.items():
        assert torch.equal(weights_inside[name], weight), name
