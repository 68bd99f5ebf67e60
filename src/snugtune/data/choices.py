"""Rows whose answer is one of a known few: one forward scores them all.

The answers of a row branch from its prompt like a tree; tokens that several answers begin with stand once. Each token of
the tree sees the prompt and its own ancestors, so that the probabilities are those of the answers written out one by one.

    log p(answer | prompt) = sum over the answer's tokens, its end token included

Shapes: T packed tokens, U positions that predict something, M (position, token) pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from snugtune.data.encode import EncodedRow
from snugtune.kernels.attention import RowLayout, tree_group


@dataclass(frozen=True)
class _Tree:
    """One row's prompt and the branching answers after it."""

    row: EncodedRow
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    """Tokens of the tree that predict something (an answer's last token does not)."""
    parents: tuple[int, ...]
    """For each of `tokens`, its parent among them; -1 is the prompt's last token."""
    pairs: tuple[tuple[int, int], ...]
    """(parent, token) for every token of every answer, sorted by parent."""
    paths: tuple[tuple[int, ...], ...]
    """For each answer, its pairs."""

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)


@dataclass(frozen=True)
class TreeBatch:
    """Packed trees and the pairs to score."""

    input_ids_1T: Tensor
    position_ids_1T: Tensor
    row_layout: RowLayout
    positions_U: Tensor
    pair_position_M: Tensor
    """Into positions_U, ascending."""
    pair_token_M: Tensor
    pair_counts_U: tuple[int, ...]
    """Pairs that each of positions_U has."""
    paths: tuple[tuple[tuple[int, ...], ...], ...]
    """For each row and each of its answers, its pairs among M."""
    answers: tuple[int, ...]
    label_tokens: tuple[int, ...]
    """Label tokens of each row's right answer, the last ones of its path."""

    @property
    def tokens(self) -> int:
        """Tokens that the model computes."""
        return self.input_ids_1T.shape[1]


def tree_batches(
    rows: Iterable[EncodedRow], *, capacity: int, device: torch.device | str = "cpu"
) -> Iterator[TreeBatch]:
    """Batches of at most `capacity` tokens (a longer tree stands alone). Trees of like shape share an attention call."""
    for batch in _batches(rows, capacity):
        yield _collate(batch, device)


def largest_batch(rows: Iterable[EncodedRow], *, capacity: int) -> list[EncodedRow]:
    """The rows of the batch of `tree_batches` that computes most tokens."""
    batches = list(_batches(rows, capacity))
    return [tree.row for tree in max(batches, key=lambda batch: sum(tree.length for tree in batch))]


def _batches(rows: Iterable[EncodedRow], capacity: int) -> Iterator[list[_Tree]]:
    batch: list[_Tree] = []
    tokens = 0
    for tree in sorted((_tree(row) for row in rows), key=lambda t: (-t.length, t.parents)):
        if batch and tokens + tree.length > capacity:
            yield batch
            batch, tokens = [], 0
        batch.append(tree)
        tokens += tree.length
    if batch:
        yield batch


def shared_tokens(row: EncodedRow) -> int:
    """Tokens that stand before all answers of a row and are not scored.

    Every label token is scored, also one that all answers share, so that the loss comes out of the same forward.
    """
    assert row.choices is not None
    same = next((i for i, tokens in enumerate(zip(*row.choices, strict=False)) if len(set(tokens)) > 1), None)
    shared = min(map(len, row.choices)) - 1 if same is None else same
    return min(shared, int(row.is_label.argmax()))


def _tree(row: EncodedRow) -> _Tree:
    assert row.choices is not None
    shared = shared_tokens(row)
    inner: dict[tuple[int, ...], int] = {(): -1}
    tokens: list[int] = []
    parents: list[int] = []
    pairs: dict[tuple[int, int], int] = {}
    paths = []
    for answer in row.choices:
        suffix = answer[shared:]
        for depth in range(1, len(suffix)):
            node = suffix[:depth]
            if node not in inner:
                inner[node] = len(tokens)
                tokens.append(suffix[depth - 1])
                parents.append(inner[node[:-1]])
        path = [(inner[suffix[:depth]], suffix[depth]) for depth in range(len(suffix))]
        for pair in path:
            pairs.setdefault(pair, len(pairs))
        paths.append(path)
    ordered = sorted(pairs)
    index = {pair: i for i, pair in enumerate(ordered)}
    return _Tree(
        row, row.choices[0][:shared], tuple(tokens), tuple(parents), tuple(ordered),
        tuple(tuple(index[pair] for pair in path) for path in paths),
    )  # fmt: skip


def _collate(trees: Sequence[_Tree], device: torch.device | str) -> TreeBatch:
    ids: list[int] = []
    positions: list[int] = []
    predictors: list[int] = []
    counts: list[int] = []
    pair_position: list[int] = []
    pair_token: list[int] = []
    paths = []
    groups = []
    first = 0  # of the run of trees that share a shape
    for number, tree in enumerate(trees):
        start, prompt = len(ids), len(tree.prompt)
        ids += [*tree.prompt, *tree.tokens]
        depths: list[int] = []
        for parent in tree.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        positions += [*range(prompt), *(prompt + depth for depth in depths)]
        done = len(pair_token)
        before = None
        for parent, token in tree.pairs:
            if parent != before:
                predictors.append(start + prompt + parent)  # parent -1 is the prompt's last token
                counts.append(0)
                before = parent
            counts[-1] += 1
            pair_position.append(len(predictors) - 1)
            pair_token.append(token)
        paths.append(tuple(tuple(done + pair for pair in path) for path in tree.paths))
        following = trees[number + 1] if number + 1 < len(trees) else None
        if following is None or (len(following.prompt), following.parents) != (prompt, tree.parents):
            rows = number + 1 - first
            groups.append(tree_group(len(ids) - rows * tree.length, rows, _mask(prompt, tree.parents, device)))
            first = number + 1
    return TreeBatch(
        input_ids_1T=torch.tensor([ids], device=device),
        position_ids_1T=torch.tensor([positions], device=device),
        row_layout=tuple(groups),
        positions_U=torch.tensor(predictors, device=device),
        pair_position_M=torch.tensor(pair_position, device=device),
        pair_token_M=torch.tensor(pair_token, device=device),
        pair_counts_U=tuple(counts),
        paths=tuple(paths),
        answers=tuple(tree.row.answer for tree in trees),
        label_tokens=tuple(tree.row.label_tokens for tree in trees),
    )


def _mask(prompt: int, parents: Sequence[int], device: torch.device | str) -> Tensor:
    """[L, L]: the prompt is causal; a token of the tree sees the prompt, its ancestors and itself."""
    length = prompt + len(parents)
    mask = [[column <= row for column in range(length)] for row in range(prompt)]
    for node, parent in enumerate(parents):
        above = [column < prompt for column in range(length)] if parent < 0 else list(mask[prompt + parent])
        above[prompt + node] = True
        mask.append(above)
    return torch.tensor(mask, device=device)
