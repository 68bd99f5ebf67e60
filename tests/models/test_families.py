"""Every packed family: packed rows give what each row gives alone through the family's own forward (A11)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import tiny
from snugtune.data.choices import tree_batches
from snugtune.data.encode import EncodedRow
from snugtune.data.pack import collate
from snugtune.kernels import attention
from snugtune.models.blocks import PACKED_FAMILIES, anatomy
from snugtune.step import Scorer

VARIANTS = sorted(tiny.VARIANTS)
LENGTHS = {
    "one row": [9],
    "equal": [6, 6, 6],
    "one group, padded": [16, 15, 14, 14],
    "several groups, and rows of 1 and 2": [19, 18, 9, 4, 4, 2, 1, 1],
    "not sorted": [2, 11, 10, 1, 12],
}


def _everything_trainable(models: Sequence[torch.nn.Module]) -> None:
    for model in models:
        model.requires_grad_(True)


def _gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_every_packed_family_has_a_tiny_model_and_so_a_test_here():
    assert {tiny.config(name).model_type for name in VARIANTS} == PACKED_FAMILIES


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("name", VARIANTS)
def test_a11_packed_loss_is_the_sum_of_the_rows_alone(name: str, lengths: list[int]):
    packed, reference = tiny.pair(name)
    rows = tiny.rows(lengths)
    with torch.no_grad():
        alone = sum(float(tiny.row_loss(reference, row)) for row in rows)
    together = float(Scorer(packed).loss(collate(rows)))
    tiny.assert_close(together, alone, within=1e-5, name=f"{name}: loss of packed rows {lengths}")


@pytest.mark.parametrize("name", VARIANTS)
def test_a11_packed_gradients_are_the_sum_of_the_rows_alone(name: str):
    packed, reference = tiny.pair(name)
    _everything_trainable([packed, reference])
    rows = tiny.rows([19, 18, 9, 4, 3, 1])
    for row in rows:
        tiny.row_loss(reference, row).backward()
    Scorer(packed, chunk_tokens=7)._loss(collate(rows)).backward()
    expected, got = _gradients(reference), _gradients(packed)
    assert got.keys() == expected.keys()
    for weight, gradient in expected.items():
        tiny.assert_close(got[weight], gradient, within=3e-5, name=f"{name}: gradient of {weight}")


@pytest.mark.parametrize("name", VARIANTS)
def test_a11_a_row_is_not_changed_by_its_neighbours(name: str):
    """Hidden states of one row, with other rows around it and without."""
    packed, _ = tiny.pair(name)
    scorer = Scorer(packed)
    row = tiny.rows([11], seed=1)
    around = tiny.rows([12, 12, 11, 3], seed=2)
    with torch.no_grad():
        alone = scorer._hidden(collate(row))
        together = scorer._hidden(collate([*around[:2], *row, *around[2:]]))[24 : 24 + 11]
    tiny.assert_close(together, alone, within=1e-5, name=f"{name}: hidden states of a row between others")


@pytest.mark.parametrize("name", VARIANTS)
def test_hidden_states_and_head_give_the_familys_own_logits(name: str):
    """A scale or a cap that the head's description lacks shows here."""
    packed, reference = tiny.pair(name)
    ids = torch.tensor([[5, 9, 77, 3]])
    row = EncodedRow("row", ids[0].numpy(), torch.tensor([False, True, True, True]).numpy())
    scorer = Scorer(packed)
    with torch.no_grad():
        expected = reference(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        head = scorer._head()
        logits = scorer._hidden(collate([row])) @ head.weight_VD.t() * head.scale
        logits = logits + (0 if head.bias_V is None else head.bias_V * head.scale)
        if head.softcap is not None:
            logits = torch.tanh(logits / head.softcap) * head.softcap
    tiny.assert_close(logits.log_softmax(-1), expected, within=1e-5, name=f"{name}: log-probabilities")


@pytest.mark.parametrize("name", tiny.UNLISTED)
def test_a_family_outside_of_the_set_goes_row_by_row_with_the_same_loss_and_gradient(name: str):
    model, reference = (tiny.model(name, attn="sdpa") for _ in range(2))
    _everything_trainable([model, reference])
    scorer = Scorer(model)
    assert not scorer.parts.packs
    assert not scorer.sees_trees, "its answers cannot be scored as a tree"
    rows = tiny.rows([9, 7, 2, 1, 12])
    alone = sum(tiny.row_loss(reference, row) for row in rows)
    together = scorer._loss(collate(rows))
    tiny.assert_close(together.detach(), alone.detach(), within=1e-5, name=f"{name}: loss")
    alone.backward()
    together.backward()
    for weight, gradient in _gradients(reference).items():
        tiny.assert_close(_gradients(model)[weight], gradient, within=1e-5, name=f"{name}: gradient of {weight}")


LENGTH_ROPES = {
    "dynamic": ("llama", {"rope_type": "dynamic", "factor": 4.0}, {"max_position_embeddings": 8}),
    "longrope": (
        "phi3",
        {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0], "factor": 8.0},
        {"original_max_position_embeddings": 8},
    ),
}


@pytest.mark.parametrize("rope", LENGTH_ROPES)
def test_a11_rotary_frequencies_that_depend_on_the_longest_row_forbid_packing(rope: str):
    """Packed, the row of 4 tokens would be scored with the frequencies of the row of 16."""
    name, parameters, shape = LENGTH_ROPES[rope]
    rope_parameters = parameters | {"rope_theta": 10000.0}
    model, reference = (tiny.model(name, attn="sdpa", rope_parameters=rope_parameters, **shape) for _ in range(2))
    rows = tiny.rows([16, 4])
    with torch.no_grad():
        alone = sum(float(tiny.row_loss(reference, row)) for row in rows)
    assert not anatomy(model).packs, f"rope type {rope}"
    tiny.assert_close(float(Scorer(model).loss(collate(rows))), alone, within=1e-5, name=f"rope type {rope}: loss")


TREES = [
    (7, [(10, 2), (11, 12, 2), (11, 13, 2), (11, 13, 14, 2)]),
    (7, [(20, 2), (21, 22, 2), (21, 23, 2), (21, 23, 24, 2)]),  # the same shape: shares an attention call
    (3, [(30, 31, 2), (30, 32, 2)]),  # every answer begins alike
    (1, [(40, 2), (2,)]),
    (5, [(50, 51, 52, 2)]),  # a single answer
]


@pytest.mark.parametrize("capacity", [1, 30, 1000])
@pytest.mark.parametrize("name", [name for name in VARIANTS if Scorer(tiny.model(name)).sees_trees])
def test_a_tree_of_answers_scores_as_the_answers_written_out(name: str, capacity: int):
    packed, reference = tiny.pair(name)
    scorer = Scorer(packed, chunk_tokens=3)
    rows = tiny.choice_rows(TREES)
    scored = 0
    for batch in tree_batches(rows, capacity=capacity):
        log_probs = scorer.log_probs(batch).tolist()
        order = [_row_of(rows, batch, number) for number in range(len(batch.paths))]
        for row, paths in zip(order, batch.paths, strict=True):
            assert row.choices is not None
            prompt = int(row.is_label.argmax())
            for choice, path in zip(row.choices, paths, strict=True):
                tiny.assert_close(
                    sum(log_probs[pair] for pair in path), _log_prob(reference, choice, prompt),
                    within=1e-5, name=f"{name}: log-probability of {choice[prompt:]} in {row.where}",
                )  # fmt: skip
                scored += 1
    assert scored == sum(len(answers) for _, answers in TREES)


def _row_of(rows: list[EncodedRow], batch, number: int) -> EncodedRow:
    """Rows come longest first; a prompt is told by its tokens."""
    starts = [i for i, position in enumerate(batch.position_ids_1T[0].tolist()) if position == 0]
    first = starts[number]
    ids = batch.input_ids_1T[0].tolist()
    (found,) = [row for row in rows if ids[first : first + (n := int(row.is_label.argmax()))] == row.ids[:n].tolist()]
    return found


def _log_prob(reference: torch.nn.Module, choice: tuple[int, ...], prompt: int) -> float:
    with torch.no_grad():
        log_probs = reference(input_ids=torch.tensor([choice]), use_cache=False).logits[0].log_softmax(-1)
    return sum(float(log_probs[i - 1, choice[i]]) for i in range(prompt, len(choice)))


def test_families_with_a_sliding_window_do_not_score_trees():
    for name in VARIANTS:
        window = getattr(tiny.config(name), "sliding_window", None)
        assert Scorer(tiny.model(name)).sees_trees == (not window), name


def test_blocks_and_head_are_found_in_every_family():
    for name in [*VARIANTS, *tiny.UNLISTED]:
        model = tiny.model(name, attn="sdpa" if name in tiny.UNLISTED else attention.NAME)
        parts = anatomy(model)
        assert len(parts.blocks) == 2, name
        assert parts.head is model.get_output_embeddings(), name
