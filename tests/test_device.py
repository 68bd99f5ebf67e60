"""The wall is real: a process that asks for more than its budget gets an exception and stays below it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from snugtune import device

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_DATA holds on Linux only")
SPEC = device.DeviceSpec("cpu", "test", 1 << 40, has_bf16=False)
GREEDY = """
from snugtune import device
spec = device.DeviceSpec("cpu", "test", 1 << 40, has_bf16=False)
budget = device.resident_bytes() + (200 << 20)
device.set_wall(spec, budget)
kept = []
try:
    for _ in range(400):
        kept.append(bytearray(b"x") * (1 << 20))
    print("no wall")
except MemoryError as error:
    taken = len(kept)
    del kept
    print(device.is_out_of_memory(error), 100 <= taken <= 200, device.peak_bytes(spec) <= budget)
device.take_down_wall(spec)
print(len(bytearray(400 << 20)) >> 20)
"""


@linux
def test_the_wall_refuses_what_is_over_the_budget_and_can_be_taken_down():
    done = subprocess.run([sys.executable, "-c", GREEDY], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "True", "400"]


@linux
def test_the_peak_is_what_the_kernel_saw():
    before = device.peak_bytes(SPEC)
    held = bytearray(b"x") * (64 << 20)
    assert device.peak_bytes(SPEC) >= max(before, len(held))


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (MemoryError(), True),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
            ),
            True,
        ),
        (RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"), True),
        (RuntimeError("shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_out_of_memory_is_told_from_other_errors(error, verdict):
    assert device.is_out_of_memory(error) is verdict


def test_restart_is_asked_for_once(monkeypatch):
    monkeypatch.setenv("SNUGTUNE_ALLOCATOR", "mimalloc")
    monkeypatch.setattr(device.os, "execve", lambda *a: pytest.fail("restarted again"))
    device.restart_on_mimalloc()


SHAPES = """
import torch
from snugtune import device
device.detect("cpu")
weight = torch.randn(1536, 576).bfloat16()
sizes = []
for tokens in range(500, 620):
    x = torch.randn(tokens, 576).bfloat16()
    (x @ weight.t()) @ weight
    sizes.append(device.resident_bytes() >> 20)
print(sizes[-1] - sizes[79])
"""


@linux
def test_products_in_16_bits_of_ever_new_shapes_do_not_grow_the_process():
    """oneDNN keeps what it prepared for each shape: without a limit, 40 more shapes cost 90 MiB on a CPU with AMX."""
    done = subprocess.run([sys.executable, "-c", SHAPES], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 20
