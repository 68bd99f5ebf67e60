"""The command line. One file per command; each imports what it runs when it runs."""

from __future__ import annotations

import os
import sys

import typer

from snugtune.cli import console
from snugtune.cli.doctor import doctor
from snugtune.cli.evaluate import evaluate
from snugtune.cli.inspect import inspect
from snugtune.cli.merge import merge
from snugtune.cli.plan import plan
from snugtune.cli.train import train
from snugtune.errors import SnugtuneError

app = typer.Typer(
    name="snugtune", add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
    help="Say how much memory you have; get the fastest fine-tune that fits, kept inside it.",
)  # fmt: skip
app.command()(plan)
app.command()(train)
app.command()(evaluate)
app.command()(merge)
app.command()(inspect)
app.command()(doctor)


@app.callback()
def _top() -> None:
    """Keep `snugtune COMMAND` the form even while there is one command only."""


def main() -> None:
    """Run the command line; every error ends as one message and the exit code of its kind."""
    debug = os.environ.get("SNUGTUNE_DEBUG") == "1"
    try:
        app()
    except SnugtuneError as error:
        if debug:
            raise
        console.error(str(error))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        console.error("interrupted")
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except Exception as error:  # the one broad except: no traceback reaches a user
        if debug:
            raise
        console.error(f"unexpected: {type(error).__name__}: {error}. Set SNUGTUNE_DEBUG=1 for the traceback")
        sys.exit(1)
