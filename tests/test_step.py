"""The step: exact scaling, AdamW's own update, no look at a tensor's value, a simulated peak that is the real one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig

import tiny
from snugtune import step
from snugtune.adapters import lora
from snugtune.data.pack import collate
from snugtune.memory.precision import LossScale
from snugtune.models import load
from snugtune.planner import simulate
from snugtune.planner.live import LiveBytes
from snugtune.planner.simulate import Micro, Profile, Work
from snugtune.recipe import Recipe

METHODS: dict[str, dict[str, Any]] = {
    "lora": {"lora": {"target_modules": ["q_proj", "v_proj", "down_proj"]}},
    "lora with dropout": {"lora": {"target_modules": ["q_proj", "down_proj"], "lora_dropout": 0.1}},
    "full": {"method": "full"},
}


def _built(what: dict[str, Any], *, seed: int = 0, dtype: torch.dtype = torch.float32, **how: Any) -> step.Step:
    model = tiny.model("llama", dtype=dtype)
    torch.manual_seed(seed)
    built = step.build(tiny.recipe(what=what, how=how), model)
    for layer in lora.layers(model).values():
        layer.lora_B.data.normal_(std=0.1)
    return built


def _names(built: step.Step) -> list[str]:
    return [name for name, p in built.model.named_parameters() if p.requires_grad]


def _gradients(built: step.Step) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in built.model.named_parameters() if p.grad is not None}


# --- losses and their scale ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_loss_scale_that_is_a_power_of_two_scales_gradients_exactly(method: str):
    batch = collate(tiny.rows([9, 7, 5]))
    plain, scaled = _built(METHODS[method]), _built(METHODS[method])
    loss = plain.forward_backward(batch, label_tokens=batch.label_tokens)
    same_loss = scaled.forward_backward(batch, label_tokens=batch.label_tokens, loss_scale=2.0**10)
    assert torch.equal(loss, same_loss), "the returned loss is not scaled"
    assert not loss.requires_grad
    for name, gradient in _gradients(plain).items():
        assert torch.equal(_gradients(scaled)[name], gradient * 2.0**10), f"gradient of {name}"
    tiny.assert_close(scaled.grad_norm(), plain.grad_norm() * 2.0**10, within=1e-6, name="norm")


def test_the_norm_is_over_all_trainable_gradients():
    built = _built(METHODS["lora"])
    built.forward_backward(collate(tiny.rows([9, 7])), label_tokens=10)
    expected = torch.cat([g.flatten() for g in _gradients(built).values()]).norm()
    tiny.assert_close(built.grad_norm(), expected, within=1e-6, name="norm")


def test_the_loss_scale_halves_on_overflow_and_doubles_after_enough_good_steps():
    scale = LossScale(scale=8.0, growth_interval=3)
    seen = []
    for finite in (True, True, True, True, True, False, True, True, True):
        scale.update(finite=finite)
        seen.append(scale.scale)
    assert seen == [8, 8, 16, 16, 16, 8, 8, 8, 16]


def test_the_loss_scale_never_falls_below_one():
    scale = LossScale(scale=4.0)
    for _ in range(10):
        scale.update(finite=False)
    assert scale.scale == 1.0


# --- the update ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["lora", "full"])
def test_three_updates_are_those_of_torchs_adamw(method: str):
    """Gradients times the factor, the learning rate of each step, weight decay on matrices alone."""
    built = _built(METHODS[method] | {"weight_decay": 0.1, "learning_rate": 1e-3})
    copies = {
        name: p.detach().clone().requires_grad_() for name, p in built.model.named_parameters() if p.requires_grad
    }
    matrices = [p for p in copies.values() if p.ndim > 1]
    vectors = [p for p in copies.values() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    expected = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, foreach=False, fused=False)
    batch = collate(tiny.rows([9, 7, 5]))
    for factor, learning_rate in ((0.5, 1e-2), (1.0, 3e-3), (2.0**-7, 1e-3)):
        built.forward_backward(batch, label_tokens=batch.label_tokens)
        for name, gradient in _gradients(built).items():
            copies[name].grad = gradient * factor
        for group in expected.param_groups:
            group["lr"] = learning_rate
        expected.step()
        built.update(factor=factor, learning_rate=learning_rate)
        assert all(p.grad is None for p in built.trainable), "gradients outlive the update"
    for name, weight in copies.items():
        got = built.model.get_parameter(name).detach()
        tiny.assert_close(got, weight.detach(), within=1e-6, name=f"{name} after three updates")


def test_only_what_the_method_trains_changes():
    for method, what in METHODS.items():
        built = _built(what)
        before = {name: p.detach().clone() for name, p in built.model.named_parameters()}
        built.forward_backward(collate(tiny.rows([9, 7])), label_tokens=10)
        built.update(factor=1.0, learning_rate=1e-2)
        changed = [n for n, p in built.model.named_parameters() if not torch.equal(p, before[n])]
        assert changed == _names(built), method
        assert all(("lora_" in name) == (method != "full") for name in changed), method


@pytest.mark.parametrize("method", METHODS)
def test_recompute_gives_bit_equal_gradients(method: str):
    """Dropout included: the two runs draw the same random numbers."""
    found = []
    for recompute in ("none", "block"):
        built = _built(METHODS[method], recompute=recompute)
        torch.manual_seed(4)
        built.forward_backward(collate(tiny.rows([9, 7, 5])), label_tokens=15)
        found.append(_gradients(built))
    assert found[0].keys() == found[1].keys() == set(_names(built))
    for name, gradient in found[0].items():
        assert torch.equal(found[1][name], gradient), f"{method}: gradient of {name}"


def test_random_state_is_kept_only_where_a_forward_draws_random_numbers():
    for name, changes, what, expected in (
        ("llama", {}, {}, False),
        ("llama", {"attention_dropout": 0.1}, {}, True),
        ("gpt2", {"summary_first_dropout": 0.0}, {"lora": {"target_modules": ["c_attn"]}}, False),
        ("gpt2", {"resid_pdrop": 0.1}, {"lora": {"target_modules": ["c_attn"]}}, True),
        ("llama", {}, {"lora": {"lora_dropout": 0.1}}, True),
        ("llama", {}, {"method": "full"}, False),
    ):
        found = step.draws_random_numbers(tiny.model(name, **changes), tiny.recipe(what=what))
        assert found == expected, (name, changes, what)


# --- on fake tensors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("method", METHODS)
def test_the_step_never_looks_at_a_value(method: str, recompute: str):
    """A fake tensor has none, so that a look is an error."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        built = step.build(
            tiny.recipe(what=METHODS[method], how={"recompute": recompute}),
            load.shell(tiny.config("llama"), torch.float32),
        )
        for _ in range(2):
            loss = built.forward_backward(collate(tiny.rows([9, 7, 5])), label_tokens=15, loss_scale=2.0)
            built.grad_norm()
            built.update(factor=0.5, learning_rate=1e-3)
    assert loss.shape == ()


ONE_OF_EACH_FAMILY = {family: name for name, (family, _) in (tiny.VARIANTS | tiny.UNLISTED).items()}


@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY.values(), ids=ONE_OF_EACH_FAMILY.keys())
def test_every_family_runs_on_fake_tensors(name: str):
    with FakeTensorMode(allow_non_fake_inputs=True):
        built = step.build(
            tiny.recipe(what={"method": "full"}, how={"recompute": "block"}),
            load.shell(tiny.config(name), torch.float32),
        )
        built.forward_backward(collate(tiny.rows([9, 7])), label_tokens=15)
    without = [n for n, p in built.model.named_parameters() if p.grad is None]
    assert not without, f"{name}: weights without a gradient: {without}"


# --- the simulated peak is the real one ------------------------------------------------------------------------------


@contextmanager
def _real_tensors(**_: Any) -> Iterator[None]:
    yield


def _replay(
    recipe: Recipe, config: PretrainedConfig, work: Work, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> Profile:
    """The simulation's own script on real tensors."""
    with monkeypatch.context() as patch:
        patch.setattr(simulate, "FakeTensorMode", _real_tensors)
        return simulate.simulate_whole(recipe, config, work, simulate.Means(dtype))


TREE = [(10, 2), (11, 12, 2)]
WORK = Work(
    micro_batches=(Micro(tuple(tiny.rows([30, 28, 27, 9]))), Micro(tuple(tiny.rows([40, 20])), onto_gradients=True)),
    eval_batches=(
        tuple(tiny.choice_rows([(20, [(10, 2), (11, 12, 2)]), (18, [(10, 2), (11, 12, 2)])])),
        tuple(tiny.rows([30])),
    ),
    eval_capacity=50,
)


@pytest.mark.parametrize(
    ("method", "recompute", "dtype"),
    [(method, recompute, torch.float32) for method in METHODS for recompute in ("none", "block")]
    + [("lora", "block", torch.bfloat16)],
)
def test_simulated_peaks_are_those_of_real_tensors(
    method: str, recompute: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    recipe = tiny.recipe(what=METHODS[method], how={"recompute": recompute, "loss_chunk_tokens": 16})
    simulated = simulate.simulate_whole(recipe, tiny.config("llama"), WORK, simulate.Means(dtype))
    real = _replay(recipe, tiny.config("llama"), WORK, monkeypatch, dtype)
    assert simulated == real
    assert simulated.weights == _weights_bytes("llama", dtype)


def _weights_bytes(name: str, dtype: torch.dtype) -> int:
    model = tiny.model(name, dtype=dtype)
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("name", ["gemma2", "gpt2", "mistral-sliding", "opt"])
def test_simulated_peaks_are_those_of_real_tensors_in_other_families(name: str, monkeypatch: pytest.MonkeyPatch):
    targets = ["c_attn"] if name == "gpt2" else ["q_proj"]
    recipe = tiny.recipe(what={"lora": {"target_modules": targets}}, how={"recompute": "block"})
    config = tiny.config(name)
    simulated = simulate.simulate_whole(recipe, config, WORK, simulate.Means(torch.float32))
    assert simulated == _replay(recipe, config, WORK, monkeypatch, torch.float32)


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_two_and_three_blocks_tell_the_rest(method: str, recompute: str):
    recipe = tiny.recipe(what=METHODS[method], how={"recompute": recompute})
    config = tiny.config("llama", num_hidden_layers=5)
    work = Work(WORK.micro_batches[:1], WORK.eval_batches[1:], WORK.eval_capacity)
    told = simulate.simulate(recipe, config, work, simulate.Means(torch.float32))
    whole = simulate.simulate_whole(recipe, config, work, simulate.Means(torch.float32))
    for part in ("weights", "gradient", "update", "evaluate", "kept"):
        tiny.assert_close(getattr(told, part), getattr(whole, part), within=0.01, name=f"{method}, {recompute}: {part}")


def test_recompute_lowers_the_simulated_peak_and_nothing_else():
    config = tiny.config("llama", num_hidden_layers=3)
    none, block = (
        simulate.simulate_whole(
            tiny.recipe(what=METHODS["lora"], how={"recompute": r}), config, WORK, simulate.Means(torch.float32)
        )
        for r in ("none", "block")
    )
    assert block.gradient < 0.7 * none.gradient
    assert (block.weights, block.evaluate, block.kept) == (none.weights, none.evaluate, none.kept)


def test_the_peak_has_the_optimisers_state_beside_the_gradients():
    """Two moments in float32 and a step count for each tensor, from the second step on."""
    row = tuple(tiny.rows([2]))
    profile = simulate.simulate_whole(
        tiny.recipe(what=METHODS["full"]),
        tiny.config("llama"),
        Work((Micro(row),), (row,), 10),
        simulate.Means(torch.float32),
    )
    parameters = list(tiny.model("llama").parameters())
    trained, tensors = sum(p.nbytes for p in parameters), len(parameters)
    assert profile.kept == profile.weights + 2 * trained + 4 * tensors
    assert profile.gradient >= profile.kept + trained, "gradients and moments are alive together"


def test_live_bytes_counts_a_storage_once_and_until_it_dies():
    with LiveBytes() as live:
        x = torch.zeros(100, dtype=torch.float32)
        view = x.view(10, 10).t()
        assert live.live_bytes == 400
        y = x + 1
        del x
        assert live.live_bytes == 800, "the view keeps the storage"
        del view
        assert live.live_bytes == 400
        y += 1
        assert (live.live_bytes, live.peak_bytes) == (400, 800)
