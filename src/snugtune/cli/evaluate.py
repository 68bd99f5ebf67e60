"""`snugtune evaluate`: exact loss, perplexity and accuracy."""

from __future__ import annotations

from typing import Annotated

import typer

from snugtune.cli import console
from snugtune.device import restart_on_better_allocator
from snugtune.units import format_bytes, parse_bytes


def evaluate(
    model: Annotated[str, typer.Argument(help="A run, an adapter, a model folder, .gguf file, hub id or demo.")],
    *,
    data: Annotated[str, typer.Option(help="Rows to score: a file or demo (its held-out rows).")] = "demo",
    budget: Annotated[str | None, typer.Option(help="Device memory that may be in use.")] = None,
    max_length: Annotated[int, typer.Option(help="Longest row in tokens.")] = 1024,
    rows: Annotated[int | None, typer.Option(min=1, help="Score at most so many rows, drawn at random.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Score a model on held-out rows."""
    budget_bytes = parse_bytes(budget) if budget else None
    restart_on_better_allocator()
    console.quiet_libraries()
    from snugtune import api

    with console.progress() as progress:
        report = api.evaluate(model, data, budget=budget_bytes, max_length=max_length, rows=rows, progress=progress)
    if json:
        console.print_json(report)
        return
    table = console.facts_table(f"\n{model} on {data}")
    table.add_row("loss", f"{report.loss:.4f} over {report.tokens} label tokens of {report.rows} rows")
    table.add_row("perplexity", f"{report.perplexity:.3f}")
    if report.accuracy is not None:
        table.add_row("accuracy", f"{report.accuracy:.1%}")
    table.add_row("peak", format_bytes(report.measured_peak_bytes))
    console.stdout.print(table, soft_wrap=True)
