"""The one tree of errors that a user may see.

    SnugtuneError                 exit 1   something went wrong that we did not foresee
    +-- InputError                exit 2   the user's input is wrong; nothing was started
    |   +-- RecipeError                    a key or a value of the recipe
    |   +-- DataError                      a file or its rows
    |   +-- ModelError                     a model, tokenizer or adapter
    +-- DoesNotFit                exit 3   the budget cannot hold it
    +-- Stopped                   exit 4   a guard ended the run; it can be resumed
    +-- OutOfMemory               exit 3   memory ran out although the plan said it would not

A message says what is wrong, with the numbers, and what to do next. `assert` is for our own invariants.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class SnugtuneError(Exception):
    """Base of every error that is shown to a user without a traceback."""

    exit_code = 1


class InputError(SnugtuneError):
    """The recipe, the data or the model is wrong; nothing was started."""

    exit_code = 2


class RecipeError(InputError):
    """An unknown key, or a value that a key does not take."""


class DataError(InputError):
    """A data file that is missing, empty or broken, or that holds no usable row."""


class ModelError(InputError):
    """A model folder, file or hub id that cannot be used."""


class DoesNotFit(SnugtuneError):
    """No way of running this stays inside the budget. `smallest_bytes` is the least budget that would do."""

    exit_code = 3

    def __init__(self, message: str, *, smallest_bytes: int) -> None:
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


class OutOfMemory(SnugtuneError):
    """The wall was hit: an allocation inside the run was refused."""

    exit_code = 3


class Stopped(SnugtuneError):
    """A guard stopped the run; what it had is on disk."""

    exit_code = 4


def nearest(wrong: str, right: Iterable[str]) -> str:
    """`; did you mean X?` for the closest of `right`, or the whole list where none is close."""
    names = sorted(right)
    close = get_close_matches(wrong, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; there are: {', '.join(names)}" if names else ""
