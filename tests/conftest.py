"""What all tests share. Tiny tensors gain nothing from threads, and a shared machine loses by them."""

import sys
from pathlib import Path

import pytest
import torch

import tiny
from snugtune import cli
from snugtune.data import tokens

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.model("llama").save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def run(monkeypatch, capsys):
    """The command line as a function: (exit code, stdout, stderr)."""
    monkeypatch.setenv("SNUGTUNE_ALLOCATOR", "system")  # a test process is not restarted
    monkeypatch.delenv("SNUGTUNE_DEBUG", raising=False)

    def call(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["snugtune", *map(str, args)])
        try:
            cli.main()
            code = 0
        except SystemExit as leave:
            code = leave.code or 0
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return call


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    """Tests neither use nor fill the user's folder of tokens."""
    folder = tmp_path_factory.mktemp("tokens")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "_folder", lambda: folder)
        yield
