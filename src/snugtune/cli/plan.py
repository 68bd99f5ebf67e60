"""`snugtune plan`: what a run will need, before anything is loaded."""

from __future__ import annotations

import json as jsonlib
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from snugtune import recipe as recipes
from snugtune.cli import console
from snugtune.device import restart_on_mimalloc
from snugtune.units import GIB, format_bytes


def plan(
    recipe: Annotated[Path | None, typer.Argument(help="A recipe file (YAML). Every key has a default.")] = None,
    *,
    model: Annotated[str | None, typer.Option(help="Hub id, local folder, .gguf file or demo.")] = None,
    data: Annotated[str | None, typer.Option(help="File (.jsonl .json .csv .txt, also .gz) or demo.")] = None,
    budget: Annotated[str | None, typer.Option(help="Device memory that may be in use: 16GiB, 1500MB.")] = None,
    method: Annotated[str | None, typer.Option(help="lora or full.")] = None,
    token_lengths: Annotated[
        str | None, typer.Option(help="Stands in for data: 1024x4096 (length x rows), or a file with a length a line.")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any recipe key: what.learning_rate=1e-4.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Predict the peak of every phase, for every way to run; the fastest that fits is what train would take."""
    overrides = [*([f"what.method={method}"] if method else []), *(set_ or [])]
    resolved = recipes.load(recipe, model=model, data=data, budget=budget, overrides=overrides)
    restart_on_mimalloc()
    console.quiet_libraries()
    from snugtune import api

    started = time.monotonic()
    with console.working("planning"):
        plans = api.plan(resolved, token_lengths=token_lengths)
    chosen = next(found for found in plans if found.fits)
    if json:
        facts = chosen.as_json() | {"plan_seconds": round(time.monotonic() - started, 2)}
        sys.stdout.write(jsonlib.dumps(facts, ensure_ascii=False) + "\n")
        return
    _show(plans, chosen)


def _show(plans: Any, chosen: Any) -> None:
    rows = (("budget", format_bytes(chosen.budget_bytes)), ("device", chosen.device.name),
            ("largest batch", f"{chosen.worst_tokens} tokens of {chosen.worst_rows} rows"))  # fmt: skip
    console.print_facts("Predicted", rows)
    table = Table(box=None, padding=(0, 2, 0, 0), title="GiB by phase", title_justify="left", title_style="dim")
    for column in ("", "recompute", "micro-batch", *chosen.phases, "needs"):
        table.add_column(column, justify="left" if column in ("", "recompute") else "right", no_wrap=True)
    for found in plans:
        how = found.recipe.how
        sizes = [f"{size / GIB:.2f}" for size in (*found.phases.values(), found.needed_bytes)]
        mark = "->" if found is chosen else ""
        style = "bold" if found is chosen else "" if found.fits else "dim"
        table.add_row(mark, how.recompute, str(how.micro_batch_tokens), *sizes, style=style)
    console.stdout.print()
    console.stdout.print(table)
    console.stdout.print("\nFastest first. 'needs' is the smallest budget that holds it.", style="dim")
