"""Run the real step on fake tensors and record every storage that is born and dies.

`step.build` is the very function that the trainer calls; FakeTensorMode gives its operations shapes without data, and a
dispatch mode sees each storage that they make. Memory that an operation takes inside its kernel (scratch of a matrix
product) is not seen here: the allowance for it is the device's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig

from snugtune import step
from snugtune.data.choices import tree_batches
from snugtune.data.encode import EncodedRow
from snugtune.data.pack import collate
from snugtune.errors import ModelError
from snugtune.models import load
from snugtune.recipe import Recipe


class LiveBytes(TorchDispatchMode):
    """Bytes alive in the storages that operations returned while it is on, and the most that ever were.

    What stood before counts from when an operation first returns it: note it beforehand.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, then note the storages of what it returned."""
        out = func(*args, **(kwargs or {}))
        self.note(out)
        return out

    def note(self, tensors: Any) -> None:
        """Count the storages of these tensors that are not known yet, until they die."""
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())

    def _note(self, storage: Any) -> None:
        key = id(storage)
        if key in self._known:
            return
        size = storage.nbytes()

        def died(_: Any) -> None:
            self._known.pop(key, None)
            self.live_bytes -= size

        self._known[key] = weakref.ref(storage, died)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


@dataclass(frozen=True)
class Profile:
    """Bytes alive at the peak of each part of a run, the model's weights included in all of them.

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
    reordered: int
    """The largest weight in 16 bits: oneDNN's products on a CPU copy it into a layout of their own; 0 in float32."""

    @property
    def gradient(self) -> int:
        """Forward and backward."""
        return max(self.turn, self.descent, self.landing)

    def extrapolate(self, deeper: Profile, *, blocks: int) -> Profile:
        """This profile with `blocks` more blocks, `deeper` having one more."""
        pairs = zip(astuple(self), astuple(deeper), strict=True)
        return Profile(*(here + blocks * (there - here) for here, there in pairs))


@dataclass(frozen=True)
class Work:
    """The largest batches of a run, which make its peak."""

    micro_batches: tuple[tuple[EncodedRow, ...], ...]
    eval_batches: tuple[tuple[EncodedRow, ...], ...]
    eval_capacity: int


def simulate(recipe: Recipe, config: PretrainedConfig, work: Work, *, dtype: torch.dtype) -> Profile:
    """What a model of this shape keeps alive when it is trained on `work`.

    Blocks are alike, so two and three of them tell the rest; where they are not (layers of several kinds), the whole
    depth is run.
    """
    depth = config.num_hidden_layers
    if depth <= 3 or len(set(getattr(config, "layer_types", None) or ["all alike"])) > 1:
        return simulate_whole(recipe, config, work, dtype=dtype)
    two, three = (simulate_whole(recipe, _of_depth(config, d), work, dtype=dtype) for d in (2, 3))
    return two.extrapolate(three, blocks=depth - 2)


def _of_depth(config: PretrainedConfig, depth: int) -> PretrainedConfig:
    settings = config.to_dict()
    settings["num_hidden_layers"] = depth
    if settings.get("layer_types"):
        settings["layer_types"] = settings["layer_types"][:depth]
    return type(config).from_dict(settings)


def simulate_whole(recipe: Recipe, config: PretrainedConfig, work: Work, *, dtype: torch.dtype) -> Profile:
    """Train two steps and evaluate, all on fake tensors, every block of them.

    Two steps, since the second one has the optimiser's state beside its activations.

    Raises:
        ModelError: for a family whose forward branches on the values of tensors.
    """
    try:
        return _simulate_whole(recipe, config, work, dtype)
    except DataDependentOutputException as error:
        raise ModelError(
            f"a '{config.model_type}' chooses its way by the values of tensors ({error}), so that its memory cannot be planned"
        ) from None


def _simulate_whole(recipe: Recipe, config: PretrainedConfig, work: Work, dtype: torch.dtype) -> Profile:
    with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live, torch.random.fork_rng(devices=[]):
        model = load.shell(config, dtype).requires_grad_(False)
        live.note([*model.parameters(), *model.buffers()])
        weights = live.live_bytes
        built = step.build(recipe, model)
        live.note(built.trainable)
        ready = live.live_bytes
        trained = sum(p.nbytes for p in built.trainable)
        reordered = max((p.nbytes for p in model.parameters() if p.dtype.itemsize == 2), default=0)
        gradient, update = [0, 0, 0], 0
        for _ in range(2):
            gradient = [max(pair) for pair in zip(gradient, _gradients(built, work, live), strict=True)]
            update = max(update, _peak_of(live, lambda: _update(built)))
        kept = live.live_bytes
        evaluated = _peak_of(live, lambda: _evaluate(built, work))
    turn, descent, landing = gradient
    return Profile(weights, turn, descent, landing, update, evaluated, kept, ready, trained, reordered)


def _gradients(built: step.Step, work: Work, live: LiveBytes) -> list[int]:
    """Peaks of the three parts of forward and backward that Profile tells apart.

    Where the whole model is trained, activations grow with depth by one measure and gradients by another: a peak over
    both is no line and would be extrapolated wrongly, within each part it is one. Adapters' gradients are next to nothing,
    so that all of it is one part.
    """
    peaks = [0, 0, 0]
    parts: list[int] = []

    def end_of_part(*_: Any) -> None:
        parts.append(live.peak_bytes)
        live.peak_bytes = live.live_bytes

    whole_model = all(p.requires_grad for p in built.model.get_input_embeddings().parameters())
    ends = [built.parts.blocks[-1], built.parts.blocks[0]] if whole_model else []
    hooks = [block.register_full_backward_hook(end_of_part) for block in ends]
    for rows in work.micro_batches:
        parts.clear()
        live.peak_bytes = live.live_bytes
        built.forward_backward(collate(rows), label_tokens=1)
        end_of_part()
        turn, *descent, landing = [*parts, 0] if len(parts) < 2 else parts
        peaks = [max(pair) for pair in zip(peaks, (turn, max(descent, default=0), landing), strict=True)]
    for hook in hooks:
        hook.remove()
    return peaks


def _update(built: step.Step) -> None:
    built.grad_norm()
    built.update(factor=1.0, learning_rate=1.0)


def _evaluate(built: step.Step, work: Work) -> None:
    built.model.eval()
    for rows in work.eval_batches:
        if rows[0].choices and built.sees_trees:
            for batch in tree_batches(rows, capacity=work.eval_capacity):
                built.log_probs(batch)
        else:
            built.loss(collate(rows))
    built.model.train()


def _peak_of(live: LiveBytes, run: Callable[[], None]) -> int:
    live.peak_bytes = live.live_bytes
    run()
    return live.peak_bytes
