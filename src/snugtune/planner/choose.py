"""Choose `how` so that the run stays inside its budget: the fastest way whose predicted peak fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from snugtune.data.choices import largest_batch
from snugtune.data.dataset import Dataset
from snugtune.data.encode import EncodedRow
from snugtune.data.pack import global_batches, pack
from snugtune.device import Allocator, DeviceSpec
from snugtune.errors import DoesNotFit
from snugtune.planner.simulate import Profile, Work, simulate
from snugtune.recipe import How, Recipe
from snugtune.step import DEFAULT_CHUNK_TOKENS, SHARD_BYTES
from snugtune.units import MIB, format_bytes

MICRO_BATCH_TOKENS = (4096, 2048, 1024, 512, 256, 128)
"""Tried from the largest on. Below 256 tokens the products get too small to be fast, so recompute is tried before that."""
_FAST_TOKENS = 256

CODE_BYTES = 32 * MIB
"""Pages of libraries that a run reads in after planning (measured on Linux x86-64, torch 2.13: 22 to 30 MiB)."""
KERNEL_BYTES = 40 * MIB
"""Scratch of matrix products and attention inside their kernels, and thread stacks (same machine, float32: 0 to 60 MiB)."""


@dataclass(frozen=True)
class Plan:
    """A resolved recipe with what it is predicted to need."""

    recipe: Recipe
    device: DeviceSpec
    budget_bytes: int
    phases: dict[str, int]
    """Predicted peak in bytes by phase: load, step, evaluate, save."""
    worst_rows: int
    worst_tokens: int
    """The largest micro-batch that this data will really produce."""

    reserve_bytes: int
    """What has to stay free under the wall besides."""

    @property
    def peak_bytes(self) -> int:
        """The largest phase."""
        return max(self.phases.values())

    @property
    def needed_bytes(self) -> int:
        """The smallest budget that holds it."""
        return self.peak_bytes + self.reserve_bytes

    @property
    def fits(self) -> bool:
        """Whether it stays inside the budget."""
        return self.needed_bytes <= self.budget_bytes

    def as_json(self) -> dict[str, Any]:
        """The plan as `plan.json` holds it, with the contract's keys."""
        return {
            "fits": self.fits, "budget_bytes": self.budget_bytes, "device": asdict(self.device),
            "phases": {name: {"peak_bytes": peak} for name, peak in self.phases.items()}, "peak_bytes": self.peak_bytes,
            "worst_micro_batch": {"rows": self.worst_rows, "tokens": self.worst_tokens},
            "recipe": self.recipe.model_dump(mode="json"),
        }  # fmt: skip


@dataclass(frozen=True)
class Surroundings:
    """What the process holds before anything of the run is in memory."""

    device: DeviceSpec
    allocator: Allocator
    resident_bytes: int

    def peak(self, live_bytes: int, weights_bytes: int, *, scratch_bytes: int = 0) -> int:
        """Peak of the device's memory for so many live bytes, `weights_bytes` of which are the loaded model."""
        if self.device.kind == "cuda":
            return live_bytes
        besides = self.resident_bytes + CODE_BYTES + scratch_bytes
        return besides + weights_bytes + round((live_bytes - weights_bytes) * self.allocator.overhead)

    def reserve(self, changing_bytes: int) -> int:
        """What the allocator maps and does not touch, for so many bytes that come and go: the wall counts it."""
        if self.device.kind == "cuda":
            return 0
        return self.allocator.reserve_bytes + round(changing_bytes * self.allocator.reserve_share)


def choose(
    recipe: Recipe, config: PretrainedConfig, data: Dataset, around: Surroundings, *, dtype: torch.dtype,
    budget_bytes: int,
) -> Plan:  # fmt: skip
    """The first way, fastest first, that is predicted to fit.

    Raises:
        DoesNotFit: where none does; the message has the smallest budget that would do.
    """
    seen = []
    for plan in ways(recipe, config, data, around, dtype=dtype, budget_bytes=budget_bytes):
        if plan.fits:
            return plan
        seen.append(plan)
    raise refusal(seen)


def ways(
    recipe: Recipe, config: PretrainedConfig, data: Dataset, around: Surroundings, *, dtype: torch.dtype,
    budget_bytes: int,
) -> Iterator[Plan]:  # fmt: skip
    """A plan for every way to run that the recipe leaves open, fastest first, whether it fits or not.

    Of ways with the same largest batches, which differ in nothing, only the first is given.
    """
    done: set[tuple[Any, ...]] = set()
    for how in _ways(recipe.how):
        resolved = recipe.model_copy(update={"how": how})
        work, worst = _largest_batches(resolved, data)
        key = (how.recompute, how.loss_chunk_tokens, tuple(r.where for r in worst))
        if key not in done:
            done.add(key)
            yield _plan(resolved, simulate(resolved, config, work, dtype=dtype), around, budget_bytes, worst)


def refusal(plans: Sequence[Plan]) -> DoesNotFit:
    """What to say when none of `plans` fits: the smallest budget that would do."""
    smallest = min(plans, key=lambda plan: plan.needed_bytes)
    budget_bytes = smallest.budget_bytes
    needed = -(-smallest.needed_bytes // MIB) * MIB
    phase = max(smallest.phases, key=smallest.phases.__getitem__)
    how = smallest.recipe.how
    return DoesNotFit(
        f"this does not fit {format_bytes(budget_bytes)}: the smallest budget that holds it is {needed / (1 << 30):.2f} GiB "
        f"({needed // MIB} MiB), with how.recompute={how.recompute} and how.micro_batch_tokens={how.micro_batch_tokens}; "
        f"the {phase} phase of that is short by {format_bytes(needed - budget_bytes)}. "
        f"Set --budget {needed // MIB}MiB, or take a smaller model or a shorter what.max_length",
        smallest_bytes=needed,
    )


def _ways(how: How) -> Iterator[How]:
    """Every `how` that the recipe leaves open, fastest first: keeping activations beats running blocks twice."""
    recomputes = [how.recompute] if how.recompute else ["none", "block"]
    for recompute in recomputes:
        sizes: Sequence[int] = [how.micro_batch_tokens] if how.micro_batch_tokens else MICRO_BATCH_TOKENS
        for tokens in sizes:
            if recompute == "none" and tokens < _FAST_TOKENS and len(recomputes) > 1 and len(sizes) > 1:
                continue
            yield how.model_copy(update={
                "recompute": recompute, "micro_batch_tokens": tokens,
                "loss_chunk_tokens": how.loss_chunk_tokens or min(tokens, DEFAULT_CHUNK_TOKENS),
            })  # fmt: skip


def _largest_batches(recipe: Recipe, data: Dataset) -> tuple[Work, tuple[EncodedRow, ...]]:
    """The micro-batch with most tokens and the one with most label tokens, of all that this run will see."""
    capacity = recipe.how.micro_batch_tokens
    assert capacity is not None
    lengths = [row.tokens for row in data.train]
    labels = [row.label_tokens for row in data.train]
    most_tokens: list[int] = []
    most_labels: list[int] = []
    for batch in global_batches(recipe.what, len(data.train)):
        for part in pack([lengths[i] for i in batch], capacity=capacity):
            rows = [batch[i] for i in part]
            most_tokens = max(most_tokens, rows, key=lambda r: sum(lengths[i] for i in r))
            most_labels = max(most_labels, rows, key=lambda r: sum(labels[i] for i in r))
    worst = tuple(data.train[i] for i in most_tokens)
    micro_batches = [worst]
    if most_labels != most_tokens:
        micro_batches.append(tuple(data.train[i] for i in most_labels))
    return Work(tuple(micro_batches), tuple(_largest_eval_batches(data, capacity)), capacity), worst


def _largest_eval_batches(data: Dataset, capacity: int) -> Iterator[tuple[EncodedRow, ...]]:
    branching = [row for row in data.held_out if row.choices]
    plain = [row for row in data.held_out if not row.choices]
    if branching:
        yield tuple(largest_batch(branching, capacity=capacity))
    if plain:
        parts = pack([row.tokens for row in plain], capacity=capacity)
        yield tuple(plain[i] for i in max(parts, key=lambda part: sum(plain[i].tokens for i in part)))


def _plan(
    recipe: Recipe, profile: Profile, around: Surroundings, budget_bytes: int, worst: Sequence[EncodedRow]
) -> Plan:
    weights, scratch = profile.weights, KERNEL_BYTES + profile.reordered
    return Plan(
        recipe=recipe,
        device=around.device,
        budget_bytes=budget_bytes,
        phases={
            "load": around.peak(weights, weights),
            "step": around.peak(max(profile.gradient, profile.update), weights, scratch_bytes=scratch),
            "evaluate": around.peak(profile.evaluate, weights, scratch_bytes=scratch),
            # A file's tensors are serialised together before they are written.
            "save": around.peak(profile.built + min(profile.trained, SHARD_BYTES), weights),
        },
        worst_rows=len(worst),
        worst_tokens=sum(row.tokens for row in worst),
        reserve_bytes=around.reserve(max(profile.gradient, profile.update, profile.evaluate) - weights),
    )
