"""`snugtune doctor`: what is on this machine, what of it will be used, how fast it is, what is missing."""

from __future__ import annotations

from typing import Annotated

import typer

from snugtune.cli import console
from snugtune.device import restart_on_mimalloc
from snugtune.units import format_bytes


def doctor(*, json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False) -> None:
    """Look at this machine: devices, speeds, what is missing and how to get it."""
    restart_on_mimalloc()
    console.quiet_libraries()
    with console.working("measuring"):
        from snugtune import api

        console.spare_collector()
        report = api.doctor()
    if json:
        console.print_json(report)
        return
    facts = [
        (
            device["kind"],
            f"{device['name']}, {format_bytes(device['memory_bytes'])}, {format_bytes(device['free_bytes'])} free",
        )
        for device in report.devices
    ]
    speeds = ", ".join(f"{precision} {flops / 1e9:,.0f} GFLOP/s" for precision, flops in report.matmul_flops.items())
    facts += [
        ("products", f"{speeds}  (on {report.used}, measured now)"),
        ("memory", f"{report.memory_bandwidth / 1e9:,.1f} GB/s"),
        ("allocator", report.allocator),
        ("torch", f"{report.torch}, transformers {report.transformers}"),
        ("packages", ", ".join(f"{name} {version}" for name, version in report.packages.items())),
    ]
    console.print_facts("This machine", facts)
    for line in report.warnings:
        console.stdout.print(f"[yellow]![/] {line}", soft_wrap=True)
