"""The plan is made for the largest batch that the run will really see, and prefers the faster way that fits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from snugtune.data.dataset import Dataset
from snugtune.data.pack import global_batches, pack
from snugtune.device import Allocator, DeviceSpec
from snugtune.errors import DoesNotFit
from snugtune.planner import choose as planning
from snugtune.planner.choose import Surroundings, choose
from snugtune.planner.simulate import Work, simulate, simulate_whole
from snugtune.units import MIB

AROUND = Surroundings(DeviceSpec("cpu", "test", 1 << 40, has_bf16=False), Allocator("system", 1.0, 0, 0), 0)


def plan(data: Dataset, budget_bytes: int, *, what=None, how=None):
    recipe = tiny.recipe(what={"global_batch_rows": 8, **(what or {})}, how=how)
    return choose(
        recipe, tiny.config("llama", num_hidden_layers=8), data, AROUND, dtype=torch.float32, budget_bytes=budget_bytes
    )


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(2, 60), min_size=1, max_size=40), capacity=st.integers(4, 200))
def test_worst_micro_batch_is_the_largest_of_the_whole_run(lengths, capacity):
    data = Dataset(tiny.rows(lengths), [])
    recipe = tiny.recipe(what={"global_batch_rows": 4}, how={"micro_batch_tokens": capacity})
    _, worst = planning._largest_batches(recipe, data)
    seen = [
        sum(lengths[batch[i]] for i in part)
        for batch in global_batches(recipe.what, len(lengths))
        for part in pack([lengths[i] for i in batch], capacity=capacity)
    ]
    assert sum(row.tokens for row in worst) == max(seen)


def test_one_long_row_among_short_ones_makes_the_plan():
    short = Dataset(tiny.rows([4] * 40), [])
    long = Dataset(tiny.rows([4] * 39 + [60]), [])
    ways = {"micro_batch_tokens": 8, "recompute": "none"}
    assert plan(long, 1 << 30, how=ways).worst_tokens == 60
    assert plan(long, 1 << 30, how=ways).phases["step"] > plan(short, 1 << 30, how=ways).phases["step"]


def test_keeping_activations_is_preferred_and_recompute_taken_when_it_must_be(monkeypatch):
    monkeypatch.setattr(planning, "CODE_BYTES", 0)
    monkeypatch.setattr(planning, "KERNEL_BYTES", 0)
    monkeypatch.setattr(planning, "MICRO_BATCH_TOKENS", (512, 256))
    data = Dataset(tiny.rows([60] * 8), [])
    rich = plan(data, 1 << 30)
    assert (rich.recipe.how.recompute, rich.recipe.how.micro_batch_tokens) == ("none", 512)
    tight = plan(data, rich.peak_bytes - 1)
    assert tight.peak_bytes < rich.peak_bytes
    with pytest.raises(DoesNotFit) as caught:
        plan(data, 1 << 10)
    assert plan(data, caught.value.smallest_bytes).recipe.how.recompute == "block"


def test_what_the_recipe_names_is_kept():
    data = Dataset(tiny.rows([10] * 8), [])
    chosen = plan(
        data, 1 << 30, how={"micro_batch_tokens": 37, "recompute": "block", "loss_chunk_tokens": 3}
    ).recipe.how
    assert (chosen.micro_batch_tokens, chosen.recompute, chosen.loss_chunk_tokens) == (37, "block", 3)


def test_evaluation_is_part_of_the_plan():
    train = tiny.rows([4] * 8)
    without = plan(Dataset(train, []), 1 << 30)
    with_long = plan(Dataset(train, tiny.rows([60], labels=[50])), 1 << 30)
    assert with_long.phases["evaluate"] > without.phases["evaluate"]
    assert with_long.phases["evaluate"] > with_long.phases["load"]


def test_the_process_and_the_allocator_are_part_of_the_peak():
    bare = AROUND.peak(100 * MIB, 40 * MIB)
    around = Surroundings(AROUND.device, Allocator("mimalloc", 1.5, 0, 0), 300 * MIB)
    assert around.peak(100 * MIB, 40 * MIB) - bare == 300 * MIB + 30 * MIB


@pytest.mark.parametrize("lengths", [[60] * 8, [4, 3]])
@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_deep_model_is_extrapolated_to_the_byte(method, recompute, lengths):
    # Activations outgrow gradients in the long batch and not in the short one: the moment of the peak moves with depth.
    work = Work((tuple(tiny.rows(lengths)),), (), 4096)
    recipe = tiny.recipe(what={"method": method}, how={"recompute": recompute})
    config = tiny.config("llama", num_hidden_layers=12)
    whole = simulate_whole(recipe, config, work, dtype=torch.float32)
    told = simulate(recipe, config, work, dtype=torch.float32)
    assert told.gradient == pytest.approx(whole.gradient, rel=1e-3)
    assert (told.weights, told.update, told.kept) == (whole.weights, whole.update, whole.kept)
