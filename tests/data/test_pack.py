"""Which rows a step sees, how they are packed, and that the packed tensors say the same as the rows one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import tiny
from snugtune.data.encode import EncodedRow
from snugtune.data.pack import (
    collate,
    computed_tokens,
    global_batches,
    micro_batches,
    pack,
    padded,
    planned_steps,
    row_order,
)
from snugtune.kernels import attention
from snugtune.recipe import What
from snugtune.step import Scorer

relaxed = settings(deadline=None)
_lengths = st.lists(st.integers(1, 40), max_size=30)


def _what(**keys) -> What:
    return What.model_validate(keys)


# --- pack ------------------------------------------------------------------------------------------------------------


@relaxed
@given(_lengths, st.integers(1, 60))
@example([20, 7, 6, 5, 3, 3], 12)  # levelled over three, the second would hold 13 tokens
@example([], 8)
@example([9], 8)
@example([8, 8, 8], 8)
def test_packing_keeps_every_row_once_within_the_capacity(lengths, capacity):
    packed = pack(lengths, capacity=capacity)
    assert sorted(i for rows in packed for i in rows) == list(range(len(lengths))), "a row is lost or doubled"
    for rows in packed:
        assert rows, "a micro-batch is empty"
        load = sum(lengths[i] for i in rows)
        assert load <= capacity or len(rows) == 1, f"{load} tokens in a micro-batch of {capacity}"
        assert [lengths[i] for i in rows] == sorted((lengths[i] for i in rows), reverse=True), "not longest first"
    assert packed == pack(list(lengths), capacity=capacity), "the same rows were packed in another way"


@relaxed
@given(st.lists(st.integers(1, 20), min_size=1, max_size=30), st.integers(20, 60))
def test_packing_wastes_less_than_half(lengths, capacity):
    packed = pack(lengths, capacity=capacity)
    assert len(packed) <= 2 * -(-sum(lengths) // capacity), "first-fit decreasing would not need so many"


def test_packing_levels_the_load():
    lengths = [5, 5, 1, 1]  # first-fit alone would give 11 and 1
    loads = [sum(lengths[i] for i in rows) for rows in pack(lengths, capacity=11)]
    assert loads == [6, 6], "the fullest micro-batch makes the peak"


# --- order and steps -------------------------------------------------------------------------------------------------


@relaxed
@given(st.integers(1, 30), st.integers(0, 2**63 - 1), st.integers(0, 4), st.data())
def test_each_epoch_is_a_permutation_and_any_restart_goes_on_the_same(rows, seed, epochs, data):
    whole = list(row_order(rows, seed=seed, start=0, stop=(epochs + 1) * rows))
    for epoch in range(epochs + 1):
        assert sorted(whole[epoch * rows : (epoch + 1) * rows]) == list(range(rows))
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    assert list(row_order(rows, seed=seed, start=start, stop=stop)) == whole[start:stop]


def test_the_order_depends_on_the_seed_and_on_the_epoch_and_on_nothing_else():
    def order(seed, epoch):
        return tuple(row_order(50, seed=seed, start=50 * epoch, stop=50 * epoch + 50))

    orders = {(seed, epoch): order(seed, epoch) for seed in range(4) for epoch in range(4)}
    assert len(set(orders.values())) == 16
    torch.manual_seed(1)
    np.random.seed(1)
    assert all(order(*key) == value for key, value in orders.items())


def test_the_order_is_the_same_on_every_machine():
    """A snapshot made elsewhere must go on with the same rows: a change here is a change for every unfinished run."""
    assert list(row_order(8, seed=0, start=0, stop=16)) == [2, 4, 3, 6, 5, 0, 1, 7, 1, 3, 7, 6, 0, 4, 2, 5]


@pytest.mark.parametrize(
    ("keys", "rows", "sizes"),
    [
        ({"global_batch_rows": 4}, 10, [4, 4, 2]), ({"global_batch_rows": 4}, 8, [4, 4]),
        ({"global_batch_rows": 32}, 3, [3]),
        ({"global_batch_rows": 4, "num_train_epochs": 2}, 10, [4] * 5),
        ({"global_batch_rows": 4, "num_train_epochs": 0.5}, 10, [4, 1]),
        ({"global_batch_rows": 4, "num_train_epochs": 0.01}, 10, [1]),
        ({"global_batch_rows": 4, "num_train_epochs": 1.5}, 10, [4, 4, 4, 3]),
        ({"global_batch_rows": 4, "max_steps": 2}, 10, [4, 4]), ({"global_batch_rows": 4, "max_steps": 6}, 10, [4] * 6),
        ({"global_batch_rows": 4, "max_steps": 1, "num_train_epochs": 9}, 3, [4]),
    ],
)  # fmt: skip
def test_steps_and_their_rows(keys, rows, sizes):
    what = _what(**keys)
    batches = global_batches(what, rows)
    assert [len(batch) for batch in batches] == sizes
    assert planned_steps(what, rows) == len(sizes)


@relaxed
@given(st.integers(1, 60), st.integers(1, 20), st.floats(0.01, 4), st.none() | st.integers(1, 12), st.integers(0, 9))
def test_batches_are_the_row_order_cut_into_steps(rows, size, epochs, most, seed):
    what = _what(global_batch_rows=size, num_train_epochs=epochs, max_steps=most, seed=seed)
    batches = global_batches(what, rows)
    flat = [row for batch in batches for row in batch]
    assert len(batches) == planned_steps(what, rows) >= 1
    assert all(len(batch) == size for batch in batches[:-1]) and 1 <= len(batches[-1]) <= size
    assert flat == list(row_order(rows, seed=seed, start=0, stop=len(flat)))
    assert len(flat) == (most * size if most else max(1, round(rows * epochs)))


# --- collate ---------------------------------------------------------------------------------------------------------


@st.composite
def _encoded(draw) -> EncodedRow:
    ids = draw(st.lists(st.integers(0, 10**6), min_size=1, max_size=12))
    is_label = [False, *(draw(st.booleans()) for _ in ids[1:])]
    return EncodedRow("f:1", np.array(ids, dtype=np.int32), np.array(is_label))


@relaxed
@given(st.lists(_encoded(), min_size=1, max_size=6))
def test_a_packed_batch_says_what_its_rows_say(rows):
    batch = collate(rows)
    ids, positions, labels = [], [], []
    for row in rows:
        for place, (token, counts) in enumerate(zip(row.ids.tolist(), row.is_label.tolist(), strict=True)):
            if counts:
                labels.append((len(ids) - 1, token))
            ids.append(token)
            positions.append(place)
    assert batch.input_ids_1T.tolist() == [ids] and batch.position_ids_1T.tolist() == [positions]
    found = list(zip(batch.label_positions_N.tolist(), batch.labels_N.tolist(), strict=True))
    assert found == labels, "a label is not predicted by the token before it"
    tensors = (batch.input_ids_1T, batch.position_ids_1T, batch.label_positions_N, batch.labels_N)
    assert {t.dtype for t in tensors} == {torch.int64}
    assert batch.tokens == len(ids) and batch.label_tokens == len(labels)
    assert batch.row_tokens == tuple(row.tokens for row in rows)
    assert batch.row_label_tokens == tuple(row.label_tokens for row in rows)


@relaxed
@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.booleans())
def test_the_layout_holds_every_token_in_its_own_row(lengths, descending):
    lengths = sorted(lengths, reverse=True) if descending else lengths
    rows = [EncodedRow("f:1", np.zeros(n, dtype=np.int32), np.zeros(n, dtype=bool)) for n in lengths]
    start, remaining = 0, list(lengths)
    for group in collate(rows).row_layout:
        inside, remaining = remaining[: group.rows], remaining[group.rows :]
        assert (group.start, group.tokens, group.length) == (start, sum(inside), max(inside))
        start += group.tokens
        if group.pad_index is None:
            assert inside == [group.length] * group.rows and group.unpad_index is None
            continue
        owners = np.repeat(np.arange(group.rows), inside)
        assert group.unpad_index is not None
        padded = group.pad_index.numpy()
        assert (owners[padded] == np.repeat(np.arange(group.rows), group.length)).all(), (
            "a row is padded by another's token"
        )
        assert (padded[group.unpad_index.numpy()] == np.arange(group.tokens)).all(), "a token is lost by the padding"
    assert start == sum(lengths) and not remaining


def test_a_row_without_labels_collates_to_none():
    batch = collate([EncodedRow("f:1", np.array([5, 6], dtype=np.int32), np.array([False, False]))])
    assert batch.label_tokens == 0 and batch.labels_N.shape == batch.label_positions_N.shape == (0,)


# --- padding, to be compared with packing ----------------------------------------------------------------------------

MODES = ["packing", "grouping", "padding"]


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    capacity=st.integers(1, 200),
    batching=st.sampled_from(MODES),
)
def test_every_row_is_in_one_micro_batch_that_fits(lengths, capacity, batching):
    parts = micro_batches(lengths, capacity=capacity, batching=batching)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    for part in parts:
        sizes = [lengths[i] for i in part]
        assert computed_tokens(sizes, batching) <= capacity or len(part) == 1
    if batching == "padding":
        assert [i for part in parts for i in part] == list(range(len(lengths))), "the order of rows is lost"


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(2, 30), min_size=1, max_size=6), batching=st.sampled_from(MODES))
def test_padded_rows_are_as_long_as_was_said_and_have_their_labels(lengths, batching):
    rows = tiny.rows(lengths)
    longer = padded(rows, batching)
    assert sum(row.tokens for row in longer) == computed_tokens(lengths, batching)
    for row, long in zip(rows, longer, strict=True):
        assert long.ids[: row.tokens].tolist() == row.ids.tolist() and long.label_tokens == row.label_tokens


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("batching", ["grouping", "padding"])
def test_padding_changes_neither_loss_nor_gradient(name, batching):
    """What stands behind a row is not seen by it, and is no label."""
    found = []
    for way in ("packing", batching):
        torch.manual_seed(0)
        model = tiny.model(name, attn=attention.NAME).train().requires_grad_()
        loss = Scorer(model)._loss(collate(padded(tiny.rows([9, 30, 17]), way)))
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    for one, other in zip(*found, strict=True):
        tiny.assert_close(other, one, within=1e-5, name=f"{name} {batching}")
