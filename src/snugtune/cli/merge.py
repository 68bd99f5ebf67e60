"""`snugtune merge`: an adapter folded into its base's weights, with the measured drift."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from snugtune import recipe as recipes
from snugtune.cli import console
from snugtune.device import restart_on_mimalloc
from snugtune.units import format_bytes, format_seconds


def merge(
    run: Annotated[str, typer.Argument(help="A run with an adapter, or an adapter folder.")],
    *,
    output: Annotated[Path, typer.Option(help="The new model's folder.")],
    data: Annotated[str, typer.Option(help="Rows on which to measure the drift: a file or demo.")] = "demo",
    dtype: Annotated[
        str, typer.Option(help="Of the merged weights: bf16, fp16, fp32, or auto: the base's 16 bits.")
    ] = "auto",
    max_kl: Annotated[float | None, typer.Option(min=0, help="Refuse past this drift, in nats a position.")] = None,
    budget: Annotated[str | None, typer.Option(help="Device memory that may be in use.")] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Fold an adapter into its base's weights."""
    checked = recipes.load(data=data, budget=budget)
    budget_bytes = None if checked.budget == "auto" else checked.budget
    restart_on_mimalloc()
    console.quiet_libraries()
    from snugtune import merging

    console.spare_collector()
    with console.progress() as progress:
        report = merging.merge(
            run, output, data=data, dtype=dtype, max_kl=merging.MOST_KL if max_kl is None else max_kl, budget=budget_bytes,
            progress=progress,
        )  # fmt: skip
    if json:
        console.print_json(report)
        return
    files = f"{report.files} file" + "s" * (report.files > 1)
    facts = [
        (
            "weights",
            f"{report.dtype}, {format_bytes(report.weights_bytes)} in {files}, {report.merged_tensors} tensors changed",
        ),
        ("drift", f"KL {report.kl:.2e} nats a position, largest logit difference {report.max_logit_drift:.3f}"),
        ("same answers", f"{report.greedy_agreement:.1%} of {report.positions} positions have the same first choice"),
        ("peak", format_bytes(report.measured_peak_bytes)),
        ("took", format_seconds(report.seconds)),
        ("next", f"snugtune evaluate {report.output} --data {data}"),
    ]
    console.print_facts(f"{run} merged into {report.output}", facts)
