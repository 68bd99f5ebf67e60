"""The house rules that a machine can check."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import snugtune
from snugtune import errors

SOURCE = Path(snugtune.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
SLOW_IMPORTS = ("torch", "transformers", "numpy", "tokenizers")


def _imports(statement: str) -> set[str]:
    """Top-level packages that a fresh interpreter holds after `statement`."""
    script = f"import sys\n{statement}\nprint('\\n'.join(sorted({{name.split('.')[0] for name in sys.modules}})))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split("\n"))


@pytest.mark.parametrize(
    "statement",
    [
        "import snugtune; snugtune.Recipe", "import snugtune.cli",
        "from snugtune import recipe, events, units, errors",
    ],
)  # fmt: skip
def test_it_starts_without_torch(statement):
    brought = _imports(statement).intersection(SLOW_IMPORTS)
    assert not brought, f"`{statement}` imports {', '.join(sorted(brought))}"


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["evaluate", "--help"]], ids=" ".join)
def test_help_is_printed_without_torch(arguments):
    statement = (
        f"from snugtune import cli\nsys.argv = ['snugtune', *{arguments!r}]\n"
        "import contextlib, io\n"
        "with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):\n    cli.main()\n"
        "assert 'Usage' in out.getvalue(), out.getvalue()"
    )
    assert not _imports(statement).intersection(SLOW_IMPORTS)


def test_every_public_name_is_there_and_stays_what_it_is():
    for _ in ("before", "after"):
        for name in snugtune.__all__:
            public = getattr(snugtune, name)
            assert callable(public), f"snugtune.{name} is {public!r}: a package of that name hides the function"
            assert public.__doc__, f"snugtune.{name} has no docstring"
        importlib.import_module("snugtune.api")
    with pytest.raises(AttributeError, match="no attribute 'tune'"):
        snugtune.tune  # noqa: B018


def test_no_module_is_a_drawer_for_everything():
    drawers = {"utils", "util", "helpers", "helper", "common", "misc"}
    found = [str(f.relative_to(SOURCE)) for f in FILES if drawers & set(f.relative_to(SOURCE).with_suffix("").parts)]
    assert not found, "these want a name that says what they do"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SOURCE)))
def test_names_say_bytes_and_seconds(file):
    """Sizes are bytes and times are seconds; a name never carries another unit."""
    found = re.findall(r"\b\w+_(?:[kmgt]i?b|ms|us|minutes)\b", file.read_text(encoding="utf-8"), re.IGNORECASE)
    assert not found, f"{file.name} measures in other units than bytes and seconds: {sorted(set(found))}"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(SOURCE)))
def test_no_module_pretends_to_be_another_librarys(file):
    text = file.read_text(encoding="utf-8")
    assert text.startswith('"""'), f"{file.name} does not say what it is for"
    patched = re.findall(r"^(?:torch|transformers|np|F|nn)\.[\w.]+ = .*$", text, re.MULTILINE)
    assert not patched, f"{file.name} patches another library: {patched}"


ERRORS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_is_raised_somewhere(kind):
    assert issubclass(kind, errors.SnugtuneError) and kind.exit_code in (1, 2, 3, 4)
    if kind is errors.SnugtuneError:  # the base
        return
    raised = re.compile(rf"(?:raise|return) {kind.__name__}\(")
    if not any(raised.search(f.read_text(encoding="utf-8")) for f in FILES):
        pytest.xfail(f"{kind.__name__} is raised nowhere")
