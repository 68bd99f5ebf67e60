"""Time the real step on this machine, a few blocks deep.

What a CPU reaches depends on its caches, its other users and the shapes at hand, which no roofline knows; a few blocks of
the very model, trained for real on the typical micro-batch, do. Seconds are linear in the number of blocks.
"""

from __future__ import annotations

import time
from statistics import median

import torch
from transformers import PretrainedConfig

from snugtune import step
from snugtune.data.pack import collate
from snugtune.models import load
from snugtune.planner.search import Plan
from snugtune.planner.simulate import of_depth

DEPTHS = (2, 6)
"""The farther apart, the less a disturbance of one of them is multiplied."""
MOST_SECONDS = 6.0
"""A probe that would take longer is not made."""
_RUNS = 4
"""Timed of each depth, in turns, after one that prepares kernels; the medians count."""


def speed_factor(plan: Plan, config: PretrainedConfig, dtype: torch.dtype) -> float | None:
    """Measured over predicted speed of `plan` on this machine; None where finding it out would take too long.

    The probe's memory is below that of the run: fewer blocks, the same batch.
    """
    predicted = plan.gradient_seconds
    depth = config.num_hidden_layers
    if depth <= DEPTHS[1] or predicted * sum(DEPTHS) / depth * (_RUNS + 1) > MOST_SECONDS:
        return None
    batch = collate(plan.batches.work.typical)
    with torch.random.fork_rng(devices=[]):
        steps = [_shallow(plan, of_depth(config, d), dtype) for d in DEPTHS]
        seconds: tuple[list[float], list[float]] = ([], [])
        for run in range(_RUNS + 1):
            for built, taken in zip(steps, seconds, strict=True):
                started = time.perf_counter()
                built.forward_backward(batch, label_tokens=1)
                if run:
                    taken.append(time.perf_counter() - started)
    shallow, deeper = (median(taken) for taken in seconds)
    per_block = max(deeper - shallow, 0.0) / (DEPTHS[1] - DEPTHS[0])
    return predicted / (shallow + per_block * (depth - DEPTHS[0]))


def _shallow(plan: Plan, config: PretrainedConfig, dtype: torch.dtype) -> step.Step:
    what = plan.recipe.what
    model = load.shell(config, step.stored_dtype(what, dtype), packing=step.packing(what))
    return step.build(plan.recipe, model.requires_grad_(False))
