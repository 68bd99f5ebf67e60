"""The plan is made for the largest batch that the run will really see, and prefers the faster way that fits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tiny
from snugtune import cards
from snugtune.data.dataset import Dataset
from snugtune.data.pack import global_batches, pack
from snugtune.device import CUDA_CONTEXT_BYTES, Allocator, DeviceSpec
from snugtune.errors import DoesNotFit, RecipeError
from snugtune.planner import explain, speed
from snugtune.planner import search as planning
from snugtune.planner.search import Batches, Run, Surroundings, search
from snugtune.planner.simulate import Means, Micro, Work, simulate, simulate_whole
from snugtune.planner.speed import Rates
from snugtune.units import MIB

RATES = Rates({"fp32": 1e11, "bf16": 1e11}, 1e10, 1e-6)
CPU = DeviceSpec("cpu", "test", 1 << 40, has_bf16=False)
AROUND = Surroundings(CPU, Allocator("system", 1.0, 0, 0, 0, 0), 0, RATES)
FP32 = Means(torch.float32)


@pytest.fixture(autouse=True)
def _remembered(monkeypatch):
    """Simulations of the same thing are made once for all tests here: they are what takes the time."""
    for name in ("simulate", "contents"):
        monkeypatch.setattr(planning, name, partial(_remember, name, getattr(planning, name)))


_seen = {}


def _remember(name, function, recipe, config, work, means):
    rows = (*(micro.rows for micro in work.micro_batches), *work.eval_batches)
    lengths = tuple(tuple((row.tokens, row.label_tokens, bool(row.choices)) for row in batch) for batch in rows)
    # A budget changes nothing that is simulated, and the sizes of micro-batches are in the rows.
    how = recipe.how.model_dump_json()
    onto = tuple(micro.onto_gradients for micro in work.micro_batches)
    key = (name, onto, recipe.what.model_dump_json(), how, config.to_json_string(), lengths, means.kind, means.dtype)
    if key not in _seen:
        _seen[key] = function(recipe, config, work, means)
    return _seen[key]


def plan(data: Dataset, budget_bytes: int, *, what=None, how=None):
    return ladder(data, budget_bytes, what=what, how=how).chosen


def _run(*, what=None, how=None, depth=8, config=None, data=None, budget_bytes=1 << 40, dtype=None):
    settings = {"global_batch_rows": 8, "precision": "fp32", "base": "fp32", **(what or {})}
    recipe = tiny.recipe(what=settings, how=how)
    shape = tiny.config("llama", num_hidden_layers=depth, **({"dtype": dtype} if dtype else {}), **(config or {}))
    return Run(recipe, recipe, shape, data, torch.float32, budget_bytes)


def ladder(data, budget_bytes, *, what=None, how=None, around=AROUND, depth=8, config=None, goal="ladder"):
    run = _run(what=what, how=how, depth=depth, config=config, data=data, budget_bytes=budget_bytes)
    return search(run, around, goal=goal)


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(2, 60), min_size=1, max_size=40), capacity=st.integers(4, 200))
def test_worst_micro_batch_is_the_largest_of_the_whole_run(lengths, capacity):
    data = Dataset(tiny.rows(lengths), [])
    recipe = tiny.recipe(what={"global_batch_rows": 4}, how={"micro_batch_tokens": capacity})
    batches = Batches.of(Run(recipe, recipe, tiny.config("llama"), data, torch.float32, 1), capacity)
    worst = batches.worst
    seen = [
        sum(lengths[batch[i]] for i in part)
        for batch in global_batches(recipe.what, len(lengths))
        for part in pack([lengths[i] for i in batch], capacity=capacity)
    ]
    assert sum(row.tokens for row in worst) == max(seen)
    assert batches.tokens_per_micro_batch == pytest.approx(sum(seen) / len(seen))
    assert batches.tokens_per_step * len(list(global_batches(recipe.what, len(lengths)))) == pytest.approx(sum(seen))
    assert sum(row.tokens for row in batches.work.typical) in seen


def test_one_long_row_among_short_ones_makes_the_plan():
    short = Dataset(tiny.rows([4] * 40), [])
    long = Dataset(tiny.rows([4] * 39 + [60]), [])
    ways = {"micro_batch_tokens": 8, "recompute": "none"}
    assert plan(long, 1 << 30, how=ways).batches.worst_tokens == 60
    assert plan(long, 1 << 30, how=ways).phases["step"] > plan(short, 1 << 30, how=ways).phases["step"]


def test_keeping_activations_is_preferred_and_recompute_taken_when_it_must_be(monkeypatch):
    for name in ("CODE_BYTES", "KERNEL_BYTES", "TRANSIENT_BYTES"):
        monkeypatch.setattr(planning, name, 0)
    monkeypatch.setattr(planning, "MICRO_BATCH_TOKENS", (512, 256))
    data = Dataset(tiny.rows([60] * 8), [])
    rich = plan(data, 1 << 30)
    assert (rich.recipe.how.recompute, rich.recipe.how.micro_batch_tokens) == ("none", 512)
    tight = plan(data, rich.peak_bytes - 1)
    assert tight.peak_bytes < rich.peak_bytes
    with pytest.raises(DoesNotFit) as caught:
        plan(data, 1 << 10)
    assert plan(data, caught.value.smallest_bytes).recipe.how.recompute in ("block", "offload")


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
    around = Surroundings(CPU, Allocator("mimalloc", 1.5, 0, 0, 0, 0), 300 * MIB, RATES)
    assert around.peak(100 * MIB, 40 * MIB) - bare == 300 * MIB + 30 * MIB


@pytest.mark.parametrize("lengths", [[60] * 8, [4, 3]])
@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_deep_model_is_extrapolated_to_the_byte(method, recompute, lengths):
    # Activations outgrow gradients in the long batch and not in the short one: the moment of the peak moves with depth.
    work = Work((Micro(tuple(tiny.rows(lengths))),), (), 4096)
    recipe = tiny.recipe(what={"method": method}, how={"recompute": recompute})
    config = tiny.config("llama", num_hidden_layers=12)
    whole = simulate_whole(recipe, config, work, FP32)
    told = simulate(recipe, config, work, FP32)
    assert told.gradient == pytest.approx(whole.gradient, rel=1e-3)
    assert (told.weights, told.update, told.kept) == (whole.weights, whole.update, whole.kept)


# --- the ladder --------------------------------------------------------------------------------------------------------

ROWS = Dataset(tiny.rows([60] * 8), [])
CARD = replace(AROUND, device=cards.find("rtx-4090"), rates=speed.rates(cards.find("rtx-4090")))


@pytest.fixture
def bare(monkeypatch):
    """Nothing beside the tensors, and micro-batches that differ in size for these few rows."""
    for name in ("CODE_BYTES", "KERNEL_BYTES", "CUDA_CONTEXT_BYTES", "TRANSIENT_BYTES"):
        monkeypatch.setattr(planning, name, 0)
    monkeypatch.setattr(planning, "MICRO_BATCH_TOKENS", (512, 256, 128, 64))


@pytest.mark.parametrize("around", [AROUND, CARD], ids=["cpu", "card"])
def test_the_ladder_is_fastest_first_and_all_of_it_fits(bare, around):
    found = ladder(ROWS, 1 << 40, around=around)
    budget = found.chosen.peak_bytes - 1  # the fastest way of all does not fit
    tight = ladder(ROWS, budget, around=around)
    speeds = [plan.tokens_per_second for plan in tight.plans]
    assert len(speeds) >= 2 and speeds == sorted(speeds, reverse=True)
    assert all(plan.fits and plan.needed_bytes <= budget for plan in tight.plans)
    assert tight.too_large and all(plan.needed_bytes > budget for plan in tight.too_large)
    assert tight.chosen is tight.plans[0]


@pytest.mark.parametrize("around", [AROUND, CARD], ids=["cpu", "card"])
def test_more_memory_is_never_slower(bare, around):
    smallest = _smallest(around)
    budgets = [int(smallest * factor) for factor in (1, 1.2, 1.6, 4)]
    speeds = [ladder(ROWS, budget, around=around).chosen.tokens_per_second for budget in budgets]
    assert speeds == sorted(speeds)


def _smallest(around, **choices) -> int:
    with pytest.raises(DoesNotFit) as caught:
        _ = ladder(ROWS, 1 << 10, around=around, **choices).chosen
    return caught.value.smallest_bytes


def test_the_smallest_budget_that_is_named_does_fit_and_less_does_not(bare):
    smallest = _smallest(AROUND)
    assert ladder(ROWS, smallest).chosen.fits
    with pytest.raises(DoesNotFit):
        _ = ladder(ROWS, smallest - (1 << 20)).chosen


WIDE = {"depth": 12, "config": {"hidden_size": 256, "intermediate_size": 512}}


def test_a_base_in_4_bits_is_taken_only_where_nothing_else_fits(bare):
    whole, packed = (_smallest(AROUND, what={"base": base}, **WIDE) for base in ("fp32", "int4"))
    assert packed < whole
    automatic = {"what": {"base": "auto"}, **WIDE}
    assert ladder(ROWS, whole, **automatic).chosen.recipe.what.base == "fp32"
    lean = ladder(ROWS, packed, **automatic)
    assert {plan.recipe.what.base for plan in lean.plans} == {"int4"}
    with pytest.raises(DoesNotFit, match="int4"):
        _ = ladder(ROWS, packed, **WIDE).chosen


def test_what_changes_the_result_least_is_tried_first():
    def tried(around, update="after_backward", **what):
        return [
            (r.what.base, r.how.optimizer)
            for r in planning._storages(_run(what={"precision": "bf16", "base": "auto", **what}), around.device)
            if r.how.update == update
        ]

    assert tried(CARD) == [("bf16", "adamw"), ("int4", "adamw")]
    assert tried(CARD, base="bf16") == [("bf16", "adamw")], "what is named is kept"
    assert tried(CARD, method="full") == [("fp32", "adamw"), ("fp32", "adamw_host"), ("fp32", "adamw_8bit")]
    assert tried(AROUND, method="full") == [("fp32", "adamw"), ("fp32", "adamw_8bit")], "a CPU has no other memory"
    assert tried(AROUND, "in_backward", method="full") == [("fp32", "adamw"), ("fp32", "adamw_8bit")]
    assert tried(CARD, "in_backward") == [], "adapters' gradients are small"


def test_16_bits_come_before_4_where_the_files_have_no_more():
    def bases(stored, precision):
        found = _run(what={"precision": precision, "base": "auto"}, dtype=stored)
        return [r.what.base for r in planning._storages(found, CPU)]

    assert bases(torch.bfloat16, "fp32") == ["fp32", "bf16", "int4"]
    assert bases(torch.float16, "fp32") == ["fp32", "fp16", "int4"]
    assert bases(torch.float32, "fp32") == ["fp32", "int4"]
    assert bases(torch.float16, "bf16") == ["bf16", "int4"], "fp16 would lose nothing, and save nothing"


def test_the_winner_alone_is_the_ladders_first(bare):
    budget = ladder(ROWS, 1 << 40).chosen.peak_bytes - 1
    assert ladder(ROWS, budget, goal="winner").chosen.recipe == ladder(ROWS, budget).chosen.recipe


def test_a_card_counts_what_its_allocator_holds_and_the_context():
    found = ladder(ROWS, 1 << 40, around=CARD).chosen
    assert found.phases["load"] > CUDA_CONTEXT_BYTES
    assert found.phases["step"] - found.phases["load"] >= 0


def test_the_budget_is_filled_by_what_is_named():
    found = ladder(ROWS, 1 << 30)
    segments = explain.fill(found)
    assert sum(segment.size_bytes for segment in segments) == 1 << 30
    names = [segment.name for segment in segments]
    assert names == [name for name in explain.KINDS if name in names]
    assert {"weights", "adapter", "optimiser", "activations", "free"} <= set(names)


def test_what_does_not_fit_is_told_with_its_phase_and_by_how_much(bare):
    budget = _smallest(AROUND, how={"recompute": "none"}, **WIDE) - (2 << 20)
    found = ladder(ROWS, budget, **WIDE)
    lines = explain.reasons(found)
    assert any("recompute none" in line and "step phase" in line and "over" in line for line in lines)
    comments = explain.comments(found)
    assert "keeping everything needs" in comments["how.recompute"]
    assert "how.micro_batch_tokens" in comments and "what.base" not in comments


def test_like_storages_stand_together_in_the_explanation():
    rows = explain.largest(ladder(ROWS, 1 << 30).contents["step"], most=50)
    what = [name for kind, name, _, _ in rows if kind == "weights"]
    assert any("layers.*." in name for name in what)
    assert all(size >= later for (*_, size), (*_, later) in pairwise(rows))


def test_a_faster_device_is_told_with_what_was_predicted_before():
    """Else a later run would take the corrected speed for the model's own, and correct it twice."""
    found = ladder(ROWS, 1 << 30).chosen
    faster = found.faster_by(2).faster_by(3)
    assert faster.tokens_per_second == pytest.approx(6 * found.tokens_per_second)
    assert faster.as_json()["uncalibrated_tokens_per_second"] == pytest.approx(found.tokens_per_second)


def test_updates_in_the_backward_are_taken_where_the_gradients_do_not_fit_together(bare):
    full = {"what": {"method": "full"}, **WIDE}
    usual, exact = (
        _smallest(AROUND, how={"update": update, "optimizer": "adamw"}, **full)
        for update in ("after_backward", "in_backward")
    )
    assert exact < usual
    assert ladder(ROWS, usual, **full).chosen.recipe.how.update == "after_backward"
    chosen = ladder(ROWS, usual - (1 << 20), **full).chosen.recipe.how
    assert (chosen.update, chosen.optimizer) == ("in_backward", "adamw"), "exact ways come before 8-bit moments"
    assert chosen.micro_batch_tokens == 8 * 60, "the global batch is one micro-batch"


def test_updates_in_the_backward_need_the_global_batch_in_one_micro_batch(bare):
    how = {"micro_batch_tokens": 64}
    with pytest.raises(RecipeError, match=r"how\.micro_batch_tokens to 480"):
        ladder(ROWS, 1 << 40, what={"method": "full"}, how=how | {"update": "in_backward"})
    assert ladder(ROWS, 1 << 40, what={"method": "full"}, how=how).chosen.recipe.how.update == "after_backward"


@pytest.mark.parametrize("lengths", [[9] * 8, [30, 9, 9, 9, 9, 9, 9, 9], [9] * 7 + [30]])
def test_a_micro_batch_that_is_not_the_first_of_its_step_is_planned_on_top_of_gradients(lengths):
    batches = Batches.of(_run(data=Dataset(tiny.rows(lengths), [])), 20)
    micros = batches.work.micro_batches
    assert max(micro.tokens for micro in micros) == micros[0].tokens == max(lengths) or max(lengths) < 20
    assert any(micro.onto_gradients for micro in micros)
    alone = Batches.of(_run(data=Dataset(tiny.rows(lengths), [])), 1000)
    assert [micro.onto_gradients for micro in alone.work.micro_batches] == [False]
