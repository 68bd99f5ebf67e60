"""Tensors that wait outside: what comes back is what was put, in any order; nothing is left behind."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from snugtune.memory import offload, recompute
from snugtune.memory.offload import Shelf
from snugtune.planner.live import LiveBytes


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    gc.collect()
    assert not offload._places, "data waits that nobody can ask for"


@settings(max_examples=30, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 7), min_size=0, max_size=3), min_size=1, max_size=6),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), seed=st.integers(0, 99), backwards=st.booleans(),
)  # fmt: skip
def test_what_comes_back_is_what_was_put(shapes: list[list[int]], dtype: torch.dtype, seed: int, backwards: bool):
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    shelf = Shelf()
    waiting = [shelf.put(x) for x in tensors]
    order = list(range(len(tensors)))
    for i in reversed(order) if backwards else order:
        back = shelf.get(waiting[i])
        assert (back.dtype == dtype and back.data_ptr() != tensors[i].data_ptr()) or not back.numel()
        assert torch.equal(back, tensors[i])


def test_a_tensor_that_is_not_contiguous_comes_back_whole():
    x = torch.arange(12.0).view(3, 4).t()
    shelf = Shelf()
    waiting = shelf.put(x)
    assert torch.equal(shelf.get(waiting), x)


def test_its_memory_is_free_while_it_waits_and_the_next_is_fetched_ahead():
    shelf, size = Shelf(), 4 * 1000
    with LiveBytes() as live:
        waiting = []
        for _ in range(5):
            x = torch.ones(1000)
            waiting.append(shelf.put(x))
            del x
        assert live.live_bytes == size, "the last one is on its way, the others are gone"
        back = shelf.get(waiting.pop())
        assert live.live_bytes == 2 * size, "the one that was asked for, and the next"
        del back
        shelf.get(waiting.pop())
        assert live.live_bytes == size


def test_parts_of_the_file_are_used_again():
    shelf = Shelf()
    shelf.get(shelf.put(torch.ones(333)))
    end = offload._file[0].end
    for _ in range(3):
        shelf.get(shelf.put(torch.ones(333)))
    assert offload._file[0].end == end


def test_a_graph_that_is_dropped_takes_what_waits_along():
    shelf, linear = Shelf(), nn.Linear(4, 4)
    y = recompute.recompute(linear, torch.ones(2, 4), random=False, shelf=shelf)
    del y
    gc.collect()
    z = recompute.recompute(linear, torch.ones(2, 4), random=False, shelf=shelf)
    z.sum().backward()
    assert linear.weight.grad is not None


def test_gradients_are_those_of_a_recompute_that_keeps_its_input():
    def gradients(shelf: Shelf | None) -> list[Tensor]:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3)) for _ in range(4)]
        x = torch.randn(5, 8, requires_grad=True)
        h = x
        for block in blocks:
            h = recompute.recompute(block, h, shelf=shelf)
        h.square().sum().backward()
        assert x.grad is not None
        return [x.grad, *(p.grad for block in blocks for p in block.parameters() if p.grad is not None)]

    for got, expected in zip(gradients(Shelf()), gradients(None), strict=True):
        assert torch.equal(got, expected)
