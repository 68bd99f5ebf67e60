"""What all tests share. Tiny tensors gain nothing from threads, and a shared machine loses by them."""

from pathlib import Path

import pytest
import torch

import tiny

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.model("llama").save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder
