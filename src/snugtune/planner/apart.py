"""Plan in a process of its own, so that what planning leaves in memory is not under the run that follows."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from snugtune import device as devices
from snugtune.errors import SnugtuneError

T = TypeVar("T")


def call(function: Callable[[], T]) -> T:
    """`function()`, in a forked child where that is safe, else here. Its result must be plain data.

    Safe is a process that our command line started anew (it runs on mimalloc): torch has started no threads in it yet, which
    a fork would lose. A caller of the Python functions may have done anything.

    Raises:
        Exception: what `function` raised.
        SnugtuneError: where the child ended without an answer.
    """
    if not sys.platform.startswith("linux") or devices.allocator().name != "mimalloc":
        return function()
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(function, send), daemon=True)
    child.start()
    send.close()
    try:
        worked, found = receive.recv()
    except EOFError:
        child.join()
        raise SnugtuneError(
            f"planning stopped without an answer (exit code {child.exitcode}); is the machine short of memory?"
        ) from None
    child.join()
    if not worked:
        raise found
    return found


def _answer(function: Callable[[], Any], send: Any) -> None:
    try:
        answer = True, function()
    except Exception as error:  # noqa: BLE001  # raised again by the parent, at whose edge it becomes a message
        answer = False, error
    except KeyboardInterrupt:
        os._exit(130)  # the parent was interrupted as well, and says so
    send.send(answer)
    send.close()
