"""`snugtune inspect`: what a run would see of its data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from snugtune import recipe as recipes
from snugtune.cli import console

if TYPE_CHECKING:
    from snugtune.inspecting import InspectReport

_MOST_CHARACTERS = 700
_BAR = 40


def inspect(
    data: Annotated[str, typer.Argument(help="A file, demo, a hub id, or a recipe (.yaml).")],
    *,
    model: Annotated[str | None, typer.Option(help="Whose tokenizer and chat template.")] = None,
    loss_rows: Annotated[int, typer.Option(min=0, help="Look for rows with an outlying loss among so many.")] = 0,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Any recipe key: what.max_length=512.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Show formats, masks in colour, lengths, bad rows, duplicates and outliers."""
    if data.endswith((".yaml", ".yml")):
        recipe = recipes.load(data, model=model, overrides=set_ or ())
    else:
        recipe = recipes.load(data=data, model=model, overrides=set_ or ())
    console.quiet_libraries()
    from snugtune import inspecting

    console.spare_collector()
    with console.progress() as progress:
        report = inspecting.inspect(recipe, loss_rows=loss_rows, progress=progress)
    if json:
        for line in report.warnings:
            console.stderr.print(line, style="yellow", markup=False, soft_wrap=True)
        console.print_json(report)
        return
    _print(report, recipe.data_names, recipe.what.max_length)


def _print(report: InspectReport, title: str, max_length: int) -> None:
    lengths, padding = report.token_lengths, report.padding
    held_out = f", {report.held_out_rows:,} of them to be held out" if report.held_out_rows else ""
    console.print_facts(title, [
        ("rows", f"{report.rows:,}{held_out}"),
        ("formats", ", ".join(f"{name} ({rows:,})" for name, rows in report.formats.items())),
        ("tokens", f"{report.tokens:,}, {report.label_tokens:,} of them label tokens ({report.label_tokens / report.tokens:.0%})"),
        ("tokens a row", f"median {lengths['p50']}, 95 of 100 up to {lengths['p95']}, longest {lengths['max']}"),
        ("padding", f"none when packed; {padding['dynamic']:.0%} of what is computed in batches of 8, {padding['max_length']:.0%} at max_length {max_length}"),
    ])  # fmt: skip
    _print_histogram(report.histogram)
    if report.warnings:
        console.stdout.print()
    for line in report.warnings:
        console.stdout.print(line, style="yellow", markup=False, soft_wrap=True)
    for number, pieces in enumerate(report.shown, 1):
        console.stdout.print(
            f"\n[bold]row {number}[/] [dim](what the loss counts is[/] [black on green]green[/][dim])[/]"
        )
        console.stdout.print(_coloured(pieces), soft_wrap=True)


def _print_histogram(bins: list[tuple[int, int, int]]) -> None:
    most = max(rows for _, _, rows in bins)
    width = max(len(f"{low}-{high}") for low, high, _ in bins)
    console.stdout.print()
    for low, high, rows in bins:
        bar = "\u2588" * max(round(_BAR * rows / most), 1 if rows else 0)
        console.stdout.print(f"[dim]{f'{low}-{high}':>{width}}[/] [cyan]{bar}[/] {rows:,}", soft_wrap=True)


def _coloured(pieces: list[tuple[str, bool]]) -> Text:
    """Long pieces that are not learnt are shortened in their middle."""
    text = Text()
    for piece, learnt in pieces:
        if len(piece) > _MOST_CHARACTERS:
            piece = f"{piece[: _MOST_CHARACTERS // 2]} [...] {piece[-_MOST_CHARACTERS // 2 :]}"
        text.append(piece, style="black on green" if learnt else "")
    return text
