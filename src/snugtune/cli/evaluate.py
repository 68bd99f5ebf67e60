"""`snugtune evaluate`: exact loss, perplexity and accuracy."""

from __future__ import annotations

from typing import Annotated

import typer

from snugtune import recipe as recipes
from snugtune.cli import console
from snugtune.device import restart_on_mimalloc
from snugtune.units import format_bytes


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
    checked = recipes.load(model=model, data=data, budget=budget, overrides=[f"what.max_length={max_length}"])
    budget_bytes = None if checked.budget == "auto" else checked.budget
    restart_on_mimalloc()
    console.quiet_libraries()
    from snugtune import api

    console.spare_collector()
    with console.progress() as progress:
        report = api.evaluate(model, data, budget=budget_bytes, max_length=max_length, rows=rows, progress=progress)
    if json:
        console.print_json(report)
        return
    facts = [
        ("loss", f"{report.loss:.4f} over {report.tokens} label tokens of {report.rows} rows"),
        ("perplexity", f"{report.perplexity:.3f}"),
    ]
    if report.accuracy is not None:
        facts.append(("accuracy", f"{report.accuracy:.1%}"))
    facts.append(("peak", format_bytes(report.measured_peak_bytes)))
    console.print_facts(f"{model} on {data}", facts)
