"""`snugtune plan`: what a run will need and how fast it will be, before anything is loaded."""

from __future__ import annotations

import json as jsonlib
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from snugtune import recipe as recipes
from snugtune.cli import console
from snugtune.device import is_at_hand, restart_on_mimalloc
from snugtune.units import GIB, format_bytes, format_seconds

_BAR_WIDTH = 72
_COLOURS = {
    "weights": "blue", "adapter": "cyan", "gradients": "magenta", "optimiser": "yellow", "activations": "green",
    "loss": "red", "buffers": "white", "other": "bright_black", "free": "grey23",
}  # fmt: skip


def plan(
    recipe: Annotated[Path | None, typer.Argument(help="A recipe file (YAML). Every key has a default.")] = None,
    *,
    model: Annotated[str | None, typer.Option(help="Hub id, local folder, .gguf file or demo.")] = None,
    data: Annotated[str | None, typer.Option(help="File (.jsonl .json .csv .txt, also .gz) or demo.")] = None,
    budget: Annotated[str | None, typer.Option(help="Device memory that may be in use: 16GiB, 1500MB.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, or a card to plan for: a100-80gb.")] = None,
    method: Annotated[str | None, typer.Option(help="lora or full.")] = None,
    token_lengths: Annotated[
        str | None, typer.Option(help="Stands in for data: 1024x4096 (length x rows), or a file with a length a line.")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any recipe key: what.learning_rate=1e-4.")] = None,
    write: Annotated[
        Path | None, typer.Option(help="Write the chosen recipe here, a reason beside each choice.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Predict the peak of every phase and the speed, for every way to run; the first that fits is what train takes."""
    overrides = [*([f"what.method={method}"] if method else []), *(set_ or [])]
    resolved = recipes.load(recipe, model=model, data=data, budget=budget, device=device, overrides=overrides)
    if is_at_hand(resolved.device):  # the process that plans is then the kind of process that will run
        restart_on_mimalloc()
    console.quiet_libraries()
    started = time.monotonic()
    with console.working("planning"):
        from snugtune import api
        from snugtune.planner import explain

        console.spare_collector()
        ladder = api.plan(resolved, token_lengths=token_lengths)
    chosen = ladder.chosen
    if write:
        api.write_recipe(write, chosen.recipe, explain.comments(ladder))
    if json:
        facts = ladder.as_json() | {"plan_seconds": round(time.monotonic() - started, 2)}
        sys.stdout.write(jsonlib.dumps(facts, ensure_ascii=False) + "\n")
        return
    _show(ladder)
    if write:
        console.stdout.print(f"\nWritten to {write}; run it with: snugtune train {write}", soft_wrap=True)


def _show(ladder: Any) -> None:
    from snugtune.planner import explain

    chosen = ladder.chosen
    console.print_facts("Predicted", (
        ("device", chosen.device.name),
        ("budget", format_bytes(chosen.budget_bytes)),
        ("peak", f"{format_bytes(chosen.peak_bytes)} in the {chosen.limiting_phase} phase"),
        ("speed", f"{chosen.tokens_per_second:,.0f} tokens/s, {format_seconds(chosen.step_seconds)} a step"),
        ("largest batch", f"{chosen.batches.worst_tokens} tokens of {len(chosen.batches.worst)} rows"),
    ))  # fmt: skip
    console.stdout.print()
    console.stdout.print(_bar(explain.fill(ladder)))
    _print_table("At the step's peak", ("kind", "what", "storages", "GiB"), [
        (kind, what, str(count), f"{size / GIB:.2f}")
        for kind, what, count, size in explain.largest(ladder.contents.get("step", []))
    ])  # fmt: skip
    _print_table(
        "Peak by phase, GiB", tuple(chosen.phases), [tuple(f"{size / GIB:.2f}" for size in chosen.phases.values())]
    )
    _print_table(
        "The ladder: what fits, fastest first", ("base", "recompute", "micro-batch", "optimiser", "peak", "needs", "tokens/s"),
        [_row(p) for p in ladder.plans],
    )  # fmt: skip
    reasons = explain.reasons(ladder)
    if reasons:
        console.stdout.print("\n[dim]What does not fit[/]")
        for line in reasons:
            console.stdout.print(f"  {line}", soft_wrap=True)
    console.stdout.print("\n'needs' is the smallest budget that holds it. Predicted, nothing was run.", style="dim")


def _row(plan: Any) -> tuple[str, ...]:
    how = plan.recipe.how
    sizes = [f"{size / GIB:.2f}" for size in (plan.peak_bytes, plan.needed_bytes)]
    way = (plan.recipe.what.base, how.recompute, str(how.micro_batch_tokens), how.optimizer)
    return (*way, *sizes, f"{plan.tokens_per_second:,.0f}")


def _print_table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0), title=title, title_justify="left", title_style="dim")
    words = {"base", "recompute", "kind", "what", "optimiser"}
    for column in columns:
        table.add_column(column, justify="left" if column in words else "right", no_wrap=column != "what")
    for number, row in enumerate(rows):
        table.add_row(*row, style="bold" if number == 0 and "tokens/s" in columns else "")
    console.stdout.print()
    console.stdout.print(table)


def _bar(segments: list[Any]) -> Text:
    """One line that is the budget, and a legend under it."""
    total = sum(segment.size_bytes for segment in segments)
    bar, legend, drawn, done = Text(), Text(), 0, 0
    for segment in segments:
        done += segment.size_bytes
        cells = round(done / total * _BAR_WIDTH) - drawn
        drawn += cells
        colour = _COLOURS[segment.name]
        bar.append("█" * cells if segment.name != "free" else "░" * cells, style=colour)
        legend.append("■ " if segment.name != "free" else "░ ", style=colour)
        legend.append(f"{segment.name} {format_bytes(segment.size_bytes)}   ")
    return Text.assemble(bar, "\n", legend)
