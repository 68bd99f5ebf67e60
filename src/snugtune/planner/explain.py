"""Why a plan is what it is: what fills the budget, what was chosen and for what reason, what does not fit and by how much."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from snugtune.planner.live import Alive
from snugtune.planner.search import Ladder, Plan
from snugtune.planner.speed import BF16_PAYS
from snugtune.units import format_bytes

OUTSIDE = "other"
"""What a device holds besides what is alive: the process and its libraries, or CUDA's context; what the allocator keeps."""
FREE = "free"
KINDS = ("weights", "adapter", "gradients", "optimiser", "activations", "loss", "buffers", OUTSIDE, FREE)


@dataclass(frozen=True)
class Segment:
    """A part of the budget."""

    name: str
    size_bytes: int


def fill(ladder: Ladder) -> list[Segment]:
    """What fills the budget at the peak of the chosen plan's step, in the order of KINDS; the last is what stays free."""
    plan = ladder.chosen
    sizes: dict[str, int] = defaultdict(int)
    for alive in ladder.contents.get("step", ()):
        sizes[alive.kind] += alive.size_bytes
    sizes[OUTSIDE] = max(plan.phases["step"] - sum(sizes.values()), 0)
    sizes[FREE] = max(plan.budget_bytes - plan.phases["step"], 0)
    return [Segment(name, sizes[name]) for name in KINDS if sizes[name]]


def largest(alive: list[Alive], *, most: int = 6) -> list[tuple[str, str, int, int]]:
    """What takes most at a peak: (kind, what made it and where, how many such storages, bytes), the like ones together."""
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for one in alive:
        where = one.where or _without_numbers(one.made_by)
        groups[one.kind, where].append(one.size_bytes)
    rows = [(kind, what, len(sizes), sum(sizes)) for (kind, what), sizes in groups.items()]
    return sorted(rows, key=lambda row: -row[3])[:most]


def _without_numbers(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` and its like in other blocks are one kind of thing."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def comments(ladder: Ladder) -> dict[str, str]:
    """A reason for each choice that was made for the user, by recipe key."""
    plan, asked = ladder.chosen, ladder.asked
    how, what = plan.recipe.how, plan.recipe.what
    found = {}
    if asked.how.recompute is None:
        found["how.recompute"] = _why(ladder, "recompute")
    if asked.how.micro_batch_tokens is None:
        found["how.micro_batch_tokens"] = (
            f"largest micro-batch: {plan.batches.worst_tokens} tokens of {len(plan.batches.worst)} rows, step peak {format_bytes(plan.phases['step'])}"
        )
    if asked.how.loss_chunk_tokens is None:
        found["how.loss_chunk_tokens"] = "logits of so many label tokens exist at one time"
    if asked.how.optimizer is None:
        found["how.optimizer"] = {
            "adamw": "moments in float32 on the device",
            "adamw_host": "moments in float32 in the host's memory: on the device none of the ways fits",
            "adamw_8bit": "moments in 8 bits: with float32 ones none of the ways fits",
        }[how.optimizer or "adamw"]
    if asked.how.update is None:
        found["how.update"] = {
            "after_backward": "gradients exist together: each is computed once",
            "in_backward": "gradients never exist together, and are computed twice: together none of the ways fits",
        }[how.update or "after_backward"]
    if asked.what.base == "auto" and what.base == "int4":
        found["what.base"] = "4 bits: with the compute precision none of the ways fits"
    if asked.what.precision == "auto":
        found["what.precision"] = f"the faster one that is safe on {plan.device.name}"
        if plan.device.kind == "cpu":
            faster = "at least" if what.precision == "bf16" else "less than"
            found["what.precision"] = (
                f"bf16 products are measured to be {faster} {BF16_PAYS:g} times as fast as fp32 ones"
            )
    return found


def _why(ladder: Ladder, key: str) -> str:
    chosen = ladder.chosen
    value = getattr(chosen.recipe.how, key)
    if value == "none":
        return "everything is kept: nothing is computed twice"
    lighter = [plan for plan in ladder.too_large if plan.recipe.how.recompute == "none" and same_storage(plan, chosen)]
    if not lighter:
        return "predicted to be the fastest that fits"
    nearest = min(lighter, key=lambda plan: plan.needed_bytes)
    return f"keeping everything needs {format_bytes(nearest.needed_bytes)} even with {nearest.recipe.how.micro_batch_tokens} tokens"


def same_storage(a: Plan, b: Plan) -> bool:
    """Whether two plans differ in what they recompute and how they cut rows alone."""
    return _kind(a)[:-1] == _kind(b)[:-1]


def reasons(ladder: Ladder) -> list[str]:
    """For each kind of way that does not fit at all: the phase that breaks and by how much, at the smallest micro-batch."""
    fits = {_kind(plan) for plan in ladder.plans}
    smallest: dict[tuple[str, ...], Plan] = {}
    for plan in ladder.too_large:
        kind = _kind(plan)
        if kind not in fits and (kind not in smallest or plan.needed_bytes < smallest[kind].needed_bytes):
            smallest[kind] = plan
    return [
        f"{_name(plan)}: the {plan.limiting_phase} phase is {format_bytes(plan.needed_bytes - plan.budget_bytes)} over "
        f"(needs {format_bytes(plan.needed_bytes)} with {plan.recipe.how.micro_batch_tokens} tokens)"
        for plan in smallest.values()
    ]


def _kind(plan: Plan) -> tuple[str, ...]:
    how = plan.recipe.how
    return plan.recipe.what.base, how.optimizer or "", how.update or "", how.recompute or ""


def _name(plan: Plan) -> str:
    base, optimizer, update, recompute = _kind(plan)
    extra = f", {optimizer}" if optimizer not in ("", "adamw") else ""
    extra += ", updates in the backward" if update == "in_backward" else ""
    return f"base {base}, recompute {recompute}{extra}"
