"""The training step. The trainer runs it on real tensors, the planner the very same code on fake ones.

Nothing here may depend on the value of a tensor: no `.item()`, no branch on data. What must look at a value (is the
gradient finite?) is done by the caller between `forward_backward` and `update`.

Order of application, written here once: freeze -> adapters, or 16-bit compute over float32 weights -> lean norms and
MLPs -> recompute -> optimiser.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from snugtune.adapters import lora
from snugtune.data.choices import TreeBatch
from snugtune.data.pack import MicroBatch
from snugtune.memory import lean, master, optimizers, recompute
from snugtune.memory.chunked_loss import Head, chunked_loss, token_log_probs
from snugtune.models.blocks import anatomy
from snugtune.models.load import DTYPES
from snugtune.recipe import Packing, Recipe, What

ADAM_BETAS = (0.9, 0.999)
ADAM_EPS = 1e-8
DEFAULT_CHUNK_TOKENS = 256
"""Label tokens whose logits exist at one time: 48 MiB in float32 at a vocabulary of 49,152."""


class Scorer:
    """One model made ready to be scored: losses and log-probabilities, without gradients."""

    def __init__(self, model: PreTrainedModel, chunk_tokens: int = DEFAULT_CHUNK_TOKENS) -> None:
        self.model = model
        self.parts = anatomy(model)
        self.chunk_tokens = chunk_tokens

    @torch.no_grad()
    def loss(self, batch: MicroBatch) -> Tensor:
        """Summed token loss, without gradients."""
        return self._loss(batch)

    @torch.no_grad()
    def log_probs(self, batch: TreeBatch) -> Tensor:
        """[M] log-probabilities of the (position, token) pairs of branching answers."""
        hidden_TD = self._hidden(batch)
        counts, chunk = batch.pair_counts_U, self.chunk_tokens
        return token_log_probs(
            hidden_TD.index_select(0, batch.positions_U), self._head(),
            pair_position_M=batch.pair_position_M, pair_token_M=batch.pair_token_M, chunk_tokens=chunk,
            pairs_per_chunk=tuple(sum(counts[i : i + chunk]) for i in range(0, len(counts), chunk)),
        )  # fmt: skip

    @property
    def sees_trees(self) -> bool:
        """Whether `log_probs` is exact for this family: packed, and no layer looks through a sliding window."""
        return self.parts.packs and not getattr(self.model.config, "sliding_window", None)

    def _loss(self, batch: MicroBatch) -> Tensor:
        if not self.parts.packs:
            return self._loss_by_row(batch)
        hidden_ND = self._hidden(batch).index_select(0, batch.label_positions_N)
        return chunked_loss(hidden_ND, batch.labels_N, self._head(), chunk_tokens=self.chunk_tokens)

    def _hidden(self, batch: MicroBatch | TreeBatch) -> Tensor:
        """[T, D] hidden states after the last norm."""
        out = self.parts.backbone(
            input_ids=batch.input_ids_1T,
            position_ids=batch.position_ids_1T,
            use_cache=False,
            row_layout=batch.row_layout,
        )
        return out.last_hidden_state[0]

    def _head(self) -> Head:
        head = self.parts.head
        return Head(head.weight, head.bias, self.parts.logit_scale, self.parts.softcap)

    def _loss_by_row(self, batch: MicroBatch) -> Tensor:
        """For a family that we do not know: each row through the model's own forward, with its own logits."""
        total = torch.zeros((), dtype=torch.float32, device=batch.input_ids_1T.device)
        start = done = 0
        for tokens, labels in zip(batch.row_tokens, batch.row_label_tokens, strict=True):
            logits_TV = self.model(input_ids=batch.input_ids_1T[:, start : start + tokens], use_cache=False).logits[0]
            at_N = batch.label_positions_N[done : done + labels] - start
            targets_N = batch.labels_N[done : done + labels]
            total = total + nn.functional.cross_entropy(logits_TV[at_N].float(), targets_N, reduction="sum")
            start, done = start + tokens, done + labels
        return total


class Step(Scorer):
    """One model made ready to train: `forward_backward` for each micro-batch, look at the norm, then `update`.

    Where `updates_in_backward`, the gradients never exist together: `norm_in_backward` for the one micro-batch of the global
    batch, look at the norm, then `update_in_backward` for it again (Lv et al., arXiv 2306.09782, who call it LOMO).
    """

    def __init__(self, model: PreTrainedModel, recipe: Recipe) -> None:
        super().__init__(model, recipe.how.loss_chunk_tokens or DEFAULT_CHUNK_TOKENS)
        self.trainable = [p for p in model.parameters() if p.requires_grad]
        self._random_state: list[Tensor] = []
        self._reached: Collection[int] = ()
        """ids of the parameters whose gradients `norm_in_backward` saw and dropped."""
        self.updates_in_backward = recipe.how.update == "in_backward"
        decay = [p for p in self.trainable if p.ndim > 1]
        plain = [p for p in self.trainable if p.ndim <= 1]  # norms and biases are not decayed
        groups = [{"params": decay, "weight_decay": recipe.what.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = optimizers.make(
            recipe.how.optimizer or "adamw", [g for g in groups if g["params"]], lr=recipe.what.learning_rate,
            betas=ADAM_BETAS, eps=ADAM_EPS,
        )  # fmt: skip

    def forward_backward(self, batch: MicroBatch, *, label_tokens: int, loss_scale: float = 1.0) -> Tensor:
        """Add this micro-batch's part of the gradient; return its summed token loss (detached, unscaled).

        The gradient is that of (sum of token losses / label_tokens) * loss_scale, with `label_tokens` counted over the
        whole global batch, so that it does not matter how rows are cut into micro-batches.
        """
        loss = self._loss(batch)
        (loss * (loss_scale / label_tokens)).backward()
        return loss.detach()

    def norm_in_backward(
        self, batch: MicroBatch, *, label_tokens: int, loss_scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """(loss, gradient norm) of this micro-batch as `forward_backward` and `grad_norm` give them; gradients are dropped as
        they come."""
        self._random_state = _random_state(batch.input_ids_1T.device)
        norms: dict[int, Tensor] = {}

        def measure(p: Tensor) -> None:
            norms[id(p)] = torch.linalg.vector_norm(p.grad)

        with self._as_they_come(measure):
            loss = self.forward_backward(batch, label_tokens=label_tokens, loss_scale=loss_scale)
        self._reached = norms.keys()
        return loss, torch.linalg.vector_norm(torch.stack(list(norms.values())))

    def update_in_backward(
        self, batch: MicroBatch, *, label_tokens: int, factor: float, learning_rate: float, loss_scale: float = 1.0
    ) -> None:
        """The gradients of this micro-batch again, each used as `update` uses it and then dropped."""
        self._set_rate(learning_rate)
        _set_random_state(batch.input_ids_1T.device, self._random_state)

        def use(p: Tensor) -> None:
            p.grad.mul_(factor)  # type: ignore[union-attr]
            self.optimizer.step()  # this parameter alone has a gradient

        with self._as_they_come(use):
            self.forward_backward(batch, label_tokens=label_tokens, loss_scale=loss_scale)

    @contextmanager
    def _as_they_come(self, use: Callable[[Tensor], object]) -> Generator[None]:
        """Call `use` with each parameter whose gradient is complete, and drop the gradient."""

        def hook(p: Tensor) -> None:
            use(p)
            p.grad = None

        hooks = [p.register_post_accumulate_grad_hook(hook) for p in self.trainable]
        try:
            yield
        finally:
            for handle in hooks:
                handle.remove()

    @property
    def on_host(self) -> list[Tensor]:
        """Tensors that are kept in the host's memory, whatever the device is."""
        return self.optimizer.host_tensors() if isinstance(self.optimizer, optimizers.HostAdamW) else []

    @property
    def update_transient_bytes(self) -> int:
        """What the optimiser holds for a moment where a recording does not see it."""
        return getattr(self.optimizer, "transient_bytes", 0)

    def without_gradient(self) -> list[str]:
        """Names of trainable tensors that no gradient has reached."""
        return [
            name
            for name, p in self.model.named_parameters()
            if p.requires_grad and p.grad is None and id(p) not in self._reached
        ]

    def grad_norm(self) -> Tensor:
        """Euclidean norm over all gradients, still multiplied by the loss scale."""
        return torch.nn.utils.get_total_norm([p.grad for p in self.trainable if p.grad is not None])

    def update(self, *, factor: float, learning_rate: float) -> None:
        """Multiply the gradients by `factor` (clipping, 1 / loss scale), step the optimiser, drop the gradients."""
        self._set_rate(learning_rate)
        for parameter in self.trainable:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        self.optimizer.step()
        self.drop_gradients()

    def _set_rate(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate

    def drop_optimizer_state(self) -> None:
        """Forget the moments: nothing trains after this."""
        self.optimizer.state.clear()

    def drop_gradients(self) -> None:
        """Forget the gradients, and give their memory back."""
        self.optimizer.zero_grad(set_to_none=True)


def _random_state(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def _set_random_state(device: torch.device, states: list[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


def build(recipe: Recipe, model: PreTrainedModel) -> Step:
    """Make `model` (frozen, with or without real weights) ready to train as `recipe` says.

    Adapters are drawn from torch's generator: seed it first.

    Raises:
        RecipeError: for a target module that does not exist.
    """
    _METHODS[recipe.what.method](model, recipe)
    lean.apply(model)
    recompute.apply(anatomy(model), recipe.how.recompute, random=draws_random_numbers(model, recipe))
    return Step(model.train(), recipe)


def packing(what: What) -> Packing | None:
    """How the linears inside the blocks are packed: where the base (`auto` is resolved) is not what they compute in."""
    base = what.base
    if base == "auto" or base == "fp32" or base == what.precision or what.method == "full":
        return None
    return base


def stored_dtype(what: What, compute: torch.dtype) -> torch.dtype:
    """What the model's weights are loaded as; of a packed base, those that stay whole (embeddings, norms, head)."""
    return torch.float32 if what.method == "full" else compute


def _train_adapters(model: PreTrainedModel, recipe: Recipe) -> None:
    lora.apply(model, recipe.what.lora)


def _train_everything(model: PreTrainedModel, recipe: Recipe) -> None:
    model.requires_grad_()
    master.apply(model, DTYPES.get(recipe.what.precision, torch.float32))


_METHODS: dict[str, Callable[[PreTrainedModel, Recipe], None]] = {"lora": _train_adapters, "full": _train_everything}


def draws_random_numbers(model: PreTrainedModel, recipe: Recipe) -> bool:
    """Whether a forward in training draws random numbers (dropout in the adapters or in the family's own layers)."""
    if recipe.what.method == "lora" and recipe.what.lora.lora_dropout > 0:
        return True
    config = model.config.to_dict()
    return any("drop" in key and isinstance(value, float) and value > 0 for key, value in config.items())
