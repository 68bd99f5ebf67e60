"""A20: tokens that were added to a tokenizer and have no row in the model: refused before anything is loaded, with what it takes."""

from __future__ import annotations

import json

import pytest

import tiny
from snugtune import api
from snugtune.errors import ModelError
from snugtune.recipe import check


@pytest.fixture
def folder(tmp_path):
    """A model of few tokens with a tokenizer of four more."""
    tokenizer = tiny.tokenizer()
    model = tiny.model("llama", vocab_size=len(tokenizer))
    tokenizer.add_tokens(["<one>", "<two>", "<three>", "<four>"])
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path


def _rows(folder, text):
    path = folder / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "w5 ", "completion": text}) + "\n")
    return str(path)


@pytest.mark.parametrize("text", ["<two>", "w6 <four> w7"])
def test_a20_data_that_uses_them_is_refused_by_plan_train_and_evaluate(folder, text):
    model, data = str(folder / "model"), _rows(folder, text)
    recipe = check({"model": model, "data": data, "output": str(folder / "run"), "budget": "8GiB"})
    for command in (api.plan, api.train, lambda _: api.evaluate(model, data)):
        with pytest.raises(ModelError, match=r"4 tokens more than the model's \d+ \(<one>, <two>, <three>, <four>\)"):
            command(recipe)
    assert not (folder / "run").exists()


def test_a20_data_without_them_is_used(folder):
    data = _rows(folder, "w6")
    assert api.evaluate(str(folder / "model"), data).rows == 1
