"""A whole run on a tiny model: what it reports, what it writes, and that `how` never decides the result."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import tiny
from snugtune import api
from snugtune import recipe as recipes
from snugtune import step as steps
from snugtune.adapters import save as adapters
from snugtune.data import dataset
from snugtune.data.encode import EncodedRow
from snugtune.data.pack import collate
from snugtune.errors import DoesNotFit, InputError, RecipeError, Stopped
from snugtune.events import EventLog
from snugtune.models import load
from snugtune.recipe import Scheduler
from snugtune.trainer import loop


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    answers = ["w3 w4", "w5", "w6 w7"]
    lines = [
        {
            "prompt": " ".join(f"w{(i * 7 + j) % 100}" for j in range(1 + i % 6)) + " ",
            "completion": answers[i % 3],
            "choices": answers,
        }
        for i in range(40)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture
def recipe(model_folder, rows_file, tmp_path):
    def make(*overrides: str, **keys):
        base = ["what.max_steps=3", "what.global_batch_rows=8", "what.learning_rate=1e-2", *overrides]
        keys = {
            "model": str(model_folder),
            "data": str(rows_file),
            "budget": "6GiB",
            "output": str(tmp_path / "run"),
            **keys,
        }
        return recipes.load(overrides=base, **keys)

    return make


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter" / "adapter_model.safetensors")


def test_run_folder_and_report_say_the_same(recipe, tmp_path):
    report = api.train(recipe())
    run = tmp_path / "run"
    for name in (
        "recipe.yaml",
        "plan.json",
        "events.jsonl",
        "report.json",
        "adapter/adapter_config.json",
        "adapter/README.md",
    ):
        assert (run / name).exists(), f"{name} is missing from the run folder"
    assert json.loads((run / "report.json").read_text())["loss_last"] == report.loss_last
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [e["event"] for e in events] == ["plan", "evaluate", "step", "step", "step", "evaluate", "end"]
    assert report.rows_used + report.eval_rows == 40
    assert report.pad_tokens == 0 and report.computed_tokens > report.label_tokens > 0
    assert recipes.load(run / "recipe.yaml").how.micro_batch_tokens is not None, "the written recipe must be resolved"


def test_equal_runs_write_equal_bytes(recipe, tmp_path):
    files = []
    for name in ("a", "b"):
        api.train(recipe(output=str(tmp_path / name)))
        files.append((tmp_path / name / "adapter" / "adapter_model.safetensors").read_bytes())
    assert files[0] == files[1]


@pytest.mark.parametrize(
    "how", ["micro_batch_tokens=8", "micro_batch_tokens=30", "recompute=block", "loss_chunk_tokens=1"]
)
def test_how_never_decides_the_result(recipe, tmp_path, how):
    api.train(recipe(output=str(tmp_path / "plain")))
    api.train(recipe(f"how.{how}", output=str(tmp_path / "other")))
    plain, other = adapter(tmp_path / "plain"), adapter(tmp_path / "other")
    for name, tensor in plain.items():
        torch.testing.assert_close(
            other[name], tensor, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"how.{how} moved {n}: {m}"
        )


def test_evaluating_the_run_gives_what_the_run_reported(recipe, tmp_path, rows_file):
    report = api.train(recipe(eval_data=str(rows_file), output=str(tmp_path / "run")))
    again = api.evaluate(str(tmp_path / "run"), str(rows_file))
    assert again.loss == pytest.approx(report.eval_loss_after, rel=1e-5)
    assert again.accuracy == report.accuracy_after
    assert again.perplexity == pytest.approx(math.exp(again.loss))


def test_accuracy_is_that_of_answers_scored_one_by_one(model_folder, rows_file):
    source = load.resolve(str(model_folder))
    held_out = dataset.load_evaluation(str(rows_file), load.load_tokenizer(source), max_length=64).held_out
    scorer = steps.Scorer(load.load_model(source, dtype=torch.float32))
    found = api.evaluate(str(model_folder), str(rows_file))
    right, loss, labels = 0, 0.0, 0
    for row in held_out:
        first = int(row.is_label.argmax())
        losses = []
        for answer in row.choices:
            ids = torch.tensor(answer).numpy().astype("int32")
            written = EncodedRow(row.where, ids, (torch.arange(len(ids)) >= first).numpy())
            losses.append(float(scorer.loss(collate([written]))))
        right += losses.index(min(losses)) == row.answer
        loss, labels = loss + losses[row.answer], labels + row.label_tokens
    assert found.accuracy == right / len(held_out)
    assert found.loss == pytest.approx(loss / labels, rel=1e-5)


def test_full_training_writes_a_model_that_loads(recipe, tmp_path, rows_file):
    report = api.train(recipe("what.method=full", "what.learning_rate=1e-3", eval_data=str(rows_file)))
    assert report.adapter is None and report.model is not None
    assert api.evaluate(report.model, str(rows_file)).loss == pytest.approx(report.eval_loss_after, rel=1e-5)


def test_an_earlier_run_is_kept(recipe, tmp_path):
    api.train(recipe())
    before = (tmp_path / "run" / "adapter" / "adapter_model.safetensors").read_bytes()
    api.train(recipe("what.seed=5"))
    assert (tmp_path / "run.1" / "adapter" / "adapter_model.safetensors").read_bytes() == before


def test_a_folder_that_is_no_run_is_not_touched(recipe, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("years of work")
    with pytest.raises(RecipeError, match="no run of snugtune"):
        api.train(recipe())
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["thesis.txt"]


def test_a_budget_that_cannot_hold_it_names_one_that_can(recipe, tmp_path):
    with pytest.raises(DoesNotFit, match="GiB") as caught:
        api.train(recipe(budget="20MiB"))
    assert not (tmp_path / "run").exists(), "nothing may be started"
    api.train(recipe(budget=caught.value.smallest_bytes + (64 << 20)))  # the process itself has grown a little since


def test_wishes_that_cannot_be_run_rightly_are_refused_before_loading(recipe, monkeypatch):
    monkeypatch.setattr(load, "load_model", lambda *a, **k: pytest.fail("weights were loaded"))
    wishes = (
        "what.base=fp32 what.precision=bf16",
        "what.method=full what.base=bf16",
        "what.lora.target_modules=[nowhere]",
        "how.optimizer=adamw_host",
    )
    for wish in wishes:
        with pytest.raises(InputError):
            api.train(recipe(*wish.split()))


def test_a_run_over_an_int4_base_is_scored_over_that_base_again(recipe, tmp_path, rows_file):
    report = api.train(recipe("what.base=int4", "what.max_steps=6"))
    assert report.loss_last < report.loss_first
    again = api.evaluate(str(tmp_path / "run"), str(rows_file), budget=4 << 30)
    moved = api.evaluate(str((tmp_path / "run" / "adapter").rename(tmp_path / "moved")), str(rows_file), budget=4 << 30)
    assert again.loss == moved.loss, "an adapter that was moved still knows its base's storage"
    source = load.resolve(str(tmp_path / "moved"))
    assert source.packing == "int4"
    own = json.loads((tmp_path / "moved" / "snugtune.json").read_text())
    (tmp_path / "moved" / "snugtune.json").write_text(json.dumps(own | {"packing": None}))
    assert api.evaluate(str(tmp_path / "moved"), str(rows_file), budget=4 << 30).loss != again.loss


@pytest.mark.parametrize("base", ["bf16", "fp16", "nf4"])
def test_a_base_is_stored_in_fewer_bits_than_it_computes_in(recipe, tmp_path, rows_file, base):
    if base == "nf4":
        pytest.importorskip("bitsandbytes")
    report = api.train(recipe(f"what.base={base}", "what.precision=fp32", "what.max_steps=6"))
    assert report.loss_last < report.loss_first
    assert load.resolve(str(tmp_path / "run")).packing == base
    again = api.evaluate(str(tmp_path / "run"), str(rows_file), budget=4 << 30)
    assert again.loss < 2 * report.loss_first


def test_updates_in_the_backward_train_as_updates_after_it(recipe):
    runs = [
        api.train(recipe("what.method=full", "what.max_steps=4", "what.learning_rate=1e-3", f"how.update={update}"))
        for update in ("after_backward", "in_backward")
    ]
    after, inside = runs
    assert inside.how["update"] == "in_backward"
    assert inside.loss_last == pytest.approx(after.loss_last, rel=1e-5)


@pytest.mark.parametrize(
    "choice", ["how.optimizer=adamw_8bit", "what.precision=bf16", "what.precision=fp16", "how.recompute=selective"]
)
def test_full_fine_tuning_learns_in_every_way(recipe, tmp_path, choice):
    report = api.train(recipe("what.method=full", "what.max_steps=8", "what.learning_rate=1e-3", choice))
    assert report.loss_last < report.loss_first
    saved = load.load_model(load.resolve(str(tmp_path / "run")), dtype=torch.float32)
    assert all(p.dtype == torch.float32 for p in saved.parameters())
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == "float32", "as the weights are stored"


def test_the_report_holds_predicted_beside_measured_speed(recipe, tmp_path):
    report = api.train(recipe("what.max_steps=3"))
    assert report.predicted_tokens_per_second > 0 and report.tokens_per_second > 0
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["tokens_per_second"] == report.predicted_tokens_per_second


def test_fp16_runs_with_a_loss_scale_and_float32_adapters(recipe, tmp_path):
    report = api.train(recipe("what.precision=fp16"))
    assert report.loss_scale is not None and report.loss_scale >= 1
    assert all(t.dtype == torch.float32 for t in adapter(tmp_path / "run").values())


def test_a_gradient_that_is_not_finite_leaves_everything_as_it_was(
    recipe, model_folder, rows_file, tmp_path, monkeypatch
):
    source = load.resolve(str(model_folder))
    chosen = recipe("how.micro_batch_tokens=64", "how.recompute=none", "what.max_steps=8")
    data = dataset.load_dataset(chosen, load.load_tokenizer(source))
    step = steps.build(chosen, load.load_model(source, dtype=torch.float32))
    before = [p.detach().clone() for p in step.trainable]
    monkeypatch.setattr(step, "grad_norm", lambda: torch.tensor(float("nan")))
    events = EventLog(tmp_path / "events.jsonl")
    with pytest.raises(Stopped, match="not finite"):
        loop.train_rows(step, data.train, chosen, events=events)
    assert all(torch.equal(a, b) for a, b in zip(before, step.trainable, strict=True))
    assert not step.optimizer.state, "moments moved"
    skipped = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [e["event"] for e in skipped] == ["step_skipped"] * loop.MOST_SKIPS_IN_A_ROW


def test_no_step_has_a_rate_of_zero_and_the_schedule_follows_updates(recipe, tmp_path):
    api.train(recipe("what.max_steps=6", "what.warmup_ratio=0.5"))
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    rates = [e["learning_rate"] for e in map(json.loads, lines) if e["event"] == "step"]
    assert rates[0] > 0 and rates[-1] > 0
    assert rates[2] == max(rates) == pytest.approx(1e-2), "the end of the warm-up reaches the full rate"
    assert rates[2:] == sorted(rates[2:], reverse=True)


def test_a_saved_adapter_is_whole_or_absent(tmp_path):
    target = tmp_path / "adapter"
    target.mkdir()
    (target / "old").write_text("old")
    with pytest.raises(OSError, match="disk full"), adapters.whole_folder(target) as aside:
        (aside / "half").write_text("half")
        raise OSError("disk full")
    assert [p.name for p in tmp_path.iterdir()] == ["adapter"] and (target / "old").read_text() == "old"


@settings(max_examples=60, deadline=None)
@given(kind=st.sampled_from(get_args(Scheduler)), steps=st.integers(1, 60), warmup=st.floats(0, 1))
def test_the_schedule_is_transformers_own_but_for_its_ends(kind: str, steps: int, warmup: float):
    from transformers import get_scheduler

    what = tiny.recipe(what={"lr_scheduler_type": kind, "warmup_ratio": warmup, "learning_rate": 0.5}).what
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = get_scheduler(
        kind, optimizer, num_warmup_steps=math.ceil(warmup * steps), num_training_steps=steps + 1
    ).lr_lambdas[0]  # fmt: skip
    ours = loop._schedule(what, steps)
    for update in range(steps):
        assert ours(update) == pytest.approx(0.5 * theirs(update + 1), abs=1e-12), (kind, update)
