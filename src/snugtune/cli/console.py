"""What a person sees: messages, progress and tables on stderr; JSON and nothing else on stdout."""

from __future__ import annotations

import gc
import json
import logging
import sys
import warnings
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

stderr = Console(stderr=True, highlight=False)
stdout = Console(highlight=False)


def error(message: str) -> None:
    """One message in red, not wrapped, so that paths in it can be copied."""
    stderr.print(f"[bold red]error:[/] {_plain(message)}", soft_wrap=True)


class _Lines(logging.Handler):
    """Log lines through the console, so that they stand above a running bar; not folded."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line."""
        colour = "yellow" if record.levelno >= logging.WARNING else "dim"
        stderr.print(f"[{colour}]{_plain(record.getMessage())}[/]", soft_wrap=True)


def quiet_libraries() -> None:
    """Our own log lines go to stderr; other libraries' progress bars and warnings do not."""
    log = logging.getLogger("snugtune")
    log.handlers[:] = [_Lines()]
    log.setLevel(logging.INFO)
    log.propagate = False
    warnings.filterwarnings("ignore", module=r"(transformers|torch|huggingface_hub)\b")


def spare_collector() -> None:
    """Leave what imports have made out of garbage collections: a million objects that live as long as the process.

    Call it once everything is imported. Planning is a quarter quicker for it, and the process ends a second earlier.
    """
    gc.freeze()


def print_json(report: Any) -> None:
    """One JSON object on stdout."""
    sys.stdout.write(json.dumps(asdict(report), ensure_ascii=False) + "\n")


@contextmanager
def progress() -> Generator[Any]:
    """A callback (what, done, total, facts) that draws a bar for each thing that is being done; silent off a terminal."""
    if not stderr.is_terminal:
        yield lambda what, done, total, facts: None
        return
    bars = Progress(
        TextColumn("{task.description:<18}"), BarColumn(bar_width=28), MofNCompleteColumn(), TimeRemainingColumn(),
        TextColumn("{task.fields[facts]}"), console=stderr,
    )  # fmt: skip
    tasks: dict[str, TaskID] = {}

    def show(what: str, done: int, total: int, facts: dict[str, float]) -> None:
        if what not in tasks:
            tasks[what] = bars.add_task(what, total=total, facts="")
        text = ""
        if "loss" in facts:
            text = f"loss {facts['loss']:.3f}  {facts['tokens_per_second']:.0f} tokens/s"
        bars.update(tasks[what], completed=done, facts=text)

    with bars:
        yield show


@contextmanager
def working(what: str) -> Generator[None]:
    """A spinner while something runs whose end is not known; silent off a terminal."""
    if not stderr.is_terminal:
        yield
        return
    with stderr.status(what):
        yield


def print_facts(title: str, facts: Iterable[tuple[str, str]]) -> None:
    """Names and values in two columns. Lines are never folded, so that a path or a command can be copied."""
    stdout.print(f"\n[bold]{_plain(title)}[/]", soft_wrap=True)
    for name, value in facts:
        stdout.print(f"[dim]{name:<15}[/]{_plain(value)}", soft_wrap=True)


def _plain(text: str) -> str:
    return text.replace("[", "\\[")
