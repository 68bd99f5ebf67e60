"""`snugtune train`: plan, then train inside the budget."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from snugtune import recipe as recipes
from snugtune.cli import console
from snugtune.device import restart_on_better_allocator
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
    restart_on_better_allocator()
    console.quiet_libraries()
    from snugtune import api

    with console.progress() as progress:
        report = api.train(resolved, progress=progress)
    if json:
        console.print_json(report)
    else:
        _show(report, resolved.data)


def _show(report: Any, data: str) -> None:
    table = console.facts_table("\nDone")
    left_out = sum(report.rows_left_out.values())
    table.add_row("rows", f"{report.rows_used} used, {left_out} left out, {report.label_tokens} label tokens")
    table.add_row("training", f"{report.steps} steps of {report.global_batch_rows} rows in {format_seconds(report.train_seconds)}, "
                              f"{report.tokens_per_second:.0f} tokens/s")  # fmt: skip
    table.add_row("training loss", f"{report.loss_first:.3f} -> {report.loss_last:.3f}")
    if report.eval_loss_before is not None:
        table.add_row("held-out loss", f"{report.eval_loss_before:.3f} -> {report.eval_loss_after:.3f}  ({report.eval_rows} rows)")
    if report.accuracy_before is not None:
        table.add_row("accuracy", f"{report.accuracy_before:.1%} -> {report.accuracy_after:.1%}")
    share = report.measured_peak_bytes / report.budget_bytes
    table.add_row("peak", f"{format_bytes(report.measured_peak_bytes)} of {format_bytes(report.budget_bytes)} ({share:.0%}), "
                          f"predicted {format_bytes(report.predicted_peak_bytes)}")  # fmt: skip
    if report.skipped_steps:
        table.add_row("skipped steps", f"{report.skipped_steps}, their gradients were not finite")
    table.add_row("adapter" if report.adapter else "model", report.adapter or report.model)
    table.add_row("took", format_seconds(report.total_seconds))
    table.add_row("next", f"snugtune evaluate {report.run} --data {data}")
    console.stdout.print(table, soft_wrap=True)
