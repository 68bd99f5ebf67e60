"""AdamW with its two moments out of the way: in host memory, or in 8 bits.

    m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2
    w <- (1 - lr decay) w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

torch's AdamW keeps m and v beside each parameter. Both optimisers here bring them back in float32 for one slice of a
parameter at a time, let torch's own fused AdamW update that slice, and put them away again. Bytes on the device, for N
elements of parameters (float32), of which a slice has S at most:

    adamw        8 N
    adamw_host   8 S, and 8 N in host memory; exact
    adamw_8bit   2.03 N + 17 S + 0.5 MiB, parameters of fewer than SMALL_ELEMENTS apart (8 an element)

Nothing here looks at the value of a tensor, so that a plan runs it on fake ones.

Loshchilov and Hutter, arXiv 1711.05101 (AdamW); Ren et al., arXiv 2101.06840 (moments in host memory); Dettmers et al.,
arXiv 2110.02861 (8 bits).

Shapes: N elements of a parameter or of a slice, K blocks of E elements, C = 256 codes, H = 65,536 upper halves of float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from snugtune import recipe

LEAST_SLICE_ELEMENTS = 1 << 20
SLICES = 8
"""A parameter is updated in so many slices, or in fewer of LEAST_SLICE_ELEMENTS: a slice is small beside the parameter,
and still so large that a GPU (and a plan) is not held up by the number of operations."""
BLOCK_ELEMENTS = 256
"""Moments in 8 bits that share a scale; bitsandbytes' number (the paper has 2,048)."""
SMALL_ELEMENTS = 4096
"""Parameters with fewer elements keep float32 moments, as in bitsandbytes: norms and biases are next to nothing."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""torch's names of m and v."""

State = dict[str, Any]


def make(
    kind: recipe.Optimizer, groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float
) -> torch.optim.Optimizer:
    """The AdamW that a recipe names.

    `optimizer.state.clear()` forgets the moments of any of them and frees their memory; a later step starts from zeros.

    Args:
        kind: where the moments are.
        groups: dicts with `params` (float32) and `weight_decay`, as torch takes them.
        lr: the first learning rate; `param_groups[i]["lr"]` may be changed before each step.
        betas: decay of the two moments.
        eps: added to the root of the second moment.
    """
    return _KINDS[kind](groups, lr=lr, betas=betas, eps=eps)


class _SlicedAdamW(torch.optim.Optimizer):
    """The walk over parameters and slices. A subclass says how moments are kept."""

    BYTES_IN_A_SLICE: int
    """On the device, for each element of a slice while it is updated."""

    def __init__(
        self, params: Iterable[Any], *, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; there is no way with a closure."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict()` of this class, or of one that keeps float32 moments (torch's AdamW).

        torch's own way would cast moments to the parameter's dtype and move them to its device.

        Raises:
            ValueError: for other parameter groups than this optimiser's.
            KeyError: for moments in 8 bits where float32 ones are kept.
        """
        super().load_state_dict({**state_dict, "state": {}})
        names = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        for name, p in zip(names, parameters, strict=True):
            if name in state_dict["state"]:
                saved = state_dict["state"][name]
                self.state[p] = self._new(p) | {"step": int(saved["step"])}
                self._adopt(p, saved)

    def _update(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        if not self.state[p]:
            self.state[p] = self._new(p)
        self.state[p]["step"] += 1
        held = [tensor for tensor in self.state[p].values() if isinstance(tensor, Tensor)]
        key = id(p)
        _walks[key] = partial(self._walk, p, grad, group)
        try:
            adamw_slices(p.detach(), grad, held, key)
        finally:
            del _walks[key]

    @property
    def transient_bytes(self) -> int:
        """Most that a step holds on the device beside parameters, gradients and moments: a plan, which does not look into
        `adamw_slices`, adds it."""
        parameters = chain.from_iterable(group["params"] for group in self.param_groups)
        return max((self._slice_bytes(p) for p in parameters), default=0)

    def _slice_bytes(self, p: Tensor) -> int:
        largest = max((part.stop - part.start for part in _slices(p.numel(), block=self._block(p))), default=0)
        return self.BYTES_IN_A_SLICE * largest + 4096

    def _walk(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        p_N, grad_N = _ordered(p, like=p).view(-1), _ordered(grad, like=p).reshape(-1)
        for part in _slices(p.numel(), block=self._block(p)):
            self._update_slice(p, part, p_N[part], grad_N[part], group)

    def _update_slice(self, p: Tensor, part: slice, p_N: Tensor, grad_N: Tensor, group: dict[str, Any]) -> None:
        # A function of its own, so that one slice's tensors are gone before the next one's are made.
        m_N, v_N = self._fetch(p, part)
        done = torch.full((), self.state[p]["step"] - 1, dtype=torch.float32, device=p.device)
        beta1, beta2 = group["betas"]
        adamw(
            [p_N], [grad_N], [m_N], [v_N], [], [done], fused=True, amsgrad=False, maximize=False, lr=group["lr"],
            beta1=beta1, beta2=beta2, eps=group["eps"], weight_decay=group["weight_decay"],
        )  # fmt: skip
        self._keep(p, part, m_N, v_N)

    def _block(self, p: Tensor) -> int:
        """Elements that a slice may not part."""
        return 1

    def _new(self, p: Tensor) -> State:
        """The state of a parameter before its first step."""
        raise NotImplementedError

    def _fetch(self, p: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """Both moments of a slice in float32 on the parameter's device, to be updated in place."""
        raise NotImplementedError

    def _keep(self, p: Tensor, part: slice, m_N: Tensor, v_N: Tensor) -> None:
        """Put away what `_fetch` gave, or the like of it; the two tensors may be spoiled."""
        raise NotImplementedError

    def _adopt(self, p: Tensor, saved: State) -> None:
        """Copy a saved state's moments into the new one."""
        raise NotImplementedError


_walks: dict[int, Callable[[], None]] = {}
"""The update that is being asked for, by the key that goes through torch's dispatcher with its tensors."""


@torch.library.custom_op("snugtune::adamw_slices", mutates_args=("p", "held"))
def adamw_slices(p: Tensor, grad: Tensor, held: list[Tensor], key: int) -> None:
    """Update one parameter slice by slice.

    One operation to whoever looks from outside, as a fused kernel would be: a plan of a 7B model sees 300 of them and not
    70,000 small ones.
    """
    _walks[key]()


@adamw_slices.register_fake
def _(p: Tensor, grad: Tensor, held: list[Tensor], key: int) -> None:
    pass


class HostAdamW(_SlicedAdamW):
    """torch's AdamW bit by bit, with float32 moments in host memory, page-locked where the parameters are on a GPU.

    A step moves 16 bytes an element over the bus, half of them each way. torch rounds page-locked tensors up to a power
    of two, unless its allocator is told otherwise.
    """

    BYTES_IN_A_SLICE = 8

    def __init__(self, params: Iterable[Any], **settings: Any) -> None:
        super().__init__(params, **settings)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = self._new(p)

    def host_tensors(self) -> list[Tensor]:
        """What is in host memory, for a plan to leave out: there from the start, until `state.clear()`."""
        return [state[name] for state in self.state.values() for name in MOMENTS]

    def _new(self, p: Tensor) -> State:
        like = {"dtype": torch.float32, "device": "cpu", "pin_memory": p.is_cuda}
        return {"step": 0} | {name: torch.zeros_like(p, **like) for name in MOMENTS}

    def _fetch(self, p: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        # Copied on a CPU too, where a plan has it stand for the device. The copies are ordered by the device's stream.
        m_N, v_N = (
            torch.empty_like(host_N[part], device=p.device).copy_(host_N[part], non_blocking=True)
            for host_N in _flat_moments(self.state[p], like=p)
        )
        return m_N, v_N

    def _keep(self, p: Tensor, part: slice, m_N: Tensor, v_N: Tensor) -> None:
        for host_N, moment_N in zip(_flat_moments(self.state[p], like=p), (m_N, v_N), strict=True):
            host_N[part].copy_(moment_N)

    def _adopt(self, p: Tensor, saved: State) -> None:
        for name in MOMENTS:
            self.state[p][name].copy_(saved[name])


class AdamW8bit(_SlicedAdamW):
    """AdamW with moments in 8 bits, block-wise and dynamic (arXiv 2110.02861, sections 2.1 and 2.2).

    A block's moments are divided by the largest of them and each is rounded to the nearest of 256 codes, dense near
    zero. One thing differs from the paper: a second moment above zero never becomes zero, since it divides.

    bitsandbytes and torchao have this optimiser too. Neither is on every machine, torchao's needs a compiler, and what
    their kernels allocate inside is invisible to a plan.
    """

    BYTES_IN_A_SLICE = 18

    def _block(self, p: Tensor) -> int:
        return BLOCK_ELEMENTS if self._codes(p) else 1

    def _new(self, p: Tensor) -> State:
        state: State = {"step": 0}
        for name, code in self._codes(p).items():
            state[f"{name}_codes"] = torch.full((p.numel(),), code.zero, dtype=torch.uint8, device=p.device)
            state[f"{name}_scales"] = torch.zeros(-(-p.numel() // BLOCK_ELEMENTS), device=p.device)
        return state if len(state) > 1 else state | {name: torch.zeros_like(p) for name in MOMENTS}

    def _fetch(self, p: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        state, codes = self.state[p], self._codes(p)
        if codes:
            m_N, v_N = (code.decode(*_of_slice(state, name, part)) for name, code in codes.items())
        else:
            m_N, v_N = (moment_N[part] for moment_N in _flat_moments(state, like=p))
        return m_N, v_N

    def _keep(self, p: Tensor, part: slice, m_N: Tensor, v_N: Tensor) -> None:
        # A small parameter has no codes: its moments were updated where they are.
        for (name, code), x_N in zip(self._codes(p).items(), (m_N, v_N), strict=False):
            code.encode_(x_N, *_of_slice(self.state[p], name, part))

    def _adopt(self, p: Tensor, saved: State) -> None:
        state = self.state[p]
        for name in state.keys() & saved.keys() - {"step"}:
            state[name].copy_(saved[name])
        if "exp_avg" in saved and "exp_avg" not in state:
            m_N, v_N = _flat_moments(saved, like=p)
            for part in _slices(p.numel(), block=BLOCK_ELEMENTS):
                self._keep(p, part, *(x_N[part].to(p.device, copy=True) for x_N in (m_N, v_N)))

    def _codes(self, p: Tensor) -> dict[str, Code]:
        """The code of each moment; none for a small parameter."""
        if p.numel() < SMALL_ELEMENTS:
            return {}
        kept = vars(self).setdefault("_codes_on", {})  # not from __init__: a deep copy is made without it
        if p.device not in kept:
            kept[p.device] = {"exp_avg": Code.on(p.device, "signed"), "exp_avg_sq": Code.on(p.device, "unsigned")}
        return kept[p.device]


@dataclass(frozen=True)
class Code:
    """256 numbers for what lies in [-1, 1] (signed) or [0, 1], and the nearest of them to any other.

    The nearest is found in two look-ups and a comparison, and exactly: the upper half of a float32 (sign, exponent, 7
    bits of the fraction) leaves at most two codes open. A CPU does it ten times faster than the 8 steps of a search.
    """

    zero: int
    """The code of 0."""
    values_C: Tensor
    """float32, rising."""
    limits_C: Tensor
    """float32: a number above the i-th is nearer to code i + 1 than to code i."""
    lowest_H: Tensor
    """int32: the code of the least number with this upper half."""

    @classmethod
    def on(cls, device: torch.device | str, kind: Literal["signed", "unsigned"]) -> Code:
        """The code in the memory of a device, where it takes 0.25 MiB."""
        values = dynamic_code(kind)
        limits = [(a + b) / 2 for a, b in pairwise(values)] + [float("inf")]
        if kind == "unsigned":
            limits[0] = 0.0  # only zero is zero
        limits_C = torch.tensor(limits, device=device)
        upper_H = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32, device=device)
        least_H = (upper_H << 16) | (upper_H < 0).int() * 0xFFFF  # the lower half takes a negative number further down
        lowest_H = torch.bucketize(least_H.view(torch.float32), limits_C[:-1], out_int32=True)
        return cls(values.index(0.0), torch.tensor(values, device=device), limits_C, lowest_H)

    def decode(self, codes_N: Tensor, scales_K: Tensor) -> Tensor:
        """float32 [N] of uint8 codes and the scales of their blocks."""
        x_N = self.values_C.index_select(0, codes_N.int())
        x_N.view(len(scales_K), -1).mul_(scales_K[:, None])
        return x_N

    def encode_(self, x_N: Tensor, codes_N: Tensor, scales_K: Tensor) -> None:
        """Write the codes and scales of x_N, which is spoiled."""
        x_KE = x_N.view(len(scales_K), -1)
        torch.maximum(x_KE.amax(1), x_KE.amin(1).neg_(), out=scales_K)
        x_KE.div_(scales_K.clamp_min_(torch.finfo(torch.float32).tiny)[:, None])  # zeros stay zeros
        low_N = self.lowest_H.index_select(0, (x_N.view(torch.int32) >> 16).add_(1 << 15))
        codes_N.copy_(low_N.add_(x_N > self.limits_C.index_select(0, low_N)))


def dynamic_code(kind: Literal["signed", "unsigned"]) -> list[float]:
    """The dynamic data type of arXiv 2110.02861: 256 rising numbers, 0 and 1 (but not -1) among them.

    Each decade from [1e-7, 1e-6] up to [0.1, 1] is cut into twice as many equal cells as the one below it, 64 in the
    last for signed and 128 for unsigned numbers; the codes are the cells' middles.
    """
    cells = {"signed": 64, "unsigned": 128}[kind]
    positive = [
        10.0**exponent * (0.1 + 0.9 * (i + 0.5) / (cells >> -exponent))
        for exponent in range(-6, 1)
        for i in range(cells >> -exponent)
    ]
    negative = [-value for value in reversed(positive)] if kind == "signed" else []
    return [*negative, 0.0, *positive, 1.0]


def _slices(elements: int, *, block: int) -> Iterator[slice]:
    """Slices of whole blocks, then what is left as a block of its own."""
    whole = elements - elements % block
    units = -(-elements // (SLICES * BLOCK_ELEMENTS))
    size = max(units * BLOCK_ELEMENTS, LEAST_SLICE_ELEMENTS)
    for start in range(0, whole, size):
        yield slice(start, min(start + size, whole))
    if whole < elements:
        yield slice(whole, elements)


def _of_slice(state: State, name: str, part: slice) -> tuple[Tensor, Tensor]:
    """Codes and scales."""
    blocks = slice(part.start // BLOCK_ELEMENTS, -(-part.stop // BLOCK_ELEMENTS))
    return state[f"{name}_codes"][part], state[f"{name}_scales"][blocks]


def _flat_moments(state: State, *, like: Tensor) -> list[Tensor]:
    return [_ordered(state[name], like=like).reshape(-1) for name in MOMENTS]


def _ordered(x: Tensor, *, like: Tensor) -> Tensor:
    """`x` with its dimensions in the order in which `like` has them in memory, so that `like` itself is contiguous."""
    return x.permute(sorted(range(like.ndim), key=like.stride, reverse=True))


_KINDS: dict[recipe.Optimizer, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, fused=True),
    "adamw_host": HostAdamW,
    "adamw_8bit": AdamW8bit,
}
