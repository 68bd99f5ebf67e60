"""The commands as functions. Each plans, then runs, and returns the facts that its `--json` prints.

report = snugtune.train(snugtune.Recipe(budget="2GiB"))
print(report.accuracy_before, "->", report.accuracy_after)
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

from snugtune import device as devices
from snugtune import step as steps
from snugtune.adapters import save as adapters
from snugtune.data import dataset, sources
from snugtune.data.dataset import Dataset
from snugtune.errors import InputError, OutOfMemory, RecipeError
from snugtune.events import EventLog, replace_text
from snugtune.models import load
from snugtune.planner.choose import Plan, Surroundings, choose, refusal, ways
from snugtune.recipe import Recipe, dump
from snugtune.trainer.evaluate import Evaluation, evaluate_rows
from snugtune.trainer.loop import train_rows
from snugtune.units import MIB, format_bytes

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int, dict[str, float]], None]
"""Called with (what is being done, done, total, facts) as a run goes on."""

_EVALUATION_TOKENS = 1024
"""Micro-batch of a stand-alone evaluation: large enough to be fast, and nothing is kept for backward."""


def _quiet(what: str, done: int, total: int, facts: dict[str, float]) -> None:
    pass


@dataclass(frozen=True)
class TrainReport:
    """What a run did; the keys are the contract's."""

    run: str
    steps: int
    skipped_steps: int
    rows_used: int
    rows_left_out: dict[str, int]
    label_tokens: int
    computed_tokens: int
    pad_tokens: int
    global_batch_rows: int
    trainable_parameters: int
    loss_first: float
    loss_last: float
    eval_rows: int
    eval_loss_before: float | None
    eval_loss_after: float | None
    accuracy_before: float | None
    accuracy_after: float | None
    predicted_peak_bytes: int
    measured_peak_bytes: int
    budget_bytes: int
    tokens_per_second: float
    train_seconds: float
    total_seconds: float
    loss_scale: float | None
    device: str
    allocator: str
    how: dict[str, Any]
    adapter: str | None
    model: str | None


@dataclass(frozen=True)
class EvaluateReport:
    """What held-out rows say about a model; the keys are the contract's."""

    loss: float
    perplexity: float
    tokens: int
    rows: int
    rows_left_out: dict[str, int]
    accuracy: float | None
    measured_peak_bytes: int


@dataclass(frozen=True)
class _Prepared:
    """Everything that can be known before a weight is loaded."""

    recipe: Recipe
    source: load.ModelSource
    config: PretrainedConfig
    tokenizer: Tokenizer | None
    """None where nothing but a plan is wanted."""
    data: Dataset
    device: devices.DeviceSpec
    dtype: torch.dtype
    budget_bytes: int


def train(recipe: Recipe, *, progress: Progress = _quiet) -> TrainReport:
    """Plan `recipe`, train it inside its budget, write the run folder.

    Raises:
        InputError: for a recipe, data or model that cannot be used; no weight was loaded.
        DoesNotFit: where no way of running it stays inside the budget.
        OutOfMemory: where an allocation was refused although the plan said that it fits.
    """
    started = time.monotonic()
    prepared = _prepare(recipe)
    for line in prepared.data.left_out.describe():
        log.warning(line)
    log.info("planning inside %s", format_bytes(prepared.budget_bytes))
    surroundings = Surroundings(prepared.device, devices.allocator(), devices.resident_bytes())
    plan = choose(
        prepared.recipe, prepared.config, prepared.data, surroundings,
        dtype=prepared.dtype, budget_bytes=prepared.budget_bytes,
    )  # fmt: skip
    run = _run_folder(plan)
    events = EventLog(run / "events.jsonl")
    events.write("plan", **{k: v for k, v in plan.as_json().items() if k != "recipe"})
    try:
        with _inside(prepared.device, prepared.budget_bytes):
            report = _train(prepared, plan, run, events, progress, started)
        replace_text(run / "report.json", json.dumps(asdict(report), indent=2) + "\n")
        events.write("end", measured_peak_bytes=report.measured_peak_bytes)
    except BaseException as error:
        events.write("stopped", reason=type(error).__name__, message=str(error)[:2000])
        raise
    finally:
        events.close()
    return report


def plan(recipe: Recipe, *, token_lengths: str | None = None) -> tuple[Plan, ...]:
    """Every way to run `recipe` with its predicted peak by phase, fastest first; no weights are loaded or needed.

    Args:
        recipe: its model may be a folder with nothing but a config.json when `token_lengths` stands in for data.
        token_lengths: see `data.dataset.stand_in`.

    Raises:
        InputError: as `train`.
        DoesNotFit: where no way stays inside the budget.
    """
    prepared = _prepare(recipe, token_lengths=token_lengths)
    for line in prepared.data.left_out.describe():
        log.warning(line)
    surroundings = Surroundings(prepared.device, devices.allocator(), devices.resident_bytes())
    plans = tuple(
        ways(
            prepared.recipe, prepared.config, prepared.data, surroundings,
            dtype=prepared.dtype, budget_bytes=prepared.budget_bytes,
        )
    )  # fmt: skip
    if not any(found.fits for found in plans):
        raise refusal(plans)
    return plans


def evaluate(
    model: str, data: str, *, budget: int | None = None, max_length: int = 1024, rows: int | None = None,
    progress: Progress = _quiet,
) -> EvaluateReport:  # fmt: skip
    """Exact loss, perplexity and accuracy of a model, an adapter or a run on every row of `data`.

    Raises:
        InputError: as `train`.
    """
    sources.check(data)
    source = load.resolve(model)
    recipe = Recipe(model=model, data=data)
    spec = devices.detect(recipe.device)
    tokenizer = load.load_tokenizer(source)
    held_out = dataset.load_evaluation(data, tokenizer, max_length=max_length, most_rows=rows)
    for line in held_out.left_out.describe():
        log.warning(line)
    with _inside(spec, budget or devices.free_bytes(spec)):
        loaded = load.load_model(source, dtype=load.DTYPES[_precision(recipe, spec)], device=spec.kind)
        if source.adapter:
            adapters.load(loaded, source.adapter)
        found = _score(steps.Scorer(loaded), held_out, _EVALUATION_TOKENS, "evaluating", progress, spec)
    assert found is not None
    return EvaluateReport(
        loss=found.loss, perplexity=found.perplexity, tokens=found.tokens, rows=found.rows,
        rows_left_out=held_out.left_out.counts, accuracy=found.accuracy, measured_peak_bytes=devices.peak_bytes(spec),
    )  # fmt: skip


def _prepare(recipe: Recipe, *, token_lengths: str | None = None) -> _Prepared:
    if token_lengths is None:
        sources.check(recipe.data)
    if recipe.eval_data is not None:
        sources.check(recipe.eval_data)
    spec = devices.detect(recipe.device)
    precision = _precision(recipe, spec)
    source = load.resolve(recipe.model)
    if source.adapter is not None:
        raise InputError(f"{recipe.model} is an adapter already; train on its base, {source.folder}")
    config = load.read_config(source)
    if token_lengths is None:
        load.weight_files(source)
        tokenizer = load.load_tokenizer(source)
        data = dataset.load_dataset(recipe, tokenizer)
    else:
        tokenizer, data = None, dataset.stand_in(token_lengths)
    limit = getattr(config, "max_position_embeddings", None)
    if limit and max(row.tokens for row in data.train) > limit:
        raise RecipeError(
            f"what.max_length {recipe.what.max_length} is over the model's {limit} positions, and rows reach it"
        )
    budget = recipe.budget if recipe.budget != "auto" else int(devices.free_bytes(spec) * 0.9)
    recipe = recipe.model_copy(update={
        "budget": budget, "device": spec.kind,
        "what": recipe.what.model_copy(update={"precision": precision, "base": precision}),
    })  # fmt: skip
    return _Prepared(recipe, source, config, tokenizer, data, spec, load.DTYPES[precision], budget)


def _precision(recipe: Recipe, spec: devices.DeviceSpec) -> str:
    """The compute precision; what we cannot run rightly is refused here, before anything is loaded."""
    what = recipe.what
    precision = what.precision if what.precision != "auto" else what.base
    if precision == "auto":
        precision = "bf16" if spec.has_bf16 and what.method == "lora" else "fp32"
    if what.base not in ("auto", precision):
        raise RecipeError(
            f"what.base={what.base} with what.precision={precision}: a base stored in another precision than it computes in "
            f"is not there yet; set both to {precision}"
        )
    if what.method == "full" and precision != "fp32":
        raise RecipeError(
            f"what.method=full with what.precision={precision}: trained weights are kept in float32, and a {precision} forward "
            "over them is not there yet; set what.precision=fp32"
        )
    return precision


@contextmanager
def _inside(spec: devices.DeviceSpec, budget_bytes: int) -> Generator[None]:
    """The wall around a run; a refused allocation leaves as OutOfMemory."""
    devices.set_wall(spec, budget_bytes)
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not devices.is_out_of_memory(error):
            raise
        raise OutOfMemory(
            f"memory ran out inside the budget of {format_bytes(budget_bytes)} ({str(error).splitlines()[0][:200]}); "
            "set a smaller how.micro_batch_tokens, how.recompute=block, or a larger budget"
        ) from None
    finally:
        devices.take_down_wall(spec)


def _run_folder(plan: Plan) -> Path:
    """The run's folder with its recipe and plan. What an earlier run left there is moved to a folder beside it."""
    run = Path(plan.recipe.output).expanduser()
    try:
        if (run / "events.jsonl").exists():
            run.rename(_free_name(run))
        elif run.exists() and any(run.iterdir()):
            raise RecipeError(f"output {run} exists and is no run of snugtune; name another folder with --output")
        run.mkdir(parents=True, exist_ok=True)
        replace_text(run / "recipe.yaml", dump(plan.recipe))
        replace_text(run / "plan.json", json.dumps(plan.as_json(), indent=2) + "\n")
    except OSError as error:
        raise RecipeError(f"output {run} cannot be written: {error}") from None
    return run


def _free_name(run: Path) -> Path:
    number = 1
    while (name := run.with_name(f"{run.name}.{number}")).exists():
        number += 1
    log.info("the earlier run at %s is kept as %s", run, name)
    return name


def _train(
    prepared: _Prepared, plan: Plan, run: Path, events: EventLog, progress: Progress, started: float
) -> TrainReport:
    recipe, data, spec = plan.recipe, prepared.data, prepared.device
    progress("loading the model", 0, 1, {})
    model = load.load_model(prepared.source, dtype=prepared.dtype, device=spec.kind)
    torch.manual_seed(recipe.what.seed)
    step = steps.build(recipe, model)
    progress("loading the model", 1, 1, {})
    capacity = recipe.how.micro_batch_tokens
    assert capacity is not None
    before = _score(step, data, capacity, "evaluating before", progress, spec)
    if before:
        events.write("evaluate", step=0, loss=before.loss, accuracy=before.accuracy)
    trained = train_rows(
        step, data.train, recipe, events=events, device=spec.kind, fp16=recipe.what.precision == "fp16",
        watch=lambda done, total, facts: progress("training", done, total, facts),
    )  # fmt: skip
    after = _score(step, data, capacity, "evaluating after", progress, spec)
    if after:
        events.write("evaluate", step=trained.steps, loss=after.loss, accuracy=after.accuracy)
    progress("saving", 0, 1, {})
    folder = run / ("adapter" if recipe.what.method == "lora" else "model")
    report = TrainReport(
        run=str(run), steps=trained.steps, skipped_steps=trained.skipped_steps, rows_used=len(data.train),
        rows_left_out=data.left_out.counts, label_tokens=trained.label_tokens, computed_tokens=trained.computed_tokens,
        pad_tokens=trained.pad_tokens, global_batch_rows=recipe.what.global_batch_rows,
        trainable_parameters=sum(p.numel() for p in step.trainable),
        loss_first=trained.losses[0], loss_last=trained.losses[-1], eval_rows=len(data.held_out),
        eval_loss_before=before.loss if before else None, eval_loss_after=after.loss if after else None,
        accuracy_before=before.accuracy if before else None, accuracy_after=after.accuracy if after else None,
        predicted_peak_bytes=plan.peak_bytes, measured_peak_bytes=0, budget_bytes=plan.budget_bytes,
        tokens_per_second=trained.tokens_per_second, train_seconds=trained.seconds, total_seconds=0.0,
        loss_scale=trained.loss_scale, device=spec.name, allocator=devices.allocator().name,
        how=recipe.how.model_dump(), adapter=str(folder) if recipe.what.method == "lora" else None,
        model=str(folder) if recipe.what.method == "full" else None,
    )  # fmt: skip
    step.drop_optimizer_state()
    devices.release_free_memory()
    _save(prepared, recipe, step, folder, report)
    progress("saving", 1, 1, {})
    return replace(report, measured_peak_bytes=devices.peak_bytes(spec), total_seconds=time.monotonic() - started)


def _score(
    scorer: steps.Scorer, data: Dataset, capacity: int, what: str, progress: Progress, spec: devices.DeviceSpec
) -> Evaluation | None:
    if not data.held_out:
        return None
    done = 0

    def advance(rows: int) -> None:
        nonlocal done
        done += rows
        progress(what, done, len(data.held_out), {})

    advance(0)
    devices.release_free_memory()
    found = evaluate_rows(scorer, data.held_out, capacity=capacity, device=spec.kind, advance=advance)
    devices.release_free_memory()
    return found


def _save(prepared: _Prepared, recipe: Recipe, step: steps.Step, folder: Path, report: TrainReport) -> None:
    assert prepared.tokenizer is not None
    readme = _readme(prepared, recipe, report)
    if recipe.what.method == "lora":
        adapters.save(
            step.model, recipe.what.lora, folder, base=prepared.source.published_as, base_name=prepared.source.name,
            tokenizer=prepared.tokenizer, readme=readme,
        )  # fmt: skip
        return
    with adapters.whole_folder(folder) as aside:
        step.model.save_pretrained(aside, max_shard_size=steps.SHARD_BYTES)
        prepared.tokenizer.save_pretrained(aside)
        (aside / "README.md").write_text(readme, encoding="utf-8")


def _readme(prepared: _Prepared, recipe: Recipe, report: TrainReport) -> str:
    what = recipe.what
    kind = f"LoRA adapter (r {what.lora.r}, alpha {what.lora.lora_alpha:g})" if what.method == "lora" else "Model"
    lines = [
        f"# {kind} for {prepared.source.published_as}", "",
        f"Trained with snugtune on {report.rows_used} rows of `{recipe.data}` for {report.steps} steps of "
        f"{report.global_batch_rows} rows, learning rate {what.learning_rate:g}, base and compute in {what.precision}, trained "
        "tensors in float32.", "",
    ]  # fmt: skip
    if report.eval_loss_before is not None:
        lines.append(
            f"Held-out loss ({report.eval_rows} rows): {report.eval_loss_before:.4f} -> {report.eval_loss_after:.4f}"
        )
    if report.accuracy_before is not None:
        lines.append(f"Choice accuracy: {report.accuracy_before:.3f} -> {report.accuracy_after:.3f}")
    lines.append(f"Budget: {report.budget_bytes / MIB:.0f} MiB")
    return "\n\n".join(lines) + "\n"
