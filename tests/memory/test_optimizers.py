"""Moments elsewhere or in fewer bits: the host's are torch's AdamW to the bit, those in 8 bits are near it and small."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any, Literal, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import tiny
from snugtune import recipe
from snugtune.data.pack import collate
from snugtune.memory import optimizers
from snugtune.memory.optimizers import BLOCK_ELEMENTS, Code, HostAdamW, dynamic_code
from snugtune.planner.live import LiveBytes
from snugtune.step import Scorer
from snugtune.units import KIB, MIB

KINDS = get_args(recipe.Optimizer)
SIGNS: list[Literal["signed", "unsigned"]] = ["signed", "unsigned"]


@contextmanager
def _sizes(*, small: int = 4096, slice_elements: int = 256) -> Iterator[None]:
    """Slices that fall inside of small parameters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizers, "LEAST_SLICE_ELEMENTS", slice_elements)
        patch.setattr(optimizers, "SMALL_ELEMENTS", small)
        yield


def _make(kind: Any, params: Sequence[Tensor], *, decay: float = 0.1, lr: float = 1e-2) -> torch.optim.Optimizer:
    """The last parameter is in a group without decay."""
    groups = [{"params": list(params[:-1]), "weight_decay": decay}, {"params": [params[-1]], "weight_decay": 0.0}]
    return optimizers.make(kind, [g for g in groups if g["params"]], lr=lr, betas=(0.9, 0.999), eps=1e-8)


def _parameters(shapes: Sequence[tuple[int, ...]], seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def _run(
    optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter], *, steps: int = 5, first: int = 0,
    skipped: Sequence[tuple[int, int]] = (), size: float = 0.1,
) -> None:  # fmt: skip
    """Steps on random gradients, each with another learning rate; (step, parameter) in `skipped` gets no gradient."""
    for number in range(first, first + steps):
        generator = torch.Generator().manual_seed(number)
        for index, p in enumerate(params):
            grad = torch.randn(p.shape, generator=generator) * size
            p.grad = None if (number, index) in skipped else torch.empty_like(p).copy_(grad)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + number)
        optimizer.step()


def _assert_equal(got: Sequence[Tensor], expected: Sequence[Tensor], name: str) -> None:
    for index, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(a, b), f"{name}: parameter {index} {list(a.shape)} is off by {(a - b).abs().max():.3e}"


SHAPES = st.lists(
    st.one_of(
        st.just(()), st.tuples(st.integers(1, 1500)), st.tuples(st.integers(1, 60), st.integers(1, 40)),
        st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9)),
    ),
    min_size=1, max_size=4,
)  # fmt: skip


# --- in host memory --------------------------------------------------------------------------------------------------


@given(
    shapes=SHAPES, decay=st.sampled_from([0.0, 0.1]), seed=st.integers(0, 9), slice_elements=st.sampled_from([256, 768]),
    skipped=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=4),
)  # fmt: skip
def test_moments_in_host_memory_change_nothing(
    shapes: list[tuple[int, ...]], decay: float, seed: int, slice_elements: int, skipped: list[tuple[int, int]]
):
    ours, theirs = _parameters(shapes, seed), _parameters(shapes, seed)
    with _sizes(slice_elements=slice_elements):
        _run(_make("adamw_host", ours, decay=decay), ours, skipped=skipped)
    _run(_make("adamw", theirs, decay=decay), theirs, skipped=skipped)
    _assert_equal(ours, theirs, "host")


@pytest.mark.parametrize("kind", ["adamw_host", "adamw_8bit"])
def test_a_parameter_may_lie_in_memory_in_another_order(kind: str):
    """GGUF weights of a GPT-2 are transposed; a gradient usually lies as its parameter does, and need not."""
    plain = _parameters([(70, 60), (3, 40, 50), (5, 7)])
    turned = [nn.Parameter(p.detach().transpose(0, -1).contiguous().transpose(0, -1)) for p in plain]
    with _sizes():
        for params in (plain, turned):
            _run(_make(kind, params), params)
    if kind == "adamw_host":
        _assert_equal(turned, plain, kind)
    for got, expected in zip(turned, plain, strict=True):
        tiny.assert_close(got.detach(), expected.detach(), within=0.01, name=kind)


def test_a_gradient_in_another_order_is_taken_for_what_it_is():
    ours, theirs = _parameters([(70, 60)]), _parameters([(70, 60)])
    grad = torch.randn(60, 70)
    ours[0].grad, theirs[0].grad = grad.t(), grad.t().contiguous()
    with _sizes():
        _make("adamw_host", ours).step()
    _make("adamw", theirs).step()
    _assert_equal(ours, theirs, "host")


@pytest.mark.parametrize("kind", ["adamw_host", "adamw_8bit"])
def test_a_parameter_with_gaps_is_refused_and_not_left_as_it_was(kind: str):
    p = nn.Parameter(torch.randn(50, 60)[:, :40])
    p.grad = torch.ones(50, 40)
    with pytest.raises(RuntimeError, match="view size"):
        _make(kind, [p]).step()


def test_host_tensors_are_all_moments_from_the_start():
    params = _parameters([(50, 60), (7,), ()])
    optimizer = _make("adamw_host", params)
    assert isinstance(optimizer, HostAdamW)
    before = optimizer.host_tensors()
    assert sum(t.nbytes for t in before) == 8 * (50 * 60 + 7 + 1)
    assert all(t.device.type == "cpu" and t.dtype == torch.float32 for t in before)
    _run(optimizer, params)
    after = optimizer.host_tensors()
    assert [t.data_ptr() for t in before] == [t.data_ptr() for t in after], "moments stay where they are"
    assert all(t.any() for t in after)


# --- what holds for all ----------------------------------------------------------------------------------------------


def test_adamw_is_torchs():
    optimizer = _make("adamw", _parameters([(3, 2)]))
    assert type(optimizer) is torch.optim.AdamW and optimizer.defaults["fused"]


@pytest.mark.parametrize("kind", KINDS)
def test_cleared_state_is_forgotten(kind: str):
    """The next step is a first step again; what was cleared gives its memory back."""
    params = _parameters([(80, 60), (7,)])
    with _sizes():
        optimizer = _make(kind, params)
        _run(optimizer, params)
        optimizer.state.clear()
        assert not optimizer.state_dict()["state"]
        anew = [nn.Parameter(p.detach().clone()) for p in params]
        _run(optimizer, params, first=5)
        _run(_make(kind, anew), anew, first=5)
    _assert_equal(params, anew, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_gradient_nothing_moves(kind: str):
    params = _parameters([(80, 60), (90, 50), (7,)])
    before = [p.detach().clone() for p in params]
    _run(_make(kind, params), params, skipped=[(step, index) for step in range(5) for index in (0, 2)])
    assert torch.equal(params[0], before[0]) and torch.equal(params[2], before[2])
    assert not torch.equal(params[1], before[1])


def _through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@pytest.mark.parametrize("transfer", [_through_a_file, copy.deepcopy], ids=["file", "memory"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_state_goes_on_identically(kind: str, transfer: Callable[[Any], Any]):
    shapes = [(80, 60), (67, 71), (7,), ()]
    params = _parameters(shapes)
    with _sizes():
        optimizer = _make(kind, params)
        _run(optimizer, params, skipped=[(step, 1) for step in range(5)])  # one without a state
        state = transfer(optimizer.state_dict())
        resumed = [nn.Parameter(p.detach().clone()) for p in params]
        other = _make(kind, resumed, lr=1.0, decay=0.7)
        other.load_state_dict(state)
        assert [g["weight_decay"] for g in other.param_groups] == [0.1, 0.0]
        for optimizer_, params_ in ((optimizer, params), (other, resumed)):
            _run(optimizer_, params_, first=5)
    _assert_equal(resumed, params, kind)
    kept = [(name, x.dtype) for s in other.state.values() for name, x in s.items() if isinstance(x, Tensor)]
    assert kept == [(n, x.dtype) for s in optimizer.state.values() for n, x in s.items() if isinstance(x, Tensor)]


@pytest.mark.parametrize("kind", ["adamw_host", "adamw_8bit"])
def test_a_deep_copy_goes_on_identically(kind: str):
    params = _parameters([(80, 60), (7,)])
    with _sizes():
        optimizer = _make(kind, params)
        _run(optimizer, params)
        other = copy.deepcopy(optimizer)
        copied = [p for group in other.param_groups for p in group["params"]]
        _run(optimizer, params, first=5)
        _run(other, copied, first=5)
    _assert_equal(copied, params, kind)


@pytest.mark.parametrize(("old", "new"), [("adamw", "adamw_host"), ("adamw_host", "adamw"), ("adamw", "adamw_8bit")])
def test_float32_moments_may_move(old: str, new: str):
    """`how` may change between two halves of a run."""
    params = _parameters([(80, 60), (67, 71), (7,)])
    with _sizes():
        optimizer = _make(old, params)
        _run(optimizer, params)
        moved = [nn.Parameter(p.detach().clone()) for p in params]
        other = _make(new, moved)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        before = [p.detach().clone() for p in params]
        _run(optimizer, params, first=5)
        _run(other, moved, first=5)
    if new != "adamw_8bit":
        _assert_equal(moved, params, f"{old} to {new}")
    for got, expected, start in zip(moved, params, before, strict=True):
        tiny.assert_close(got.detach() - start, expected.detach() - start, within=0.2, name=f"way of {old} to {new}")


def test_8_bit_moments_are_not_taken_for_float32():
    params = _parameters([(80, 60)])
    optimizer = _make("adamw_8bit", params)
    _run(optimizer, params)
    with pytest.raises(KeyError, match="exp_avg"):
        _make("adamw_host", params).load_state_dict(optimizer.state_dict())


def test_other_groups_are_refused():
    with pytest.raises(ValueError, match="group"):
        _make("adamw_host", _parameters([(3,), (4,)])).load_state_dict(_make("adamw", _parameters([(3,)])).state_dict())


# --- memory ----------------------------------------------------------------------------------------------------------


def _measure(kind: str, shapes: Sequence[tuple[int, ...]], *, real: bool) -> tuple[int, int]:
    """Bytes between steps and at the peak of the second one, beyond parameters, gradients and the host's moments."""
    with pytest.MonkeyPatch.context() as patch, nullcontext() if real else FakeTensorMode(), LiveBytes() as live:
        # What is one operation from outside is looked into here.
        patch.setattr(optimizers, "adamw_slices", lambda p, grad, held, key: optimizers._walks[key]())
        params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer = _make(kind, params)
        live.note([params, [p.grad for p in params]])
        own = sum(2 * p.nbytes for p in params)
        if isinstance(optimizer, HostAdamW):
            live.note(optimizer.host_tensors())
            own += sum(t.nbytes for t in optimizer.host_tensors())
        optimizer.step()
        kept = live.live_bytes - own
        live.begin()
        optimizer.step()
        assert live.live_bytes - own == kept, "nothing piles up"
        if kind != "adamw":
            assert live.peak_bytes - own - kept <= optimizer.transient_bytes, "a plan adds enough"
        return kept, live.peak_bytes - own


CODES_BYTES = 2 * (4 * 65536 + 2 * 4 * 256)
"""Both codes' tables."""


@pytest.mark.parametrize("shape", [(4096, 4096), (32000, 1024), (1000, 1000)])
def test_host_moments_take_two_slices_of_the_device(shape: tuple[int, int]):
    elements = shape[0] * shape[1]
    slice_elements = min(elements, max(elements // 8, 1 << 20))
    kept, peak = _measure("adamw_host", [shape], real=False)
    assert kept == 0
    assert 8 * slice_elements <= peak <= 8 * slice_elements + 4 * KIB


@pytest.mark.parametrize("shape", [(4096, 4096), (32000, 1024), (1000, 1000)])
def test_8_bit_moments_take_two_bytes_an_element(shape: tuple[int, int]):
    elements = shape[0] * shape[1]
    slice_elements = min(elements, max(elements // 8, 1 << 20))
    kept, peak = _measure("adamw_8bit", [shape], real=False)
    assert kept <= 2.032 * elements + CODES_BYTES
    assert peak - kept <= 17.1 * slice_elements
    assert kept + peak < 0.8 * 8 * elements or elements < 4 * MIB


def test_small_parameters_keep_float32_moments():
    kept, _ = _measure("adamw_8bit", [(63, 65), (7,), ()], real=False)
    assert kept == 8 * (63 * 65 + 7 + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_on_fake_tensors_sees_every_byte(kind: str):
    """And nothing looks at a value: a fake tensor has none."""
    shapes = [(100, 90), (67, 71), (7,), ()]
    with _sizes(slice_elements=1024):
        assert _measure(kind, shapes, real=False) == _measure(kind, shapes, real=True)


# --- the 8-bit codes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SIGNS)
def test_codes_are_256_rising_numbers_with_zero_and_one(kind: Literal["signed", "unsigned"]):
    values = dynamic_code(kind)
    assert len(values) == 256 and all(a < b for a, b in pairwise(values))
    assert 0.0 in values and values[-1] == 1.0
    assert values[0] == 0.0 if kind == "unsigned" else -1 < values[0] < -0.99
    top = [v for v in values if 0.1 < v < 1]
    assert len(top) == {"signed": 64, "unsigned": 128}[kind], "half of the positive codes are in the last decade"
    assert min(v for v in values if v > 0) < 1e-6
    if kind == "signed":
        assert {-v for v in values if v < 0} == {v for v in values if 0 < v < 1}


def _encoded(x_N: Tensor, kind: Literal["signed", "unsigned"]) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and what they decode to."""
    code = Code.on("cpu", kind)
    codes_N, scales_K = torch.empty(len(x_N), dtype=torch.uint8), torch.empty(len(x_N) // BLOCK_ELEMENTS)
    code.encode_(x_N.clone(), codes_N, scales_K)
    return codes_N, scales_K, code.decode(codes_N, scales_K)


@pytest.mark.parametrize("kind", SIGNS)
@given(blocks=st.integers(1, 6), seed=st.integers(0, 999), decades=st.sampled_from([0, 2, 9]), size=st.integers(-30, 9))
def test_each_moment_becomes_its_nearest_code(kind: Literal["signed", "unsigned"], blocks, seed, decades, size):
    generator = torch.Generator().manual_seed(seed)
    x_N = torch.randn(blocks * BLOCK_ELEMENTS, generator=generator)
    x_N *= 10.0 ** (size - decades * torch.rand(x_N.shape, generator=generator))
    x_N[torch.rand(x_N.shape, generator=generator) < 0.1] = 0
    x_N = x_N if kind == "signed" else x_N.abs()
    codes_N, scales_K, got_N = _encoded(x_N, kind)

    assert torch.equal(scales_K, x_N.view(blocks, -1).abs().amax(1)), "a scale is the block's largest size"
    assert torch.equal(got_N[x_N == 0], x_N[x_N == 0]), "zero stays zero"
    assert (got_N * x_N >= 0).all(), "no sign changes"
    scale_N = scales_K.repeat_interleave(BLOCK_ELEMENTS)
    error_N = (got_N - x_N).abs() / scale_N
    assert error_N.max() <= {"signed": 0.0071, "unsigned": 0.0036}[kind], "half a cell of the last decade"
    coarse_N = (x_N.abs() > 1e-3 * scale_N) & (x_N.abs() <= scale_N)
    assert (error_N * scale_N / x_N.abs())[coarse_N].max() <= {"signed": 0.37, "unsigned": 0.2}[kind]
    if kind == "unsigned":
        assert (got_N[x_N > 0] > 0).all(), "only zero becomes zero: it divides"

    normal_N = x_N / scale_N
    nearest_N = torch.bucketize(normal_N, Code.on("cpu", kind).limits_C[:-1])
    assert torch.equal(codes_N.long(), nearest_N)


@pytest.mark.parametrize("kind", SIGNS)
def test_the_two_look_ups_are_a_search_at_every_limit(kind: Literal["signed", "unsigned"]):
    code = Code.on("cpu", kind)
    limits = code.limits_C[:-1]
    around = [torch.nextafter(limits, torch.tensor(to)) for to in (-2.0, 2.0)]
    upper = (torch.arange(65536, dtype=torch.int32) - 32768) << 16
    edges = [(upper + low).view(torch.float32) for low in (0, 1, 0xFFFF)]
    x = torch.cat([limits, *around, *edges])
    x = x[(x.abs() <= 1) & (x >= (-1 if kind == "signed" else 0))]
    x = torch.cat([x, torch.zeros(-len(x) % (BLOCK_ELEMENTS - 1))]).view(-1, BLOCK_ELEMENTS - 1)
    x_N = torch.cat([x, torch.ones(len(x), 1)], 1).flatten()  # so that every block's scale is one
    codes_N, scales_K, _ = _encoded(x_N, kind)
    assert (scales_K == 1).all()
    assert torch.equal(codes_N.long(), torch.bucketize(x_N, limits))


@pytest.mark.parametrize("kind", SIGNS)
def test_blocks_of_zeros_and_of_the_smallest_numbers_stay_finite(kind: Literal["signed", "unsigned"]):
    x_N = torch.zeros(2 * BLOCK_ELEMENTS)
    x_N[BLOCK_ELEMENTS:] = 1e-42
    got_N = _encoded(x_N, kind)[2]
    assert (got_N[:BLOCK_ELEMENTS] == 0).all() and got_N.isfinite().all()


# --- 8 bits train ----------------------------------------------------------------------------------------------------


def _losses(kind: str, loss: Callable[[], Tensor], params: list[nn.Parameter], *, steps: int, lr: float) -> float:
    """Mean of the last ten losses."""
    optimizer = optimizers.make(kind, [{"params": params, "weight_decay": 0.01}], lr=lr, betas=(0.9, 0.999), eps=1e-8)
    seen = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 - step / steps)
        now = loss()
        now.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(now.item())
    return sum(seen[-10:]) / 10


def _regression(kind: str) -> float:
    torch.manual_seed(0)
    x, target = torch.randn(512, 32), nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 4))
    y = target(x).detach() + 0.1 * torch.randn(512, 4)
    model = nn.Sequential(nn.Linear(32, 160), nn.ReLU(), nn.Linear(160, 160), nn.ReLU(), nn.Linear(160, 4))
    return _losses(kind, lambda: (model(x) - y).square().mean(), list(model.parameters()), steps=120, lr=3e-4)


def _transformer(kind: str) -> float:
    model = tiny.model("llama").requires_grad_().train()
    batch = collate(tiny.rows([20, 15, 10]))
    scorer = Scorer(model)
    return _losses(kind, lambda: scorer._loss(batch) / batch.label_tokens, list(model.parameters()), steps=120, lr=3e-3)


@pytest.mark.parametrize("train", [_regression, _transformer])
def test_8_bits_train_to_the_loss_of_float32(train: Callable[[str], float]):
    with _sizes(small=256, slice_elements=1 << 20):
        exact, got = train("adamw"), train("adamw_8bit")
    assert 0.95 <= got / exact <= 1.05, f"a loss of {got:.5f} in 8 bits, {exact:.5f} in float32"


def test_a_rare_gradient_does_not_throw_a_weight_away():
    """Beside a large neighbour a second moment is far below the codes; rounded to zero, as the paper has it, it would
    divide by eps and throw these weights to -7.6."""
    p = nn.Parameter(torch.zeros(4096))
    optimizer = _make("adamw_8bit", [p], lr=1e-3)
    for step in range(30):
        p.grad = torch.full((4096,), 1e-5 if step % 10 == 0 else 0.0)
        p.grad[::BLOCK_ELEMENTS] = 1.0
        optimizer.step()
    assert p.abs().max() < 0.05
