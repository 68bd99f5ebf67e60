"""A02: the mean is over the label tokens of the global batch, however its rows are cut into micro-batches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tiny
from snugtune import step
from snugtune.adapters import lora
from snugtune.data.encode import EncodedRow
from snugtune.data.pack import collate
from snugtune.events import EventLog
from snugtune.trainer.loop import train_rows

WHAT = {"lora": {"r": 4, "target_modules": "all-linear"}}


def _built(what: dict[str, Any], how: dict[str, Any] | None = None) -> step.Step:
    model = tiny.model("llama")
    torch.manual_seed(0)
    built = step.build(tiny.recipe(what=what, how=how), model)
    for layer in lora.layers(model).values():
        layer.lora_B.data.normal_(std=0.1)
    return built


def _gradients(built: step.Step, parts: Sequence[Sequence[EncodedRow]]) -> tuple[float, dict[str, Tensor]]:
    """(mean loss, gradients) of one global batch in these micro-batches."""
    label_tokens = sum(row.label_tokens for part in parts for row in part)
    loss = sum(float(built.forward_backward(collate(part), label_tokens=label_tokens)) for part in parts) / label_tokens
    found = {name: p.grad.clone() for name, p in built.model.named_parameters() if p.grad is not None}
    built.drop_gradients()
    return loss, found


def _assert_same(built: step.Step, splits: Sequence[Sequence[Sequence[EncodedRow]]]) -> None:
    (loss, expected), *others = [_gradients(built, parts) for parts in splits]
    for parts, (other_loss, gradients) in zip(splits[1:], others, strict=True):
        shape = [[row.tokens for row in part] for part in parts]
        tiny.assert_close(other_loss, loss, within=1e-6, name=f"loss of {shape}")
        assert gradients.keys() == expected.keys()
        # As one vector: a query's gradient is nothing but rounding where every label is predicted from a first token.
        tiny.assert_close(_flat(gradients), _flat(expected), within=1e-6, name=f"gradient in {shape}")


def _flat(gradients: dict[str, Tensor]) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients.values()])


LORA, FULL = _built(WHAT), _built({"method": "full"})


@pytest.mark.parametrize("built", [LORA, FULL], ids=["lora", "full"])
def test_a02_39_and_3_label_tokens_as_one_and_as_two_micro_batches(built: step.Step):
    long, short = tiny.rows([44, 9], labels=[39, 3])
    assert (long.label_tokens, short.label_tokens) == (39, 3)
    _assert_same(built, [[[long, short]], [[long], [short]], [[short], [long]], [[short, long]]])


@pytest.mark.parametrize("built", [LORA, FULL], ids=["lora", "full"])
def test_a02_the_gradient_is_that_of_the_mean_over_tokens_written_out(built: step.Step):
    """And not that of the mean of the micro-batches' means."""
    rows = tiny.rows([44, 9], labels=[39, 3])
    loss, found = _gradients(built, [[row] for row in rows])
    reference = tiny.model("llama", attn="eager")
    lora_on = built is LORA
    if lora_on:
        lora.apply(reference, tiny.recipe(what=WHAT).what.lora)
        reference.load_state_dict(built.model.state_dict())
    else:
        reference.requires_grad_(True)
    mean = sum(tiny.row_loss(reference, row) for row in rows) / 42
    of_means = (tiny.row_loss(reference, rows[0]) / 39 + tiny.row_loss(reference, rows[1]) / 3) / 2
    mean.backward()
    tiny.assert_close(loss, mean.detach(), within=1e-6, name="logged loss")
    assert abs(of_means.item() - mean.item()) > 1e-3, "these rows cannot tell the two means apart"
    for name, gradient in found.items():
        tiny.assert_close(gradient, reference.get_parameter(name).grad, within=1e-5, name=f"gradient of {name}")


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(2, 24), min_size=1, max_size=5),
    cuts=st.lists(st.integers(0, 3), min_size=5, max_size=5),
    seed=st.integers(0, 20),
)
def test_a02_any_split_in_any_order_gives_the_same_gradient(lengths: list[int], cuts: list[int], seed: int):
    rows = tiny.rows(lengths, seed=seed)
    order = np.random.default_rng(seed).permutation(len(rows))
    parts = [[rows[i] for i in order if cuts[i] == part] for part in range(4)]
    _assert_same(LORA, [[rows], [part for part in parts if part], [[row] for row in rows]])


def test_a02_the_logged_loss_and_the_weights_are_the_same_for_every_micro_batch_size(tmp_path: Path):
    rows = tiny.rows([44, 9, 12, 5], labels=[39, 3, 2, 4])
    with torch.no_grad():
        plain = tiny.model("llama", attn="eager")
        expected = sum(float(tiny.row_loss(plain, row)) for row in rows) / 48
    what = WHAT | {"global_batch_rows": 4, "max_steps": 3, "learning_rate": 1e-2}
    found = []
    for capacity in (1, 50, 1000):
        recipe = tiny.recipe(what=what, how={"micro_batch_tokens": capacity})
        torch.manual_seed(0)
        built = step.build(recipe, tiny.model("llama"))
        events = EventLog(tmp_path / f"{capacity}.jsonl")
        train_rows(built, rows, recipe, events=events)
        events.close()
        lines = [json.loads(line) for line in (tmp_path / f"{capacity}.jsonl").read_text().splitlines()]
        losses = [line["loss"] for line in lines if line["event"] == "step"]
        norms = [line["grad_norm"] for line in lines if line["event"] == "step"]
        assert len(losses) == 3
        # A new adapter changes nothing, so that the first loss is the plain model's.
        tiny.assert_close(losses[0], expected, within=1e-5, name=f"first logged loss with {capacity} tokens at once")
        found.append((losses, norms, torch.cat([p.detach().flatten() for p in built.trainable])))
    for losses, norms, weights in found[1:]:
        tiny.assert_close(torch.tensor(losses), torch.tensor(found[0][0]), within=1e-5, name="logged losses")
        tiny.assert_close(torch.tensor(norms), torch.tensor(found[0][1]), within=1e-5, name="logged norms")
        tiny.assert_close(weights, found[0][2], within=1e-4, name="weights after three steps")
