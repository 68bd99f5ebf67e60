"""Merging as a function: an adapter folded into its base's weights, held against what it was.

report = snugtune.merge("runs/demo", "merged")
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from snugtune import device as devices
from snugtune.adapters import merge as merging
from snugtune.adapters import save as adapters
from snugtune.api import Progress, compute_precision, inside, quiet
from snugtune.data import dataset, sources
from snugtune.errors import InputError, ModelError, RecipeError, Stopped, nearest
from snugtune.models import drift, load
from snugtune.recipe import Recipe
from snugtune.units import format_bytes

log = logging.getLogger(__name__)

MOST_KL = 0.01
"""Nats a position by which a merged model may differ from its base + adapter."""
_DRIFT_ROWS, _DRIFT_TOKENS = 32, 512


@dataclass(frozen=True)
class MergeReport:
    """What a merge made and how far its answers are from those of base + adapter; the keys are the contract's."""

    output: str
    max_logit_drift: float
    """Largest difference of a logit, over `positions` positions that predict a label."""
    kl: float
    """Mean over them of KL(base + adapter || merged), nats."""
    greedy_agreement: float
    """Share of them where both hold the same token for the most probable one."""
    positions: int
    dtype: str
    """Of the merged weights."""
    base: str
    """The weights that it was merged into: `original`, or `dequantised` where it was trained over 4 bits."""
    merged_tensors: int
    weights_bytes: int
    files: int
    measured_peak_bytes: int
    seconds: float


def merge(
    run: str, output: str | Path, *, data: str = "demo", dtype: str = "auto", max_kl: float = MOST_KL,
    budget: int | None = None, progress: Progress = quiet,
) -> MergeReport:  # fmt: skip
    """Fold the adapter of a run into its base's weights and write a model folder that needs no adapter.

    Args:
        run: a run with an adapter, or an adapter's folder.
        output: the new folder; it may be there but must be empty. Made whole or not at all.
        data: rows on which the merged model is held against base + adapter.
        dtype: bf16, fp16 or fp32; auto is the base's own where that has 16 bits, else bf16.
        max_kl: most nats a position by which it may differ.

    Raises:
        InputError: where there is no adapter, it does not fit its base, or `output` cannot be written.
        Stopped: where the merged model differs by more than `max_kl`; there is no `output` then.
        OutOfMemory: where the budget does not hold the model.
    """
    started = time.monotonic()
    if dtype != "auto" and dtype not in load.DTYPES:
        raise RecipeError(f"dtype {dtype} is not known{nearest(dtype, ['auto', *load.DTYPES])}")
    folder = _new_folder(output)
    sources.check(data)
    source = load.resolve(run)
    if source.adapter is None:
        raise InputError(f"{run} has no adapter, so there is nothing to merge; give a run of method lora or an adapter")
    spec = devices.find("auto")
    precision = load.DTYPES[compute_precision(Recipe(), spec)]
    tokenizer = load.load_tokenizer(replace(source, folder=merging.tokenizer_folder(source)))
    config = load.read_config(source).get_text_config()
    longest = min(_DRIFT_TOKENS, getattr(config, "max_position_embeddings", None) or _DRIFT_TOKENS)
    held_out = dataset.load_evaluation(data, tokenizer, max_length=longest, most_rows=_DRIFT_ROWS).held_out
    if len(tokenizer) > config.vocab_size:
        beyond = f"the tokenizer of {run} has {len(tokenizer)} tokens, its base knows {config.vocab_size}"
        if any(row.ids.max() >= config.vocab_size for row in held_out):
            raise ModelError(f"{beyond}, and rows of {data} have some of the others")
        log.warning("%s; texts with the others cannot be run", beyond)
    rows = drift.choose([(row.ids, row.is_label) for row in held_out], vocabulary=config.vocab_size)

    def outputs(of: load.ModelSource, use: Callable[[PreTrainedModel], Any]) -> Any:
        model = load.load_model(of, dtype=precision, device=spec.kind, packing=of.packing)
        if of.adapter:
            adapters.load(model, of.adapter)
        found = use(model)
        del model
        devices.release_free_memory()
        return found

    try:
        with inside(spec, budget or devices.free_bytes(spec)), adapters.whole_folder(folder) as aside:
            written = merging.write(
                source, aside, dtype=load.DTYPES.get(dtype),
                advance=lambda done, total: progress("merging", done, total, {}),
            )  # fmt: skip
            devices.release_free_memory()
            progress("measuring", 0, 2, {})
            kept = outputs(source, lambda model: drift.keep(model, rows))
            progress("measuring", 1, 2, {})
            found = outputs(load.resolve(str(aside)), lambda model: drift.measure(kept, model, rows))
            progress("measuring", 2, 2, {})
            word = next(word for word, known in load.DTYPES.items() if known == written.dtype)
            report = MergeReport(
                output=str(folder), **asdict(found), dtype=word, base="dequantised" if source.packing else "original",
                merged_tensors=written.merged_tensors, weights_bytes=written.size_bytes, files=written.files,
                measured_peak_bytes=devices.peak_bytes(spec), seconds=time.monotonic() - started,
            )  # fmt: skip
            _check_drift(report, run, max_kl)
            (aside / "README.md").write_text(_merged_readme(source, report, data, precision), encoding="utf-8")
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error}") from None
    return report


def _new_folder(output: str | Path) -> Path:
    folder = Path(output).expanduser().resolve()
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InputError(f"output {folder} exists and is not empty; name another folder with --output")
    except OSError as error:
        raise InputError(f"output {folder} cannot be used: {error}") from None
    return folder


def _check_drift(report: MergeReport, run: str, max_kl: float) -> None:
    if report.kl <= max_kl:  # not so for a NaN either
        return
    finer = "" if report.dtype == "fp32" else "merge with --dtype fp32, or "
    raise Stopped(
        f"merged into {report.dtype}, the model differs from base + adapter by a KL of {report.kl:.3g} nats a position "
        f"(largest logit difference {report.max_logit_drift:.3g}, greedy agreement {report.greedy_agreement:.1%}), over the "
        f"limit of {max_kl:g}. Nothing was written, and {run} itself answers as it was trained; {finer}allow more with --max-kl"
    )


def _merged_readme(source: load.ModelSource, report: MergeReport, data: str, precision: torch.dtype) -> str:
    return "\n\n".join([
        f"# {source.published_as}, fine-tuned",
        f"A LoRA adapter merged with snugtune into the {report.base} weights of {source.published_as}: {report.merged_tensors} "
        f"tensors adapted, weights in {report.dtype} ({format_bytes(report.weights_bytes)}).",
        f"Against base + adapter, both computed in {str(precision).removeprefix('torch.')}, at {report.positions} label "
        f"positions of `{data}`: KL {report.kl:.3g} nats a position, largest logit difference {report.max_logit_drift:.3g}, "
        f"greedy agreement {report.greedy_agreement:.1%}.",
    ]) + "\n"  # fmt: skip
