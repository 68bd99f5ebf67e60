"""Activation checkpointing by our own autograd function: keep a module's inputs, run the module again in backward.

    block      Peak activations fall from everything inside all blocks to the blocks' inputs plus the inside of one block;
               the price is one more forward.
    selective  Only the MLPs run again: most of what a block keeps is inside of its MLP, and attention, the part whose
               price grows with the square of a row, is not computed twice.
    offload    As block, and the blocks' inputs wait outside of the device's memory (memory/offload.py), so that what is
               left of a longer row is the inside of one block.

Long inputs go through an MLP that is run again in tiles of tokens: it treats each token by itself, so that its inner
activations, the largest of a block, exist for a tile alone (gradients of its weights are then sums over tiles). Where a
block ends with its MLP, the second run of the block does not run it at all: nobody needs the block's output again, and
what the MLP's backward needs is made there, tile by tile; a frozen last projection is not multiplied with a second time.

Exact: the second run sees the same inputs, the same random state and the same autocast state, so that gradients are
bit-equal to a run that kept everything. (Where an MLP's input is used beside it as well, as in OLMo 2 and its kin whose
norms come after the MLP, the same gradients are summed in another order.)

What a naive version gets wrong, and this one does not: inputs are detached before the second run; the random state of
the first run is restored for it and the outer one put back after it; trainable parameters are inputs of the function, so
that they get gradients even when nothing that flows in requires one (frozen embeddings); keyword, nested and non-tensor
arguments pass through; an output that needs no gradient asks for none; functions nest.

Chen et al., arXiv 1604.06174; selective after Korthikanti et al., arXiv 2205.05198, who leave out another part (their
attention kept its square matrices, which ours never makes).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten

from snugtune.kernels.packed import PackedLinear
from snugtune.memory.offload import Shelf
from snugtune.models.blocks import Anatomy
from snugtune.recipe import Recompute

TILE_TOKENS = 1024
"""Of an MLP's input that are computed at one time: products of 7B-class widths are as fast as over more of them."""
PACKED_TILES = 4
"""Times as many where weights are packed, which each tile unpacks anew, unless inputs are offloaded for memory's sake."""
MOST_TILES = 16
"""Then tiles grow: an MLP is 3 to 4 times as wide as the model, so that a sixteenth of its inside is less than one hidden
state, of which a block holds a dozen."""


@dataclass(frozen=True)
class _Surroundings:
    """State outside of the arguments that the second run must see as the first did."""

    cpu_rng: Tensor | None
    device_rng: Tensor | None
    device_type: str
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def now(cls, device_type: str, *, random: bool) -> _Surroundings:
        module = _device_module(device_type)
        return cls(
            cpu_rng=torch.get_rng_state() if random else None,
            device_rng=module.get_rng_state() if random and module else None,
            device_type=device_type,
            autocast=tuple(
                (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                for kind in dict.fromkeys(("cpu", device_type))
            ),
        )

    def restore(self, stack: ExitStack) -> None:
        """Set everything back until `stack` closes."""
        module = _device_module(self.device_type)
        if self.cpu_rng is not None:
            stack.callback(torch.set_rng_state, torch.get_rng_state())
            torch.set_rng_state(self.cpu_rng)
        if self.device_rng is not None and module:
            stack.callback(module.set_rng_state, module.get_rng_state())
            module.set_rng_state(self.device_rng)
        for kind, enabled, dtype in self.autocast:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))


def _device_module(device_type: str) -> Any:
    return None if device_type in ("cpu", "meta") else torch.get_device_module(device_type)


_in_second_run = False


@contextmanager
def _second_run() -> Generator[None]:
    """Of a function whose output nobody looks at: only its backward counts."""
    global _in_second_run
    before, _in_second_run = _in_second_run, True
    try:
        yield
    finally:
        _in_second_run = before


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        # `tensors` are the tensor arguments followed by the trainable parameters.
        ctx.call = call
        ctx.surroundings = _Surroundings.now(call.device_type, random=call.random)
        first = call.keeps_from
        ctx.away = [call.shelf.put(t) for t in tensors[:first]] if call.shelf else []
        ctx.save_for_backward(*tensors[first:])
        ctx.set_materialize_grads(False)
        with torch.no_grad():
            outputs, call.output_tree = tree_flatten(call.run(tensors[: call.arguments]))
        call.output_others = [None if isinstance(o, Tensor) else o for o in outputs]
        call.output_is_tensor = [isinstance(o, Tensor) for o in outputs]
        found = tuple(o for o in outputs if isinstance(o, Tensor))
        ctx.mark_non_differentiable(*(o for o in found if not (o.is_floating_point() or o.is_complex())))
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # type: ignore[override]
        call: _Call = ctx.call
        tensors = (*(waiting.shelf.get(waiting) for waiting in ctx.away), *ctx.saved_tensors)
        ctx.away = []
        wanted = ctx.needs_input_grad[1:]
        inputs = [t.detach().requires_grad_(needs) for t, needs in zip(tensors[: call.arguments], wanted, strict=False)]
        parameters = tensors[call.arguments :]
        with torch.enable_grad(), ExitStack() as stack:
            ctx.surroundings.restore(stack)
            stack.enter_context(_second_run())
            outputs = [o for o in tree_flatten(call.run(inputs))[0] if isinstance(o, Tensor)]
        pairs = [(o, g) for o, g in zip(outputs, grad_outputs, strict=True) if g is not None and o.requires_grad]
        targets = [t for t, needs in zip([*inputs, *parameters], wanted, strict=True) if needs]
        found: Iterable[Tensor | None] = [None] * len(targets)
        if pairs and targets:
            found = torch.autograd.grad([o for o, _ in pairs], targets, [g for _, g in pairs], allow_unused=True)
        results = iter(found)
        return (None, *(next(results) if needs else None for needs in wanted))


class _Call:
    """A function with its arguments taken apart into tensors and the rest."""

    def __init__(
        self, function: Callable[..., Any], args: Any, kwargs: Any, *, random: bool, shelf: Shelf | None
    ) -> None:
        self.function, self.random, self.shelf = function, random, shelf
        flat, self.tree = tree_flatten((args, kwargs))
        self.is_tensor = [isinstance(x, Tensor) for x in flat]
        self.others = [None if isinstance(x, Tensor) else x for x in flat]
        self.tensors = [x for x in flat if isinstance(x, Tensor)]
        self.arguments = len(self.tensors)
        devices = {t.device.type for t in self.tensors} - {"cpu", "meta"}
        self.device_type = next(iter(devices), "cpu")
        self.keeps_from = 1 if shelf and self.tensors and self.tensors[0].is_floating_point() else 0
        """The tensors before this one go to the shelf: hidden states come first, what blocks share (rotary tables) after them."""
        self.output_tree: Any = None
        self.output_others: list[Any] = []
        self.output_is_tensor: list[bool] = []

    def run(self, tensors: Iterable[Tensor]) -> Any:
        it = iter(tensors)
        flat = [next(it) if is_tensor else other for is_tensor, other in zip(self.is_tensor, self.others, strict=True)]
        args, kwargs = tree_unflatten(flat, self.tree)
        return self.function(*args, **kwargs)

    def rebuild(self, tensors: Iterable[Tensor]) -> Any:
        it = iter(tensors)
        pairs = zip(self.output_is_tensor, self.output_others, strict=True)
        return tree_unflatten([next(it) if is_tensor else other for is_tensor, other in pairs], self.output_tree)


def recompute(
    function: Callable[..., Any],
    *args: Any,
    parameters: Iterable[Tensor] | None = None,
    random: bool = True,
    shelf: Shelf | None = None,
    **kwargs: Any,
) -> Any:
    """`function(*args, **kwargs)`, keeping only its arguments for backward.

    Args:
        function: a module, or any callable whose result depends on nothing but its arguments, `parameters`, the random
            state and autocast.
        args: tensors that may require gradients, at any depth of tuples, lists and dicts, among anything else.
        parameters: trainable tensors that the function uses besides its arguments; those of a module by default.
        random: False where the function draws no random number, so that no state need be kept.
        shelf: where the first tensor waits; None: on the device.
        kwargs: as args.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if parameters is None:
        parameters = function.parameters() if isinstance(function, nn.Module) else ()
    call = _Call(function, args, kwargs, random=random, shelf=shelf)
    tensors, call.tensors = call.tensors, []  # autograd keeps them; a second list would outlive it
    return call.rebuild(_Recompute.apply(call, *tensors, *(p for p in parameters if p.requires_grad)))


class _Tiled(torch.autograd.Function):
    """A function of each token alone that draws no random number, a tile of tokens at a time; its input is kept."""

    @staticmethod
    def forward(
        ctx: Any, function: Callable[[Tensor], Tensor], tile_tokens: int, x: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.function, ctx.tile_tokens = function, tile_tokens
        ctx.save_for_backward(x, *parameters)
        return _by_tiles(function, x, tile_tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # type: ignore[override]
        (dy,) = grad_outputs
        x, *parameters = ctx.saved_tensors
        wants_x = ctx.needs_input_grad[2]
        dx = torch.empty_like(x) if wants_x else None
        sums: list[Tensor | None] = [None] * len(parameters)
        for part in _tiles(x, ctx.tile_tokens):
            tile = x[:, part].detach().requires_grad_(wants_x)
            y, dy_of_y = _last_that_counts(ctx.function, tile, dy[:, part])
            targets = [tile, *parameters] if wants_x else parameters
            found = list(torch.autograd.grad(y, targets, dy_of_y, allow_unused=True))
            if dx is not None:
                dx[:, part] = found.pop(0)
            sums = [g if s is None else s if g is None else s.add_(g) for s, g in zip(sums, found, strict=True)]
        return (None, None, dx, *sums)


class _Unrun(_Tiled):
    """As _Tiled where nobody looks at the output."""

    @staticmethod
    def forward(
        ctx: Any, function: Callable[[Tensor], Tensor], tile_tokens: int, x: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.function, ctx.tile_tokens = function, tile_tokens
        ctx.save_for_backward(x, *parameters)
        return torch.empty_like(x)


def _last_that_counts(function: Any, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """What of `function(x)` has to be computed for its backward, and the gradient of that."""
    pull_back = getattr(function, "pull_back", None)
    dh = pull_back(dy) if pull_back else None
    with torch.enable_grad():
        return (function(x), dy) if dh is None else (function.before_down(x), dh)


def _tiles(x: Tensor, tile_tokens: int) -> Iterable[slice]:
    size = max(tile_tokens, -(-x.shape[1] // MOST_TILES))
    return (slice(start, start + size) for start in range(0, x.shape[1], size))


def _by_tiles(function: Callable[[Tensor], Tensor], x: Tensor, tile_tokens: int) -> Tensor:
    out = None
    with torch.no_grad():
        for part in _tiles(x, tile_tokens):
            y = function(x[:, part])
            if out is None:
                out = y.new_empty(*x.shape[:-1], y.shape[-1])
            out[:, part] = y
            del y  # before the next tile's is made
    assert out is not None
    return out


def tiled(
    function: Callable[[Tensor], Tensor], x: Tensor, *, parameters: Iterable[Tensor], tile_tokens: int = TILE_TOKENS
) -> Tensor:
    """`function(x)` for [1, T, D] of a function that treats tokens alike, each by itself, and draws no random number.

    What is inside of it exists for `tile_tokens` of the tokens at one time, in forward and, computed again, in backward.
    """
    if x.shape[1] <= tile_tokens:
        return function(x)
    if not torch.is_grad_enabled():
        return _by_tiles(function, x, tile_tokens)
    return _Tiled.apply(function, tile_tokens, x, *(p for p in parameters if p.requires_grad))


def apply(parts: Anatomy, policy: Recompute | None, *, random: bool = True) -> None:
    """Recompute in backward what the policy names. Call it after adapters are in, since it looks at what is trainable then.

    A family without recognised MLPs recomputes whole blocks under `selective` too: slower than it might be, and never more
    memory than asked for. Random numbers would be drawn in another order by tiles, so that there are none then.
    """
    tiles = not random and parts.packs
    if policy == "selective" and parts.mlps:
        if tiles:
            for mlp in parts.mlps:
                mlp.forward = _Again(mlp, _tile_tokens(mlp))  # type: ignore[method-assign]
        else:
            apply_to(parts.mlps, random=random)
    elif policy in ("selective", "block", "offload"):
        if tiles and (parts.ends_with_mlp or policy == "offload"):
            for mlp in parts.mlps:
                most = TILE_TOKENS if policy == "offload" else _tile_tokens(mlp)
                mlp.forward = _InTiles(mlp, most, last=parts.ends_with_mlp)  # type: ignore[method-assign]
        apply_to(parts.blocks, random=random, shelf=Shelf() if policy == "offload" else None)


def _tile_tokens(mlp: nn.Module) -> int:
    packed = any(isinstance(module, PackedLinear) for module in mlp.modules())
    return TILE_TOKENS * (PACKED_TILES if packed else 1)


def apply_to(modules: Iterable[nn.Module], *, random: bool = True, shelf: Shelf | None = None) -> None:
    """Recompute each of `modules` in backward, with its input kept on `shelf`."""
    for module in modules:
        module.forward = _Recomputed(module, random=random, shelf=shelf)  # type: ignore[method-assign]


class _InTiles:
    """Stands in for one module's forward; modules look `forward` up on themselves first."""

    def __init__(self, module: nn.Module, tile_tokens: int, *, last: bool = False) -> None:
        self.forward, self.tile_tokens, self.last = module.forward, tile_tokens, last
        self.parameters = [p for p in module.parameters() if p.requires_grad]

    def __call__(self, x: Tensor) -> Tensor:
        if self.last and _in_second_run and torch.is_grad_enabled():
            return _Unrun.apply(self.forward, self.tile_tokens, x, *self.parameters)
        return tiled(self.forward, x, parameters=self.parameters, tile_tokens=self.tile_tokens)


class _Again(_InTiles):
    """Its inside is never kept, however short the input is."""

    def __call__(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return _Tiled.apply(self.forward, self.tile_tokens, x, *self.parameters)
        return tiled(self.forward, x, parameters=(), tile_tokens=self.tile_tokens)


class _Recomputed:
    def __init__(self, module: nn.Module, *, random: bool, shelf: Shelf | None) -> None:
        self.forward, self.random, self.shelf = module.forward, random, shelf
        self.parameters = [p for p in module.parameters() if p.requires_grad]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return recompute(
            self.forward, *args, parameters=self.parameters, random=self.random, shelf=self.shelf, **kwargs
        )
