"""The one training loop, read from top to bottom."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from snugtune.data.encode import EncodedRow
from snugtune.data.pack import MicroBatch, collate, global_batches, micro_batches, padded
from snugtune.errors import InputError, Stopped
from snugtune.events import EventLog
from snugtune.memory.precision import LossScale
from snugtune.recipe import Recipe, What
from snugtune.step import Step

MOST_SKIPS_IN_A_ROW = 5
"""Steps skipped one after the other for a gradient that is not finite, before the run stops."""
_WARM_UP_STEPS = 1
"""Left out of the measured speed: the first step also prepares kernels."""

Watch = Callable[[int, int, dict[str, float]], None]
"""Called after each step with (steps done, steps in all, facts)."""


@dataclass
class Trained:
    """What training did. Losses are means over the label tokens of a whole global batch."""

    steps: int = 0
    skipped_steps: int = 0
    computed_tokens: int = 0
    """Positions that the model computed, padding among them."""
    pad_tokens: int = 0
    label_tokens: int = 0
    losses: list[float] = field(default_factory=list)
    tokens_per_second: float = 0.0
    seconds: float = 0.0
    loss_scale: float | None = None


def train_rows(
    step: Step, rows: Sequence[EncodedRow], recipe: Recipe, *, events: EventLog, device: str = "cpu",
    fp16: bool = False, watch: Watch = lambda done, total, facts: None,
) -> Trained:  # fmt: skip
    """Train `step` on `rows` as `recipe` says (its `how` resolved).

    Raises:
        InputError: where the first backward reaches not every trainable tensor; it names them.
        Stopped: after MOST_SKIPS_IN_A_ROW gradients in a row that were not finite.
    """
    what, capacity, batching = recipe.what, recipe.how.micro_batch_tokens, recipe.how.batching
    assert capacity is not None, "the planner resolves micro_batch_tokens"
    batches = global_batches(what, len(rows))
    rate = _schedule(what, len(batches))
    scale = LossScale() if fp16 else None
    done = Trained()
    skipped_in_a_row = 0
    timed_tokens = timed_seconds = 0.0
    for number, indices in enumerate(batches, 1):
        started = time.perf_counter()
        batch_rows = [rows[i] for i in indices]
        label_tokens = sum(row.label_tokens for row in batch_rows)
        loss_scale = scale.scale if scale else 1.0
        parts = micro_batches([row.tokens for row in batch_rows], capacity=capacity, batching=batching)
        micros = [collate(padded([batch_rows[i] for i in part], batching), device=device) for part in parts]
        loss, norm, update = _gradient(step, micros, label_tokens, loss_scale)
        if number == 1:
            _check_reached(step)
        tokens = sum(row.tokens for row in batch_rows)
        done.computed_tokens += sum(micro.tokens for micro in micros)
        done.pad_tokens += sum(micro.tokens for micro in micros) - tokens
        finite = math.isfinite(norm)
        learning_rate = rate(done.steps - done.skipped_steps)
        if finite:
            # As torch's clip_grad_norm_: the small term keeps a zero norm harmless.
            factor = min(1.0, what.max_grad_norm / (norm + 1e-6)) / loss_scale
            update(factor=factor, learning_rate=learning_rate)
            skipped_in_a_row = 0
        else:  # the norm is looked at before the update, so that weights, moments and schedule stay as they were
            step.drop_gradients()
            done.skipped_steps += 1
            skipped_in_a_row += scale is None or scale.scale <= 1
        if scale:
            scale.update(finite=finite)
        seconds = time.perf_counter() - started
        done.steps, done.label_tokens = number, done.label_tokens + label_tokens
        done.seconds += seconds
        done.losses.append(loss)
        if number > _WARM_UP_STEPS or len(batches) == 1:
            timed_tokens, timed_seconds = timed_tokens + tokens, timed_seconds + seconds
            done.tokens_per_second = timed_tokens / timed_seconds
        facts = {"loss": loss, "grad_norm": norm, "learning_rate": learning_rate, "tokens_per_second": tokens / seconds}
        events.write("step" if finite else "step_skipped", step=number, **facts, **_scale(scale))
        watch(number, len(batches), facts)
        if skipped_in_a_row >= MOST_SKIPS_IN_A_ROW:
            rows_named = ", ".join(row.where for row in batch_rows[:8])
            raise Stopped(
                f"{skipped_in_a_row} steps in a row had a gradient that is not finite (the last one: step {number}, rows "
                f"{rows_named}); lower what.learning_rate ({what.learning_rate}) or look at these rows"
            )
    done.loss_scale = scale.scale if scale else None
    return done


def _gradient(
    step: Step, micros: Sequence[MicroBatch], label_tokens: int, loss_scale: float
) -> tuple[float, float, Callable[..., None]]:
    """Of a global batch: mean loss, gradient norm without the scale, and what updates the weights by that gradient."""
    scaled: dict[str, Any] = {"label_tokens": label_tokens, "loss_scale": loss_scale}
    if step.updates_in_backward:
        (micro,) = micros  # the planner sees to it
        total, norm = step.norm_in_backward(micro, **scaled)
        return float(total) / label_tokens, float(norm) / loss_scale, partial(step.update_in_backward, micro, **scaled)
    loss = sum(float(step.forward_backward(micro, **scaled)) for micro in micros) / label_tokens
    return loss, float(step.grad_norm()) / loss_scale, step.update


def _check_reached(step: Step) -> None:
    """A trainable tensor that no gradient reaches would stay as it is, and nobody would notice."""
    untouched = step.without_gradient()
    if untouched:
        raise InputError(
            f"{len(untouched)} of {len(step.trainable)} trainable tensors got no gradient in the first step, {untouched[0]} "
            "among them: this model does not use them here; take them out of what.lora.target_modules"
        )


def _schedule(what: What, steps: int) -> Callable[[int], float]:
    """The learning rate of the update after so many updates.

    The factors are those of transformers' get_scheduler, which a test holds them to: importing it brings the Trainer, peft
    and bitsandbytes, four seconds and their memory. Its schedules begin at a rate of zero and end at zero; ours leave both
    out: no step is for nothing.
    """
    warmup = 0 if what.lr_scheduler_type == "constant" else math.ceil(what.warmup_ratio * steps)
    fall = {
        "cosine": lambda share: 0.5 * (1 + math.cos(math.pi * share)),
        "linear": lambda share: 1 - share,
        "constant": lambda share: 1.0,
        "constant_with_warmup": lambda share: 1.0,
    }[what.lr_scheduler_type]

    def rate(updates: int) -> float:
        at = updates + 1
        if at < warmup:
            return what.learning_rate * at / warmup
        return what.learning_rate * fall((at - warmup) / max(1, steps + 1 - warmup))

    return rate


def _scale(scale: LossScale | None) -> dict[str, float]:
    return {"loss_scale": scale.scale} if scale else {}
