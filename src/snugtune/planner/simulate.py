"""Run the real step on fake tensors: the bytes and the seconds of each part of a run.

`step.build` is the very function that the trainer calls; FakeTensorMode gives its operations shapes without data, and
`LiveBytes` sees what they make.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from transformers import PretrainedConfig, PreTrainedModel

from snugtune import step
from snugtune.data.choices import tree_batches
from snugtune.data.encode import EncodedRow
from snugtune.data.pack import collate
from snugtune.errors import ModelError
from snugtune.models import load
from snugtune.planner.live import Alive, Blocks, LiveBytes, Price, Seconds
from snugtune.recipe import Recipe


@dataclass(frozen=True)
class Profile:
    """Bytes in use at the peak of each part of a run, the model's weights included in all of them, and seconds.

    Each part is linear in the number of blocks, which the largest of them is not.
    """

    weights: int
    """The model as loaded."""
    turn: int
    """From the start of the forward to the end of the last block's backward, with the optimiser's state beside it."""
    descent: int
    """The backward of the other blocks."""
    landing: int
    """What of the backward comes after the first block: the embedding's gradient."""
    update: int
    """Norm, clipping and the optimiser's step."""
    evaluate: int
    """Evaluation, with the optimiser's state beside it."""
    kept: int
    """Between steps: weights, trainable parameters, the optimiser's state."""
    built: int
    """Weights and adapters, before the optimiser has any state."""
    trained: int
    """What is trained, and so saved."""
    unseen: int
    """What operations hold inside, where the recording does not look: unpacking 4-bit weights, updates in the backward."""
    load_transient: int
    """What one tensor takes besides while it is loaded."""
    seconds: Seconds
    """Forward and backward of the first micro-batch."""
    update_seconds: float
    on_host: int
    """Moments in the host's memory: not in use on the device, but they travel to it and back at each update."""

    @property
    def gradient(self) -> int:
        """Forward and backward."""
        return max(self.turn, self.descent, self.landing)

    def extrapolate(self, deeper: Profile, *, blocks: int) -> Profile:
        """This profile with `blocks` more blocks, `deeper` having one more."""
        told: dict[str, Any] = {}
        for field in fields(self):
            here, there = getattr(self, field.name), getattr(deeper, field.name)
            if isinstance(here, Seconds):
                told[field.name] = Seconds(*(a + blocks * (b - a) for a, b in zip(here, there, strict=True)))
            else:
                told[field.name] = here + blocks * (there - here)
        return Profile(**told)


@dataclass(frozen=True)
class Micro:
    """The rows of one micro-batch."""

    rows: tuple[EncodedRow, ...]
    onto_gradients: bool = False
    """It is not the first of its step, so that gradients are there before it begins."""

    @property
    def tokens(self) -> int:
        """Of all its rows."""
        return sum(row.tokens for row in self.rows)


@dataclass(frozen=True)
class Work:
    """The batches of a run that tell its peak and its speed."""

    micro_batches: tuple[Micro, ...]
    """The largest ones: the first has most tokens, and is timed."""
    eval_batches: tuple[tuple[EncodedRow, ...], ...]
    eval_capacity: int
    typical: tuple[EncodedRow, ...] = ()
    """The micro-batch nearest to the mean, for a probe."""


@dataclass(frozen=True)
class Means:
    """With what to simulate."""

    dtype: torch.dtype
    """What forward and backward compute in."""
    blocks: Callable[[], Blocks | None] = lambda: None
    """Makes the allocator's model; None counts live bytes."""
    price: Price | None = None
    kind: str = "cpu"
    """Of the device: files are read on the host."""


def simulate(recipe: Recipe, config: PretrainedConfig, work: Work, means: Means) -> Profile:
    """What a model of this shape keeps in memory when it is trained on `work`, and how long it takes.

    Blocks are alike, so two and three of them tell the rest; where they are not (layers of several kinds), the whole
    depth is run.
    """
    depth = config.num_hidden_layers
    if not shallow_tells(config):
        return simulate_whole(recipe, config, work, means)
    two, three = (simulate_whole(recipe, of_depth(config, d), work, means) for d in (2, 3))
    return two.extrapolate(three, blocks=depth - 2)


def shallow_tells(config: PretrainedConfig) -> bool:
    """Whether two and three blocks are fewer than all, and all are alike."""
    return config.num_hidden_layers > 3 and len(set(getattr(config, "layer_types", None) or ["all alike"])) == 1


def of_depth(config: PretrainedConfig, depth: int) -> PretrainedConfig:
    """The same model with so many blocks."""
    settings = config.to_dict()
    settings["num_hidden_layers"] = depth
    if settings.get("layer_types"):
        settings["layer_types"] = settings["layer_types"][:depth]
    return type(config).from_dict(settings)


def simulate_whole(recipe: Recipe, config: PretrainedConfig, work: Work, means: Means) -> Profile:
    """One step with the optimiser's state beside it, and an evaluation, on fake tensors, every block of them.

    The first step of a run, which has no state yet, is never the larger one.

    Raises:
        ModelError: for a family whose forward branches on the values of tensors.
    """
    return _simulate(recipe, config, work, means, tell=False)[0]


def contents(
    recipe: Recipe, config: PretrainedConfig, work: Work, means: Means
) -> tuple[Profile, Mapping[str, list[Alive]]]:
    """As `simulate_whole`, and what is alive at the peaks of step and evaluation, largest first."""
    return _simulate(recipe, config, work, means, tell=True)


def _simulate(
    recipe: Recipe, config: PretrainedConfig, work: Work, means: Means, *, tell: bool
) -> tuple[Profile, dict[str, list[Alive]]]:
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.random.fork_rng(devices=[]):
            what = recipe.what
            # Before anything is recorded: a real load never holds the whole model in another form.
            model = load.shell(config, step.stored_dtype(what, means.dtype), packing=step.packing(what))
            with LiveBytes(blocks=means.blocks(), price=means.price, tell=tell) as live:
                return _Simulation(recipe, model.requires_grad_(False), work, means, live).run()
    except DataDependentOutputException as error:
        raise ModelError(
            f"a '{config.model_type}' chooses its way by the values of tensors ({error}), so that its memory cannot be planned"
        ) from None


class _Simulation:
    """One run of the script: load, two steps, evaluate."""

    def __init__(self, recipe: Recipe, model: PreTrainedModel, work: Work, means: Means, live: LiveBytes) -> None:
        self.recipe, self.model, self.work, self.means, self.live = recipe, model, work, means, live
        self.highest: dict[str, tuple[int, dict[int, int]]] = {}
        """Phase -> (its peak so far, what was alive then)."""

    def run(self) -> tuple[Profile, dict[str, list[Alive]]]:
        live, work, model, means = self.live, self.work, self.model, self.means
        live.note([*model.parameters()], "weights", [name for name, _ in model.named_parameters()])
        packed = "weights" if step.packing(self.recipe.what) else "buffers"
        live.note([*model.buffers()], packed, [name for name, _ in model.named_buffers()])
        weights = live.in_use_bytes
        stored = model.config.dtype if isinstance(model.config.dtype, torch.dtype) else torch.bfloat16
        transient = load.load_transient_bytes(model, next(model.parameters()).dtype, stored=stored, device=means.kind)
        self.built = built = step.build(self.recipe, model)
        if self.recipe.what.method == "lora":
            names = [name for name, p in model.named_parameters() if p.requires_grad]
            live.note(built.trainable, "adapter", names)
        live.note(built.on_host, "optimiser")
        live.ignore(built.on_host)
        live.release()
        ready = live.in_use_bytes
        parts, timed = [0, 0, 0], Seconds()
        self._make_optimizer_state()
        for micro in work.micro_batches:
            built.drop_gradients()
            if micro.onto_gradients:
                self._make_gradients()
            live.seconds = Seconds()
            parts = [max(pair) for pair in zip(parts, self._gradients(micro.rows), strict=True)]
            if micro is work.micro_batches[0]:
                timed = live.seconds
        update = 0 if built.updates_in_backward else self._peak_of("step", self._update)
        update_seconds = 0.0 if built.updates_in_backward else sum(live.seconds)
        unseen = load.unpack_bytes(model) + (built.update_transient_bytes if built.updates_in_backward else 0)
        kept = live.in_use_bytes
        live.release()
        evaluated = self._peak_of("evaluate", self._evaluate)
        turn, descent, landing = parts
        profile = Profile(
            weights=weights, turn=turn, descent=descent, landing=landing, update=update + built.update_transient_bytes, evaluate=evaluated, kept=kept,
            built=ready, trained=sum(p.nbytes for p in built.trainable),
            unseen=unseen, load_transient=transient, seconds=timed,
            update_seconds=update_seconds, on_host=sum(t.nbytes for t in built.on_host),
        )  # fmt: skip
        return profile, {phase: live.describe(alive) for phase, (_, alive) in self.highest.items()}

    def _gradients(self, rows: tuple[EncodedRow, ...]) -> list[int]:
        """Peaks of the three parts of forward and backward that Profile tells apart.

        Where the whole model is trained, activations grow with depth by one measure and gradients by another: a peak
        over both is no line and would be extrapolated wrongly, within each part it is one. Adapters' gradients are next
        to nothing, so that all of it is one part.
        """
        live, built = self.live, self.built
        parts: list[int] = []

        def end_of_part(*_: Any) -> None:
            live.settle()
            parts.append(live.peak_bytes)
            self._tell("step")
            live.begin()

        whole_model = all(p.requires_grad for p in built.model.get_input_embeddings().parameters())
        ends = [built.parts.blocks[-1], built.parts.blocks[0]] if whole_model else []
        hooks = [block.register_full_backward_hook(end_of_part) for block in ends]
        batch = collate(rows)
        passes: list[Callable[[], Any]] = [lambda: built.forward_backward(batch, label_tokens=1)]
        if built.updates_in_backward:
            passes = [
                lambda: built.norm_in_backward(batch, label_tokens=1),
                lambda: built.update_in_backward(batch, label_tokens=1, factor=1.0, learning_rate=1.0),
            ]
        found = [0, 0, 0]
        for run in passes:
            parts.clear()
            live.begin()
            run()
            self._name_gradients()
            end_of_part()
            turn, *descent, landing = [*parts, 0] if len(parts) < 2 else parts
            found = [max(pair) for pair in zip(found, (turn, max(descent, default=0), landing), strict=True)]
        for hook in hooks:
            hook.remove()
        return found

    def _update(self) -> None:
        self.live.seconds = Seconds()
        self.built.grad_norm()
        self.built.update(factor=1.0, learning_rate=1.0)
        self.live.note([list(state.values()) for state in self.built.optimizer.state.values()], "optimiser")

    def _make_optimizer_state(self) -> None:
        self._make_gradients()
        self._update()

    def _make_gradients(self) -> None:
        for parameter in self.built.trainable:
            parameter.grad = torch.zeros_like(parameter)
        self._name_gradients()

    def _evaluate(self) -> None:
        built = self.built
        built.model.eval()
        for rows in self.work.eval_batches:
            if rows[0].choices and built.sees_trees:
                for batch in tree_batches(rows, capacity=self.work.eval_capacity):
                    built.log_probs(batch)
            else:
                built.loss(collate(rows))
        built.model.train()

    def _peak_of(self, phase: str, run: Callable[[], None]) -> int:
        self.live.begin()
        run()
        self.live.settle()
        self._tell(phase)
        return self.live.peak_bytes

    def _name_gradients(self) -> None:
        trained = {name: p for name, p in self.built.model.named_parameters() if p.grad is not None}
        self.live.note([p.grad for p in trained.values()], "gradients", [f"gradient of {name}" for name in trained])

    def _tell(self, phase: str) -> None:
        """Keep what was alive at the peak of this part, when it is the phase's highest so far."""
        if self.live.tells and self.live.peak_live_bytes > self.highest.get(phase, (0, {}))[0]:
            self.highest[phase] = self.live.peak_live_bytes, self.live.at_peak()
