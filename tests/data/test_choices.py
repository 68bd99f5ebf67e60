"""The tree of answers scores each of them as if it were written out alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from snugtune.data.choices import TreeBatch, largest_batch, tree_batches
from snugtune.data.encode import EncodedRow

END = 9
relaxed = settings(deadline=None)


def _row(prompt, answers, right=0, *, first_label=None) -> EncodedRow:
    """A row as encode makes it: choices are whole rows, the right one's labels begin after the prompt."""
    choices = tuple((*prompt, *answer) for answer in answers)
    ids = np.array(choices[right], dtype=np.int32)
    is_label = np.arange(len(ids)) >= (len(prompt) if first_label is None else first_label)
    return EncodedRow("f:1", ids, is_label, choices, right)


# Few different tokens, so that answers often begin alike; every answer ends with the end token.
_answer = st.lists(st.integers(1, 3), max_size=5).map(lambda tokens: (*tokens, END))
_prompt = st.lists(st.integers(1, 5), min_size=1, max_size=5).map(tuple)


@st.composite
def _rows(draw) -> EncodedRow:
    answers = draw(st.lists(_answer, min_size=1, max_size=6))
    return _row(draw(_prompt), answers, draw(st.integers(0, len(answers) - 1)))


def _only(rows, capacity=10**6) -> TreeBatch:
    [batch] = tree_batches(rows, capacity=capacity)
    return batch


def _seen(batch: TreeBatch, position: int) -> list[tuple[int, int]]:
    """(token, its place in the row) of everything that the token at `position` of the batch sees, in order."""
    for group in batch.row_layout:
        if group.start <= position < group.start + group.tokens:
            row, inside = divmod(position - group.start, group.length)
            assert group.mask_LL is not None
            visible = group.mask_LL[inside].nonzero().flatten() + group.start + row * group.length
            ids, places = batch.input_ids_1T[0, visible], batch.position_ids_1T[0, visible]
            return sorted(zip(ids.tolist(), places.tolist(), strict=True), key=lambda item: item[1])
    raise AssertionError(f"no row holds position {position}")


def _written_out(batch: TreeBatch, path) -> list[tuple[list[tuple[int, int]], int]]:
    """For each token of an answer: what its predictor sees, and the token itself."""
    return [
        (_seen(batch, int(batch.positions_U[batch.pair_position_M[pair]])), int(batch.pair_token_M[pair]))
        for pair in path
    ]


@relaxed
@given(st.lists(_rows(), min_size=1, max_size=4))
@example([_row((1, 2), [(END,)])])
@example([_row((1,), [(2, END), (2, 2, END), (END,), (2, 2, 2, END)], 3)])
@example([_row((1,), [(2, END), (2, END)], 1)])
@example([_row((1, 1), [(2, 3, END), (2, 1, END)]), _row((1, 1), [(2, 3, END), (2, 1, END)], 1)])
@example([_row((4,), [(1, 2, 3, 1, 2, END), (3, END)]), _row((4,), [(3, END), (1, 2, 3, 1, 2, END)])])
def test_each_answer_is_predicted_token_by_token_as_if_alone(rows):
    rows = [EncodedRow(f"f:{n}", r.ids, r.is_label, r.choices, r.answer) for n, r in enumerate(rows)]
    batch = _only(rows)
    assert len(batch.paths) == len(rows)
    unmatched = list(rows)
    for paths, answer, answer_tokens in zip(batch.paths, batch.answers, batch.label_tokens, strict=True):
        found = []
        for path in paths:
            written = _written_out(batch, path)
            for seen, _ in written:
                assert [place for _, place in seen] == list(range(len(seen))), "a position is missing or doubled"
            before = [token for token, _ in written[0][0]]
            tokens = [token for _, token in written]
            for step, (seen, _) in enumerate(written):
                assert [token for token, _ in seen] == before + tokens[:step], "a token sees another answer's"
            found.append((*before, *tokens))
        row = next(r for r in unmatched if r.choices == tuple(found) and r.answer == answer)
        unmatched = [r for r in unmatched if r is not row]
        assert answer_tokens == row.label_tokens, "the loss of the right answer would miss a label"
    assert not unmatched


@relaxed
@given(st.lists(_rows(), min_size=1, max_size=4))
def test_the_batch_is_in_order_and_holds_nothing_twice(rows):
    batch = _only(rows)
    positions = batch.positions_U.tolist()
    assert positions == sorted(set(positions)), "a position is scored twice, or out of order"
    where = batch.pair_position_M.tolist()
    assert where == sorted(where) and set(where) == set(range(len(positions)))
    assert batch.pair_counts_U == tuple(np.bincount(where))
    pairs = list(zip(where, batch.pair_token_M.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs), "a token is scored twice after the same text"
    used = {pair for paths in batch.paths for path in paths for pair in path}
    assert used == set(range(len(pairs))), "a pair belongs to no answer"
    assert batch.tokens == batch.input_ids_1T.shape[1] == batch.position_ids_1T.shape[1]
    assert sum(group.tokens for group in batch.row_layout) == batch.tokens
    starts = [group.start for group in batch.row_layout]
    assert starts == np.cumsum([0, *(group.tokens for group in batch.row_layout)])[:-1].tolist()


@relaxed
@given(_rows())
def test_a_tree_holds_each_beginning_once(row):
    prompt = int(np.argmax(row.is_label))
    inner = {choice[:n] for choice in row.choices or () for n in range(prompt + 1, len(choice))}
    assert _only([row]).tokens == prompt + len(inner), (
        "tokens that answers share stand more than once, or one is missing"
    )


def test_a_choice_that_begins_another_shares_its_tokens():
    batch = _only([_row((1,), [(2, END), (2, 3, END)])])
    assert batch.input_ids_1T.tolist() == [[1, 2, 3]] and batch.position_ids_1T.tolist() == [[0, 1, 2]]
    pairs = zip(batch.pair_position_M.tolist(), batch.pair_token_M.tolist(), strict=True)
    assert sorted(pairs) == [(0, 2), (1, 3), (1, END), (2, END)]


def test_branches_do_not_see_each_other():
    batch = _only([_row((1,), [(2, 3, END), (4, 5, END)])])
    mask = batch.row_layout[0].mask_LL
    assert mask is not None and batch.input_ids_1T.tolist() == [[1, 2, 3, 4, 5]]
    assert mask.int().tolist() == [
        [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 0, 1, 0], [1, 0, 0, 1, 1],
    ]  # fmt: skip
    assert batch.position_ids_1T.tolist() == [[0, 1, 2, 1, 2]]


def test_label_tokens_that_every_answer_begins_with_are_scored():
    row = _row((1, 2), [(3, 3, 1, END), (3, 3, 2, END)])
    batch = _only([row])
    assert batch.label_tokens == (4,) and [len(path) for path in batch.paths[0]] == [4, 4]


def test_answers_whose_tokens_part_before_the_first_label_branch_where_they_part():
    """A boundary token may differ by answer; then the row's own labels begin no earlier than the fork."""
    choices = ((1, 2, 3, END), (1, 4, END))
    row = EncodedRow("f:1", np.array(choices[0], dtype=np.int32), np.array([False, False, True, True]), choices, 0)
    batch = _only([row])
    assert batch.input_ids_1T[0, 0] == 1 and batch.positions_U[0] == 0
    assert [len(path) for path in batch.paths[0]] == [3, 2]


def test_rows_of_one_shape_share_an_attention_call():
    same = [_row((1, 2), [(2, 3, END), (4, END)]), _row((5, 5), [(1, 1, END), (3, END)], 1)]
    batch = _only([*same, _row((1, 2, 3), [(2, END)])])
    assert sorted(group.rows for group in batch.row_layout) == [1, 2]
    assert all(group.mask_LL is not None and group.mask_LL.dtype == torch.bool for group in batch.row_layout)


@relaxed
@given(st.lists(_rows(), min_size=1, max_size=12), st.integers(1, 40))
def test_batches_hold_every_row_within_the_capacity(rows, capacity):
    batches = list(tree_batches(rows, capacity=capacity))
    for batch in batches:
        assert batch.tokens <= capacity or len(batch.paths) == 1
    sizes = sorted(len(paths) for batch in batches for paths in batch.paths)
    assert sizes == sorted(len(row.choices or ()) for row in rows), "a row is lost or doubled"
    largest = _only(largest_batch(rows, capacity=capacity))
    assert largest.tokens == max(batch.tokens for batch in batches), (
        "the planner would look at a smaller batch than the run"
    )


@pytest.mark.parametrize("answers", [3, 77])
def test_the_work_of_many_answers_is_their_tree_not_their_sum(answers):
    prompt = tuple(range(1, 101))
    row = _row(prompt, [(1, 2, n, END) for n in range(answers)])
    assert _only([row]).tokens == 100 + 2 + answers
