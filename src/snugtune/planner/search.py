"""Choose `how` so that the run stays inside its budget: the ladder of ways that fit, fastest first, and why others do not.

A way is a recompute policy, a micro-batch size, an optimiser and, where the recipe leaves it open, the base's storage.
Bytes only grow with the micro-batch, so that of each kind of way the largest one that fits is found by halving.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any, Literal

import torch
from transformers import PretrainedConfig

from snugtune.adapters.merge import SHARD_BYTES, TRANSIENT_BYTES
from snugtune.cards import DeviceSpec
from snugtune.data.choices import largest_batch
from snugtune.data.dataset import Dataset
from snugtune.data.encode import EncodedRow
from snugtune.data.pack import computed_tokens, global_batches, micro_batches, pack, padded
from snugtune.device import CUDA_CONTEXT_BYTES, Allocator
from snugtune.errors import DoesNotFit, RecipeError
from snugtune.models.load import DTYPES
from snugtune.planner import allocator as cuda
from snugtune.planner.live import Alive
from snugtune.planner.simulate import Means, Micro, Profile, Work, contents, simulate
from snugtune.planner.speed import Rates
from snugtune.recipe import Recipe
from snugtune.step import DEFAULT_CHUNK_TOKENS
from snugtune.units import MIB, format_bytes

MICRO_BATCH_TOKENS = (4096, 2048, 1024, 512, 256, 128)
"""Sizes of micro-batches that are looked at."""
LADDER_STEPS = 3
"""Of each kind of way so many sizes stand on the ladder: the largest that fits and the next smaller ones."""

CODE_BYTES = 32 * MIB
"""Pages of libraries that a run reads in after planning (measured on Linux x86-64, torch 2.13: 22 to 30 MiB)."""
KERNEL_BYTES = 40 * MIB
"""Scratch of matrix products and attention inside their kernels, and thread stacks (same machine, float32: 0 to 60 MiB)."""

KERNEL_BYTES_16 = 24 * MIB
"""More of it where products are in 16 bits: what oneDNN keeps for each shape (device.py limits how many)."""

RESERVE_BYTES_16 = 32 * MIB
"""What oneDNN maps for 16-bit products and does not touch: without it a run that was predicted 0.5 % below its peak hit the wall."""


@dataclass(frozen=True)
class Plan:
    """A resolved recipe with what it is predicted to need."""

    recipe: Recipe
    device: DeviceSpec
    budget_bytes: int
    phases: dict[str, int]
    """Predicted peak in bytes by phase: load, step, evaluate, save, merge."""
    reserve_bytes: int
    """What has to stay free under the wall besides."""
    step_seconds: float
    """Predicted time of one optimiser step, its micro-batches and the update."""
    tokens_per_second: float
    gradient_seconds: float
    """Of that, forward and backward of one micro-batch, a mean one."""
    batches: Batches
    profile: Profile
    speed_factor: float = 1.0
    """By what the speeds were multiplied, after timing this machine."""

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

    @property
    def limiting_phase(self) -> str:
        """The phase with the largest peak."""
        return max(self.phases, key=self.phases.__getitem__)

    def faster_by(self, factor: float) -> Plan:
        """The same plan where everything takes 1 / `factor` of the time."""
        return replace(
            self, step_seconds=self.step_seconds / factor, tokens_per_second=self.tokens_per_second * factor,
            gradient_seconds=self.gradient_seconds / factor, speed_factor=self.speed_factor * factor,
        )  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        """The plan as `plan.json` holds it, with the contract's keys."""
        return {
            "fits": self.fits, "budget_bytes": self.budget_bytes, "device": asdict(self.device),
            "phases": {name: {"peak_bytes": peak} for name, peak in self.phases.items()}, "peak_bytes": self.peak_bytes,
            "needed_bytes": self.needed_bytes,
            "worst_micro_batch": {"rows": len(self.batches.worst), "tokens": self.batches.worst_tokens},
            "step_seconds": self.step_seconds, "tokens_per_second": self.tokens_per_second,
            "uncalibrated_tokens_per_second": self.tokens_per_second / self.speed_factor,
            "recipe": self.recipe.model_dump(mode="json"),
        }  # fmt: skip


@dataclass(frozen=True)
class Ladder:
    """Every way that was looked at."""

    plans: tuple[Plan, ...]
    """Those that fit, fastest first. The first is what `train` takes."""
    too_large: tuple[Plan, ...]
    """Those that do not."""
    contents: dict[str, list[Alive]]
    """What is alive at the chosen plan's peaks of step and evaluation, largest first; every block of the model in it."""
    asked: Recipe
    """What the user left open in it was chosen."""

    @property
    def chosen(self) -> Plan:
        """The fastest that fits. Raises DoesNotFit where none does, with the smallest budget that would."""
        if not self.plans:
            raise refusal(self.too_large)
        return self.plans[0]

    def faster_by(self, factor: float) -> Ladder:
        """The same ladder on a device that is `factor` times as fast."""
        return replace(
            self,
            plans=tuple(plan.faster_by(factor) for plan in self.plans),
            too_large=tuple(plan.faster_by(factor) for plan in self.too_large),
        )

    def as_json(self) -> dict[str, Any]:
        """The chosen plan's keys, and the ladder."""
        steps = [
            {"recipe": plan.recipe.model_dump(mode="json"), "peak_bytes": plan.peak_bytes, "step_seconds": plan.step_seconds,
             "tokens_per_second": plan.tokens_per_second}
            for plan in self.plans
        ]  # fmt: skip
        short = [
            {"recipe": plan.recipe.model_dump(mode="json"), "peak_bytes": plan.peak_bytes, "needed_bytes": plan.needed_bytes,
             "phase": plan.limiting_phase, "short_by_bytes": plan.needed_bytes - plan.budget_bytes}
            for plan in self.too_large
        ]  # fmt: skip
        return self.chosen.as_json() | {"ladder": steps, "too_large": short}


@dataclass(frozen=True)
class Surroundings:
    """The device, what the process holds before anything of the run is in memory, and how fast all of it is."""

    device: DeviceSpec
    allocator: Allocator
    resident_bytes: int
    rates: Rates

    def means(self, dtype: torch.dtype) -> Means:
        """What the simulation needs to know of the device."""
        blocks = cuda.CudaAllocator if self.device.kind == "cuda" else lambda: None
        return Means(dtype, blocks, self.rates.price, self.device.kind)

    def peak(self, in_use_bytes: int, kept_bytes: int, *, scratch_bytes: int = 0) -> int:
        """Peak of the device's memory for so much in use, `kept_bytes` of which do not come and go."""
        if self.device.kind == "cuda":
            workspaces = cuda.CUBLAS_HANDLES * cuda.cublas_workspace_bytes(self.device.compute_capability or (0, 0))
            return in_use_bytes + workspaces + CUDA_CONTEXT_BYTES
        besides = self.resident_bytes + CODE_BYTES + scratch_bytes
        return besides + kept_bytes + self.allocator.resident_bytes(in_use_bytes - kept_bytes)

    def reserve(self, changing_bytes: int, dtype: torch.dtype) -> int:
        """What is mapped and not touched where so many bytes come and go: the wall counts it."""
        if self.device.kind == "cuda":
            return 0
        kernels = RESERVE_BYTES_16 if dtype.itemsize == 2 else 0
        return self.allocator.reserve_bytes + round(changing_bytes * self.allocator.reserve_share) + kernels


@dataclass(frozen=True)
class Run:
    """What is to be planned."""

    asked: Recipe
    """As the user wrote it."""
    recipe: Recipe
    """Its `what` resolved but for `base: auto`."""
    config: PretrainedConfig
    data: Dataset
    dtype: torch.dtype
    budget_bytes: int


def search(run: Run, around: Surroundings, *, goal: Literal["ladder", "winner"] = "ladder") -> Ladder:
    """The ways that the recipe leaves open. What the result may depend on is given up last.

    For the winner alone less is looked at: of each kind the largest that fits, and on a CPU, where two and three blocks
    tell all of them exactly, not the whole depth.

    A base in 4 bits is looked at where none in the compute precision fits, updates in the backward where none after it
    does, moments in 8 bits where none in float32 does; so that more memory is never slower for one and the same base and optimiser, and never coarser.
    """
    too_large: list[Plan] = []
    sizes = _distinct_sizes(run)
    steps = LADDER_STEPS if goal == "ladder" else 1
    for storage in _storages(run, around.device):
        fitting: list[Plan] = []
        cuts = _one_a_step(run) if storage.how.update == "in_backward" else sizes
        if not cuts:
            continue
        kinds = [_Kind(recipe, run, around, cuts, steps) for recipe in _kinds(run, storage)]
        *usual, last = kinds
        if usual and (usual[0].largest.fits or usual[-1].leanest.fits):
            kinds = usual
        elif usual:
            # Offload takes the host's memory and the way there: for what nothing else holds.
            too_large.append(usual[-1].leanest)
            kinds = [last]
        if not kinds[0].largest.fits and not kinds[-1].leanest.fits:
            too_large.append(kinds[-1].leanest)
            continue  # whatever recomputes less needs more
        for kind in kinds:
            fits, short = kind.search()
            fitting += fits
            too_large += short
            if fits and not short:
                break  # the largest micro-batch fits: recomputing more can only be slower
        while fitting:
            fitting.sort(key=lambda plan: -plan.tokens_per_second)
            if goal == "winner" and around.device.kind == "cpu":
                return Ladder(tuple(fitting), tuple(too_large), {}, run.asked)
            whole, alive = _whole(fitting[0], run, around)
            if whole.fits:
                return Ladder((whole, *fitting[1:]), tuple(too_large), alive, run.asked)
            too_large.append(whole)
            del fitting[0]
    return Ladder((), tuple(too_large), {}, run.asked)


def refusal(plans: Sequence[Plan]) -> DoesNotFit:
    """What to say when none of `plans` fits: the smallest budget that would do, and with what."""
    smallest = min(plans, key=lambda plan: plan.needed_bytes)
    budget_bytes = smallest.budget_bytes
    needed = -(-smallest.needed_bytes // MIB) * MIB
    return DoesNotFit(
        f"this does not fit {format_bytes(budget_bytes)}: the smallest budget that holds it is {needed / (1 << 30):.2f} GiB "
        f"({needed // MIB} MiB), with {describe(smallest.recipe)}; "
        f"the {smallest.limiting_phase} phase of that is short by {format_bytes(needed - budget_bytes)}. "
        f"Set --budget {needed // MIB}MiB, or take {_lighter(smallest.recipe)}",
        smallest_bytes=needed,
    )


def describe(recipe: Recipe) -> str:
    """The way in the recipe's own keys."""
    how = recipe.how
    text = f"what.base={recipe.what.base}, how.recompute={how.recompute} and how.micro_batch_tokens={how.micro_batch_tokens}"
    for key, usual in (("optimizer", "adamw"), ("update", "after_backward")):
        if getattr(how, key) not in (None, usual):
            text += f", how.{key}={getattr(how, key)}"
    return text


def _lighter(recipe: Recipe) -> str:
    if recipe.what.method == "full":
        return "what.method=lora, or a smaller model"
    if recipe.what.base not in ("int4", "nf4"):
        return "what.base=int4, a smaller model or a shorter what.max_length"
    return "a smaller model or a shorter what.max_length"


def _storages(run: Run, device: DeviceSpec) -> Iterator[Recipe]:
    """Bases and optimisers that the recipe leaves open, exact ones first."""
    recipe, what, how = run.recipe, run.recipe.what, run.recipe.how
    if what.method == "full":
        exact = ["adamw", "adamw_host"] if device.kind == "cuda" else ["adamw"]
        for optimizers in ([how.optimizer],) if how.optimizer else (exact, ["adamw_8bit"]):
            for update in [how.update] if how.update else ["after_backward", "in_backward"]:
                for optimizer in optimizers:
                    yield recipe.model_copy(update={
                        "what": what.model_copy(update={"base": "fp32"}),
                        "how": how.model_copy(update={"optimizer": optimizer, "update": update}),
                    })  # fmt: skip
        return
    for base in _bases(run) if what.base == "auto" else [what.base]:
        yield recipe.model_copy(update={
            "what": what.model_copy(update={"base": base}),
            "how": how.model_copy(update={"optimizer": how.optimizer or "adamw", "update": how.update or "after_backward"}),
        })  # fmt: skip


def _bases(run: Run) -> list[str]:
    """The compute precision; the 16 bits that the model's files hold, which then lose nothing; 4 bits."""
    precision = run.recipe.what.precision
    stored = next((name for name, dtype in DTYPES.items() if dtype == run.config.dtype and dtype.itemsize == 2), None)
    return [precision, *([stored] if stored and precision == "fp32" else []), "int4"]


def _kinds(run: Run, recipe: Recipe) -> Iterator[Recipe]:
    for recompute in (
        [run.recipe.how.recompute] if run.recipe.how.recompute else ["none", "selective", "block", "offload"]
    ):
        yield recipe.model_copy(update={"how": recipe.how.model_copy(update={"recompute": recompute})})


def _distinct_sizes(run: Run) -> list[Batches]:
    """Largest first. Of sizes that cut the rows in the same way only the smallest is kept."""
    asked = run.recipe.how.micro_batch_tokens
    found: dict[Any, Batches] = {}
    for tokens in [asked] if asked else MICRO_BATCH_TOKENS:
        batches = Batches.of(run, tokens)
        found[batches.signature] = batches
    return list(found.values())


def _one_a_step(run: Run) -> list[Batches]:
    """The micro-batch that holds the largest global batch; none where the recipe asks for smaller ones."""
    asked, lengths = run.recipe.how.micro_batch_tokens, run.data.lengths
    batches = global_batches(run.recipe.what, len(lengths))
    needed = max(computed_tokens([lengths[i] for i in batch], run.recipe.how.batching) for batch in batches)
    if asked is None or asked >= needed:
        return [Batches.of(run, asked or needed)]
    if run.asked.how.update == "in_backward":
        raise RecipeError(
            f"how.update=in_backward needs each global batch in one micro-batch: set how.micro_batch_tokens to {needed} or more, "
            "or what.global_batch_rows to fewer"
        )
    return []


class _Kind:
    """Ways that differ in the size of their micro-batches alone."""

    def __init__(self, recipe: Recipe, run: Run, around: Surroundings, sizes: list[Batches], steps: int) -> None:
        self.recipe, self.run, self.around, self.sizes, self.steps = recipe, run, around, sizes, steps
        self.plans: dict[int, Plan] = {}

    def search(self) -> tuple[list[Plan], list[Plan]]:
        """(the largest that fits and the next smaller ones, those that were looked at and do not fit)."""
        too_large, first = -1, 0
        if not self.largest.fits:
            too_large, first = 0, len(self.sizes) - 1
            if not self.leanest.fits:
                return [], [self.leanest]
        while first - too_large > 1:
            middle = (first + too_large) // 2
            if self._plan(middle).fits:
                first = middle
            else:
                too_large = middle
        for index in range(first, min(first + self.steps, len(self.sizes))):
            self._plan(index)
        return [p for p in self.plans.values() if p.fits], [p for p in self.plans.values() if not p.fits]

    @property
    def largest(self) -> Plan:
        """With the largest micro-batches."""
        return self._plan(0)

    @property
    def leanest(self) -> Plan:
        """With the smallest micro-batches."""
        return self._plan(len(self.sizes) - 1)

    def _plan(self, index: int) -> Plan:
        if index not in self.plans:
            batches = self.sizes[index]
            how = self.recipe.how
            resolved = self.recipe.model_copy(update={"how": how.model_copy(update={
                "micro_batch_tokens": batches.capacity,
                "loss_chunk_tokens": how.loss_chunk_tokens or min(batches.capacity, DEFAULT_CHUNK_TOKENS),
            })})  # fmt: skip
            profile = simulate(resolved, self.run.config, batches.work, self.around.means(self.run.dtype))
            self.plans[index] = plan(resolved, batches, profile, self.run, self.around)
        return self.plans[index]


def _whole(chosen: Plan, run: Run, around: Surroundings) -> tuple[Plan, dict[str, list[Alive]]]:
    """The chosen plan again, from every block of the model, with what is alive at its peaks."""
    profile, alive = contents(chosen.recipe, run.config, chosen.batches.work, around.means(run.dtype))
    return plan(chosen.recipe, chosen.batches, profile, run, around), dict(alive)


@dataclass(frozen=True)
class Batches:
    """The micro-batches of a whole run, as far as a plan must know them."""

    capacity: int
    work: Work
    tokens_per_step: float
    micro_batches_per_step: float
    tokens_per_micro_batch: float

    @property
    def signature(self) -> Any:
        """Equal for sizes that cut the rows in the same way."""
        named = [
            tuple(row.where for row in rows) for rows in (*(m.rows for m in self.work.micro_batches), self.work.typical)
        ]
        return tuple(named), self.micro_batches_per_step

    @property
    def worst(self) -> tuple[EncodedRow, ...]:
        """The micro-batch with most tokens."""
        return self.work.micro_batches[0].rows

    @property
    def worst_tokens(self) -> int:
        """How many it has."""
        return self.work.micro_batches[0].tokens

    @classmethod
    def of(cls, run: Run, capacity: int) -> Batches:
        """Pack every global batch of the run, as the trainer will."""
        rows, lengths, labels = run.data.train, run.data.lengths, run.data.label_lengths
        batching = run.recipe.how.batching

        def computed(part: list[int]) -> tuple[EncodedRow, ...]:
            return tuple(padded([rows[i] for i in part], batching))

        parts: list[list[int]] = []
        batches = list(global_batches(run.recipe.what, len(rows)))
        first: list[int] = []
        for batch in batches:
            first.append(len(parts))
            cut = micro_batches([lengths[i] for i in batch], capacity=capacity, batching=batching)
            parts += [[batch[i] for i in part] for part in cut]
        tokens = [computed_tokens([lengths[i] for i in part], batching) for part in parts]
        label_tokens = [sum(labels[i] for i in part) for part in parts]
        mean = fmean(tokens)
        typical = parts[min(range(len(parts)), key=lambda p: abs(tokens[p] - mean))]
        later = sorted(set(range(len(parts))) - set(first))
        worst: list[tuple[int, bool]] = []
        for among, onto_gradients in ((later, True), (first, False)):
            for size in (tokens, label_tokens) if among else ():
                largest = max(among, key=size.__getitem__)
                # What comes onto gradients and is as large needs more.
                if not any(tokens[largest] <= tokens[w] and label_tokens[largest] <= label_tokens[w] for w, _ in worst):
                    worst.append((largest, onto_gradients))
        worst.sort(key=lambda part: -tokens[part[0]])
        return cls(
            capacity=capacity,
            work=Work(
                tuple(Micro(computed(parts[part]), onto_gradients) for part, onto_gradients in worst),
                tuple(_largest_eval_batches(run.data, capacity)), capacity, computed(typical),
            ),
            tokens_per_step=sum(lengths[i] for part in parts for i in part) / len(batches),
            micro_batches_per_step=len(parts) / len(batches),
            tokens_per_micro_batch=mean,
        )  # fmt: skip


def _largest_eval_batches(data: Dataset, capacity: int) -> Iterator[tuple[EncodedRow, ...]]:
    branching = [row for row in data.held_out if row.choices]
    plain = [row for row in data.held_out if not row.choices]
    if branching:
        yield tuple(largest_batch(branching, capacity=capacity))
    if plain:
        parts = pack([row.tokens for row in plain], capacity=capacity)
        yield tuple(plain[i] for i in max(parts, key=lambda part: sum(plain[i].tokens for i in part)))


def plan(recipe: Recipe, batches: Batches, profile: Profile, run: Run, around: Surroundings) -> Plan:
    """What `profile` means on the device."""
    weights = profile.weights
    scratch = KERNEL_BYTES + (KERNEL_BYTES_16 if run.dtype.itemsize == 2 else 0)
    gathered = 0 if recipe.how.update == "in_backward" else profile.trained
    holes = round(gathered * around.allocator.hole_share)
    step_peak = max(profile.gradient, profile.update) + profile.unseen
    evaluate_peak = profile.evaluate + profile.unseen
    share = batches.tokens_per_micro_batch / batches.worst_tokens
    gradient_seconds = around.rates.gradient_seconds(profile, share=share)
    update = profile.update_seconds + around.rates.link_seconds(2 * profile.on_host)
    step_seconds = batches.micro_batches_per_step * gradient_seconds + update
    return Plan(
        recipe=recipe,
        device=around.device,
        budget_bytes=run.budget_bytes,
        phases={
            "load": around.peak(weights + profile.load_transient, weights),
            "step": around.peak(step_peak, min(profile.kept, step_peak), scratch_bytes=scratch + holes),
            "evaluate": around.peak(evaluate_peak, min(profile.kept, evaluate_peak), scratch_bytes=scratch),
            # A file's tensors are serialised together before they are written.
            "save": around.peak(profile.built + min(profile.trained, SHARD_BYTES), weights),
            # Streamed through the host's memory, a few rows of a weight at a time.
            "merge": around.peak(0 if around.device.kind == "cuda" else profile.trained + TRANSIENT_BYTES, 0),
        },
        reserve_bytes=around.reserve(max(step_peak, evaluate_peak, profile.kept) - profile.kept, run.dtype),
        step_seconds=step_seconds,
        tokens_per_second=batches.tokens_per_step / step_seconds,
        gradient_seconds=gradient_seconds,
        batches=batches,
        profile=profile,
    )
