"""Every storage is seen, and a sum of gradients counts as autograd will really make it: in place."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

import tiny
from snugtune import step
from snugtune.data.pack import collate
from snugtune.models import load
from snugtune.planner.live import LiveBytes

_BESIDES = 16 << 10
"""What the mode counts as new and was there: label positions, rotary frequencies."""


def _gradient(method: str, recompute: str, **shape):
    torch.manual_seed(0)
    recipe = tiny.recipe(what={"method": method}, how={"recompute": recompute, "loss_chunk_tokens": 16})
    model = load.shell(tiny.config("llama-tied", **shape), torch.float32).requires_grad_(False)
    built = step.build(recipe, model)
    batch = collate(tiny.rows([30, 28, 27]))
    return built, lambda: built.forward_backward(batch, label_tokens=1)


def _allocated_peak(run) -> int:
    """From torch's own allocation events, without any dispatch mode."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


# A head and embedding that are one: their gradients are added up, and in the wide one that is the peak.
@pytest.mark.parametrize("shape", [{}, {"vocab_size": 4096, "hidden_size": 64}], ids=["narrow", "wide vocabulary"])
@pytest.mark.parametrize("recompute", ["none", "selective", "block"])
@pytest.mark.parametrize("method", ["lora", "full"])
def test_the_peak_is_what_torch_allocates_without_the_mode(method, recompute, shape):
    built, run = _gradient(method, recompute, **shape)
    for turn in ("first", "into gradients that are there"):
        if turn == "first":
            built.drop_gradients()
        real = _allocated_peak(run)
        built.drop_gradients() if turn == "first" else None
        with LiveBytes() as live:
            live.note([*built.model.parameters(), *built.model.buffers()])
            live.note([p.grad for p in built.trainable if p.grad is not None])
            live.begin()
            before = live.live_bytes
            run()
            live.settle()
        assert 0 <= live.peak_bytes - before - real <= _BESIDES, turn


def test_kinds_and_source_lines_of_what_is_alive():
    with FakeTensorMode(allow_non_fake_inputs=True):
        built, run = _gradient("lora", "none")
        with LiveBytes(tell=True) as live:
            names = [name for name, _ in built.model.named_parameters()]
            live.note([*built.model.parameters()], "weights", names)
            live.begin()
            run()
            live.settle()
            found = live.describe(live.at_peak())
    weights = [alive for alive in found if alive.kind == "weights"]
    assert sum(alive.size_bytes for alive in weights) == sum(p.nbytes for p in built.model.parameters())
    assert "model.embed_tokens.weight" in {alive.made_by for alive in weights}
    made_here = [alive for alive in found if alive.kind == "activations"]
    assert all(alive.where.startswith(("snugtune/", "transformers/")) and alive.made_by for alive in made_here)
    assert [alive.size_bytes for alive in found] == sorted((a.size_bytes for a in found), reverse=True)
    assert sum(alive.size_bytes for alive in found) == live.peak_live_bytes


def test_the_losss_own_storages_are_told_apart():
    with FakeTensorMode(allow_non_fake_inputs=True):
        built, run = _gradient("lora", "block", vocab_size=8192)
        with LiveBytes(tell=True) as live:
            live.note([*built.model.parameters()], "weights")
            live.begin()
            run()
            live.settle()
            kinds = {alive.kind for alive in live.describe(live.at_peak())}
    assert "loss" in kinds


def test_what_is_in_another_memory_is_left_out():
    with LiveBytes() as live:
        here, elsewhere = torch.zeros(100), torch.zeros(50)
        live.ignore([elsewhere])
        live.begin()
        assert (live.live_bytes, live.peak_bytes) == (400, 400)
        del elsewhere
        assert live.live_bytes == 400
        del here
        assert live.live_bytes == 0


class _Recorder:
    def __init__(self):
        self.blocks, self.log = {}, []

    @property
    def reserved_bytes(self):
        return sum(self.blocks.values())

    def allocate(self, key, size):
        assert key not in self.blocks
        self.blocks[key] = size
        self.log.append(size)

    def free(self, key):
        self.log.append(-self.blocks.pop(key))

    def empty_cache(self):
        self.log.append("empty")


def test_an_allocator_is_driven_by_births_and_deaths():
    blocks = _Recorder()
    with LiveBytes(blocks=blocks) as live:
        x = torch.zeros(100)
        y = x + 1
        torch.empty(0)
        del x
        live.release()
        assert blocks.log == [400, 400, -400, "empty"]
        assert live.in_use_bytes == 400
        del y
    assert not blocks.blocks


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_every_block_that_the_allocator_gave_is_given_back(recompute):
    blocks = _Recorder()
    with FakeTensorMode(allow_non_fake_inputs=True):
        built, run = _gradient("full", recompute)
        with LiveBytes(blocks=blocks) as live:
            live.note([*built.model.parameters(), *built.model.buffers()])
            start = blocks.reserved_bytes
            for _ in range(2):
                run()
            built.drop_gradients()
            live.settle()
            assert blocks.reserved_bytes == live.live_bytes
            assert blocks.reserved_bytes - start <= _BESIDES
