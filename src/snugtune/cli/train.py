"""`snugtune train`: plan, then train inside the budget."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from snugtune import recipe as recipes
from snugtune.cli import console
from snugtune.device import restart_on_mimalloc
from snugtune.units import format_bytes, format_seconds


def train(
    recipe: Annotated[Path | None, typer.Argument(help="A recipe file (YAML). Every key has a default.")] = None,
    *,
    model: Annotated[str | None, typer.Option(help="Hub id, local folder, .gguf file or demo.")] = None,
    data: Annotated[str | None, typer.Option(help="File (.jsonl .json .csv .txt, also .gz) or demo.")] = None,
    budget: Annotated[str | None, typer.Option(help="Device memory that may be in use: 16GiB, 1500MB.")] = None,
    method: Annotated[str | None, typer.Option(help="lora or full.")] = None,
    output: Annotated[Path | None, typer.Option(help="The run's folder.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any recipe key: what.learning_rate=1e-4.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Fine-tune a model inside a memory budget."""
    overrides = [*([f"what.method={method}"] if method else []), *(set_ or [])]
    resolved = recipes.load(
        recipe, model=model, data=data, budget=budget, output=str(output) if output else None, overrides=overrides
    )
    restart_on_mimalloc()
    console.quiet_libraries()
    from snugtune import api

    console.spare_collector()
    with console.progress() as progress:
        report = api.train(resolved, progress=progress)
    if json:
        console.print_json(report)
    else:
        _show(report, resolved.data_names)


def _show(report: Any, data: str) -> None:
    left_out = sum(report.rows_left_out.values())
    share = report.measured_peak_bytes / report.budget_bytes
    facts = [
        ("rows", f"{report.rows_used} used, {left_out} left out, {report.label_tokens} label tokens"),
        (
            "training",
            f"{report.steps} steps of {report.global_batch_rows} rows in {format_seconds(report.train_seconds)}, "
            f"{report.tokens_per_second:.0f} tokens/s",
        ),
        ("training loss", f"{report.loss_first:.3f} -> {report.loss_last:.3f}"),
    ]
    if report.eval_loss_before is not None:
        before, after = report.eval_loss_before, report.eval_loss_after
        facts.append(("held-out loss", f"{before:.3f} -> {after:.3f}  ({report.eval_rows} rows)"))
    if report.accuracy_before is not None:
        facts.append(("accuracy", f"{report.accuracy_before:.1%} -> {report.accuracy_after:.1%}"))
    facts.append((
        "peak",
        f"{format_bytes(report.measured_peak_bytes)} of {format_bytes(report.budget_bytes)} ({share:.0%}), "
        f"predicted {format_bytes(report.predicted_peak_bytes)}",
    ))  # fmt: skip
    if report.skipped_steps:
        facts.append(("skipped steps", f"{report.skipped_steps}, their gradients were not finite"))
    facts.append(("adapter", report.adapter) if report.adapter else ("model", report.model))
    facts.append(("took", format_seconds(report.total_seconds)))
    facts.append(("next", f"snugtune evaluate {report.run} --data {data}"))
    console.print_facts("Done", facts)
