"""Recompute changes memory alone: gradients and random state are bit-equal to a run that keeps everything."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import PreTrainedModel

import tiny
from snugtune.adapters import lora
from snugtune.data.pack import collate
from snugtune.kernels import attention
from snugtune.memory import lean
from snugtune.memory import recompute as module
from snugtune.memory.recompute import recompute
from snugtune.models import load
from snugtune.models.blocks import anatomy
from snugtune.planner.live import LiveBytes
from snugtune.step import Scorer


class Block(nn.Module):
    """Two linears with dropout between them."""

    def __init__(self, dropout: float = 0.0, width: int = 6) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.dropout(torch.tanh(self.up(x)), self.dropout, self.training))


Runs = Callable[[nn.Module, Tensor], Tensor]


def _plain(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


def _recomputed(block: nn.Module, x: Tensor) -> Tensor:
    return recompute(block, x)


def _stack(blocks: Sequence[nn.Module], x: Tensor, run: Runs) -> dict[str, Tensor]:
    """Loss, gradients, and the random state at the end."""
    torch.manual_seed(3)
    x = x.detach().requires_grad_(x.requires_grad)
    y = x
    for block in blocks:
        y = run(block, y)
    loss = y.float().square().mean()
    loss.backward()
    found = {"loss": loss.detach(), "random state": torch.get_rng_state()}
    found |= {"input": x.grad} if x.grad is not None else {}
    for number, block in enumerate(blocks):
        for name, p in block.named_parameters():
            if p.grad is not None:
                found[f"block {number} {name}"] = p.grad
                p.grad = None
    return found


def _assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys(), f"missing or new: {got.keys() ^ expected.keys()}"
    for name in expected:
        assert got[name].dtype == expected[name].dtype, name
        assert torch.equal(got[name], expected[name]), f"{name} differs from the run that keeps everything"


@given(
    dropout=st.sampled_from([0.0, 0.1, 0.5]), depth=st.integers(1, 3), rows=st.integers(1, 5), seed=st.integers(0, 99),
    needs_gradient=st.booleans(), frozen=st.sets(st.sampled_from(["up.weight", "up.bias", "down.weight"])),
)  # fmt: skip
def test_gradients_and_random_state_are_bit_equal(
    dropout: float, depth: int, rows: int, seed: int, needs_gradient: bool, frozen: set[str]
):  # fmt: skip
    torch.manual_seed(seed)
    blocks = [Block(dropout) for _ in range(depth)]
    for block in blocks:
        for name in frozen:
            block.get_parameter(name).requires_grad_(False)
    x = torch.randn(rows, 6, requires_grad=needs_gradient)
    _assert_same(_stack(blocks, x, _recomputed), _stack(blocks, x, _plain))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("first_input_needs_gradient", [True, False])
def test_autocast_of_the_forward_is_restored_for_the_second_run(dropout: float, first_input_needs_gradient: bool):
    """Backward is called outside of autocast, as PyTorch advises."""
    blocks = [Block(dropout), Block(dropout)]
    x = torch.randn(4, 6, requires_grad=first_input_needs_gradient)

    def with_autocast(run: Runs) -> dict[str, Tensor]:
        def inner(block: nn.Module, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = run(block, x)
            seen.append(block.up(x).dtype)
            return y

        return _stack(blocks, x, inner)

    seen: list[torch.dtype] = []
    expected = with_autocast(_plain)
    _assert_same(with_autocast(_recomputed), expected)
    assert set(seen) == {torch.float32}, "autocast leaked out of the block"
    no_autocast = _stack(blocks, x, _plain)
    assert not torch.equal(no_autocast["loss"], expected["loss"]), "this test compares nothing"


def test_one_autocast_region_around_recomputed_and_plain_blocks():
    """A parameter's low-precision copy made without gradients must not serve a later use with them."""
    blocks = [Block(), Block()]
    x = torch.randn(4, 6)

    def losses(run: Runs) -> dict[str, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = run(blocks[0], x)
            y = blocks[1](blocks[0](y))  # the same weights again, kept this time
        y.float().sum().backward()
        return {f"{i} {n}": p.grad for i, b in enumerate(blocks) for n, p in b.named_parameters() if p.grad is not None}

    found = losses(_recomputed)
    assert len(found) == 8, f"only {sorted(found)} got a gradient"
    blocks = copy.deepcopy(blocks)
    for block in blocks:
        block.zero_grad()
    for name, gradient in losses(_plain).items():
        tiny.assert_close(found[name], gradient, within=2e-2, name=name)  # bf16 sums in another order


@given(dropout=st.sampled_from([0.0, 0.4]), splits=st.integers(1, 3))
def test_nested_recompute(dropout: float, splits: int):
    torch.manual_seed(splits)
    blocks = [Block(dropout) for _ in range(4)]
    whole = nn.Sequential(*blocks)
    x = torch.randn(3, 6)

    def nested(_: nn.Module, x: Tensor) -> Tensor:
        def first(y: Tensor) -> Tensor:
            for block in blocks[:splits]:
                y = recompute(block, y)
            return y

        def outer(y: Tensor) -> Tensor:
            y = recompute(first, y, parameters=[p for b in blocks[:splits] for p in b.parameters()])
            for block in blocks[splits:]:
                y = recompute(block, y)
            return y

        return recompute(outer, x, parameters=whole.parameters())

    _assert_same(_stack([whole], x, nested), _stack([whole], x, _plain))


def test_arguments_of_every_kind_go_in_and_come_out():
    weight = torch.randn(5, 5, requires_grad=True)

    def function(
        x: Tensor, table: dict[str, Any], *, index: Tensor, mode: str, pairs: tuple[Tensor, ...], nothing: None
    ):
        assert mode == "sum"
        assert nothing is None
        assert table["name"] == "table"
        y = (x @ weight)[index] * table["deep"][0][1] + pairs[0] - pairs[1]
        return {"y": y, "index": index + 1, "mode": mode, "both": [y * 2, None], "mask": y > 0}

    def run(call: Callable[..., Any]) -> tuple[Any, dict[str, Tensor | None]]:
        torch.manual_seed(0)
        x, scale, left, right = (torch.randn(5, 5) for _ in range(4))
        wanted = {"x": x, "scale": scale, "right": right, "weight": weight}
        for t in wanted.values():
            t.requires_grad_()
        out = call(
            function, x, {"name": "table", "deep": [(2.0, scale)]}, index=torch.tensor([0, 3, 3, 1, 4]), mode="sum",
            pairs=(left, right), nothing=None,
        )  # fmt: skip
        gradients = torch.autograd.grad(out["y"].sum() + out["both"][0].square().sum(), list(wanted.values()))
        return out, dict(zip(wanted, gradients, strict=True))

    got, got_gradients = run(lambda f, *args, **kwargs: recompute(f, *args, parameters=[weight], **kwargs))
    expected, expected_gradients = run(lambda f, *args, **kwargs: f(*args, **kwargs))
    _assert_same(got_gradients, expected_gradients)  # type: ignore[arg-type]
    assert got.keys() == expected.keys()
    assert (got["mode"], got["both"][1]) == ("sum", None)
    assert torch.equal(got["index"], expected["index"])
    assert torch.equal(got["mask"], expected["mask"])
    assert not got["index"].requires_grad
    assert not got["mask"].requires_grad


def test_an_output_that_nothing_trainable_flows_into_asks_for_no_gradient():
    """Also when the loss uses it: it adds nothing, and backward does not stumble over it."""
    weight = torch.randn(4, 4, requires_grad=True)
    constant = torch.randn(4)

    def function(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x @ weight, constant * 2, x.detach()

    x = torch.randn(3, 4, requires_grad=True)
    y, doubled, detached = recompute(function, x, parameters=[weight])
    got = torch.autograd.grad(y.sum() + doubled.sum() + detached.sum(), [x, weight])
    y, doubled, detached = function(x)
    expected = torch.autograd.grad(y.sum() + doubled.sum() + detached.sum(), [x, weight])
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_only_one_of_two_outputs_is_used():
    block = Block()
    x = torch.randn(3, 6, requires_grad=True)

    def two(x: Tensor) -> tuple[Tensor, Tensor]:
        y = block(x)
        return y, y * 3

    for used in (0, 1):
        got = torch.autograd.grad(
            recompute(two, x, parameters=block.parameters())[used].sum(), [x, *block.parameters()]
        )
        expected = torch.autograd.grad(two(x)[used].sum(), [x, *block.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), f"output {used}"


def test_an_input_given_back_as_it_is_and_one_given_twice():
    weight = torch.randn(4, 4, requires_grad=True)

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, x @ weight + y

    x = torch.randn(3, 4, requires_grad=True)
    same, out = recompute(function, x * 1, x, parameters=[weight])
    got = torch.autograd.grad((same * out).sum(), [x, weight])
    same, out = function(x * 1, x)
    expected = torch.autograd.grad((same * out).sum(), [x, weight])
    for a, b in zip(got, expected, strict=True):
        tiny.assert_close(a, b, within=1e-6, name="gradient")


def test_a_parameter_shared_by_two_blocks_gets_both_gradients():
    first, second = Block(0.2), Block(0.2)
    second.up.weight = first.up.weight
    x = torch.randn(3, 6)
    _assert_same(_stack([first, second], x, _recomputed), _stack([first, second], x, _plain))


def test_a_parameter_that_the_block_does_not_use_gets_none():
    block = Block()
    block.extra = nn.Parameter(torch.ones(3))
    recompute(block, torch.randn(3, 6)).sum().backward()
    assert block.extra.grad is None
    assert block.up.weight.grad is not None


def test_without_gradients_the_function_runs_once_and_keeps_nothing():
    calls = []
    with torch.no_grad():
        y = recompute(lambda x: calls.append(1) or x * 2, torch.ones(2, requires_grad=True))
    assert len(calls) == 1
    assert not y.requires_grad


def test_nothing_trainable_means_no_gradient():
    block = Block().requires_grad_(False)
    assert not recompute(block, torch.randn(3, 6)).requires_grad


def test_backward_twice_through_a_kept_graph():
    block = Block(0.3)
    x = torch.randn(3, 6, requires_grad=True)
    y = recompute(block, x).sum()
    first = torch.autograd.grad(y, [x, *block.parameters()], retain_graph=True)
    torch.rand(9)  # the state of the first forward counts, not the one of now
    second = torch.autograd.grad(y, [x, *block.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_autograd_grad_leaves_the_fields_of_parameters_alone():
    block = Block()
    x = torch.randn(3, 6, requires_grad=True)
    (gradient,) = torch.autograd.grad(recompute(block, x).sum(), [x])
    (expected,) = torch.autograd.grad(block(x).sum(), [x])
    assert torch.equal(gradient, expected)
    assert all(p.grad is None for p in block.parameters())


def test_random_state_is_put_back_after_backward_even_if_the_second_run_fails():
    calls = []

    def function(x: Tensor) -> Tensor:
        calls.append(torch.get_rng_state())
        if len(calls) == 2:
            raise RuntimeError("second run")
        return F.dropout(x, 0.5)

    y = recompute(function, torch.ones(8, requires_grad=True))
    torch.rand(5)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="second run"):
        y.sum().backward()
    assert torch.equal(calls[0], calls[1]), "the second run saw another random state than the first"
    assert torch.equal(torch.get_rng_state(), before)


def test_random_false_keeps_no_state():
    calls = []

    def function(x: Tensor) -> Tensor:
        calls.append(torch.get_rng_state())
        return x * 2

    y = recompute(function, torch.ones(2, requires_grad=True), random=False)
    torch.rand(1)
    y.sum().backward()
    assert not torch.equal(calls[0], calls[1])


# --- applied to the blocks of a model --------------------------------------------------------------------------------


def test_apply_gives_a_whole_model_the_same_gradients():
    def gradients(*, again: bool) -> dict[str, Tensor]:
        model = (
            tiny.model("llama", attn="eager", num_hidden_layers=3, attention_dropout=0.1).requires_grad_(True).train()
        )
        if again:
            module.apply_to(model.model.layers)
        torch.manual_seed(1)
        model(input_ids=torch.tensor([[5, 9, 77, 3]]), use_cache=False).logits.square().mean().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None} | {
            "random state": torch.get_rng_state()
        }

    _assert_same(gradients(again=True), gradients(again=False))


# --- selective: the MLPs alone ---------------------------------------------------------------------------------------

NAMES = [*tiny.VARIANTS, *tiny.UNLISTED]
NO_MLP = {"opt"}
NORMS_AFTER = {"exaone4", "olmo2", "olmo3"}
"""The MLP's input is the residual stream itself, whose gradient is then summed in another order: not bit-equal."""


def _whole_model(name: str, policy: Any, *, what: str = "full", **changes: Any) -> PreTrainedModel:
    model = tiny.model(name, attn="sdpa" if name in tiny.UNLISTED else attention.NAME, **changes)
    torch.manual_seed(2)
    if what == "full":
        model.requires_grad_(True)
    else:
        inside = {m for mlp in anatomy(model).mlps for m in mlp.modules()}
        targets = [n for n, m in model.named_modules() if m in inside and isinstance(m, lora.Linear)]
        lora.apply(model, tiny.recipe(what={"lora": {"target_modules": targets, "lora_dropout": 0.2}}).what.lora)
        for layer in lora.layers(model).values():
            layer.lora_B.data.normal_(std=0.1)
    module.apply(anatomy(model), policy)
    return model.train()


def _model_gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    torch.manual_seed(5)
    loss = Scorer(model)._loss(collate(tiny.rows([19, 18, 9, 4])))
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return gradients | {"loss": loss.detach(), "random state": torch.get_rng_state()}


@pytest.mark.parametrize("name", NAMES)
def test_selective_gives_the_same_gradients_in_every_family(name: str):
    got, expected = (_model_gradients(_whole_model(name, policy)) for policy in ("selective", "none"))
    if tiny.config(name).model_type not in NORMS_AFTER:
        _assert_same(got, expected)
        return
    assert torch.equal(got["loss"], expected["loss"])
    for weight in expected:
        tiny.assert_close(got[weight], expected[weight], within=1e-5, name=f"{name}: gradient of {weight}")


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "glm", "gemma2"])
def test_selective_repeats_the_dropout_of_adapters_inside_of_the_mlp(name: str):
    got, expected = (_model_gradients(_whole_model(name, policy, what="lora")) for policy in ("selective", "none"))
    assert [weight for weight in expected if "mlp" in weight and "lora_A" in weight]
    _assert_same(got, expected)


def test_selective_repeats_the_familys_own_dropout():
    got, expected = (
        _model_gradients(_whole_model("gpt2", policy, resid_pdrop=0.3)) for policy in ("selective", "none")
    )
    _assert_same(got, expected)
    plain = _model_gradients(_whole_model("gpt2", "none"))
    assert not torch.equal(plain["loss"], expected["loss"]), "nothing was dropped"


@pytest.mark.parametrize("what", ["full", "lora"])
@pytest.mark.parametrize("name", sorted(set(NAMES) - NO_MLP - set(tiny.UNLISTED)))
def test_selective_keeps_less_than_none_and_more_than_block(name: str, what: str):
    kept = {}
    for policy in ("none", "selective", "block"):
        model = _whole_model(name, policy, what=what)
        batch = collate(tiny.rows([40, 38, 20]))
        with LiveBytes() as live:
            live.note([*model.parameters(), *model.buffers()])
            before = live.live_bytes
            loss = Scorer(model)._loss(batch)
            kept[policy] = live.live_bytes - before
            del loss
    assert kept["block"] < kept["selective"] < kept["none"], kept
    inside = 98 * tiny.config(name).to_dict().get("intermediate_size", 128) * 4 * 2
    assert kept["none"] - kept["selective"] >= inside, f"at least one tensor of the MLP's width for each block: {kept}"


def test_a_family_without_recognised_mlps_recomputes_whole_blocks_under_selective():
    model = tiny.model("opt", attn="sdpa")
    parts = anatomy(model)
    assert parts.mlps == ()

    def stood_in_for() -> list[nn.Module]:
        return [m for m in model.modules() if "forward" in vars(m)]

    for nothing in (None, "none"):
        module.apply(parts, nothing)
        assert stood_in_for() == []
    module.apply(parts, "selective")
    assert stood_in_for() == list(parts.blocks)


def test_every_other_family_names_one_mlp_for_each_block():
    for name in NAMES:
        parts = anatomy(tiny.model(name, attn="eager"))
        if name in NO_MLP:
            continue
        assert len(parts.mlps) == len(parts.blocks) == 2, name
        for mlp, block in zip(parts.mlps, parts.blocks, strict=True):
            inside = {id(p) for p in mlp.parameters()}
            assert inside and inside < {id(p) for p in block.parameters()}, name
            assert not [n for n, _ in mlp.named_modules() if "attn" in n or "norm" in n], name


# --- memory ----------------------------------------------------------------------------------------------------------


def _bytes_kept(blocks: Sequence[nn.Module], run: Runs, rows: int) -> int:
    with LiveBytes() as live:
        live.note([p for block in blocks for p in block.parameters()])
        before = live.live_bytes
        x = torch.randn(rows, 32)
        y = x
        for block in blocks:
            y = run(block, y)
        return live.live_bytes - before


@pytest.mark.parametrize("depth", [1, 4])
def test_what_is_kept_is_the_inputs_of_the_blocks_and_nothing_of_their_inside(depth: int):
    rows = 500
    blocks = [Block(0.1, width=32) for _ in range(depth)]
    random_states = depth * torch.get_rng_state().nbytes
    assert _bytes_kept(blocks, _recomputed, rows) <= (depth + 1) * rows * 32 * 4 + random_states
    assert _bytes_kept(blocks, _plain, rows) > (depth + 1) * rows * 32 * 4 + random_states, "the test sees nothing"


def test_the_peak_of_a_deep_stack_falls():
    def peak(run: Runs) -> int:
        blocks = [Block(0.0, width=32) for _ in range(8)]
        with LiveBytes() as live:
            y = torch.randn(500, 32)
            for block in blocks:
                y = run(block, y)
            y.sum().backward()
        return live.peak_bytes

    assert peak(_recomputed) < 0.6 * peak(_plain)


def test_nothing_is_alive_after_backward():
    block = Block(width=32)
    block.zero_grad(set_to_none=False)
    recompute(block, torch.randn(4, 32)).sum().backward()  # the gradients' own storages are there now
    with LiveBytes() as live:
        live.note([t for p in block.parameters() for t in (p, p.grad)])
        before = live.live_bytes
        recompute(block, torch.randn(500, 32)).sum().backward()
        assert live.live_bytes == before, f"{live.live_bytes - before} bytes outlive the backward"


# --- tiles of tokens ---------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(tokens=st.integers(1, 100_000))
def test_tiles_cover_every_token_once_and_are_few(tokens: int):
    tiles = list(module._tiles(torch.empty(1, tokens, 0), module.TILE_TOKENS))
    assert [i for part in tiles for i in (part.start, part.stop)][1:-1] == [
        i for part in tiles[1:] for i in (part.start,) * 2
    ]
    assert tiles[0].start == 0 and tiles[-1].stop >= tokens > tiles[-1].start
    assert len(tiles) <= module.MOST_TILES
    assert len(tiles) == 1 or tiles[0].stop >= module.TILE_TOKENS


@pytest.mark.parametrize("tokens", [5, 16, 17, 40, 400])
def test_tiles_give_the_outputs_and_gradients_of_the_whole(tokens: int):
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(8, 24), nn.SiLU(), nn.Linear(24, 8))
    mlp[0].weight.requires_grad_(False)
    dy, results = torch.randn(1, tokens, 8), []
    for run in (lambda x: module.tiled(mlp, x, parameters=mlp.parameters(), tile_tokens=16), mlp):
        x = torch.randn(1, tokens, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = run(x)
        with torch.no_grad():
            tiny.assert_close(run(x), y, within=1e-6, name="without gradients")
        results.append(
            [y.detach(), *torch.autograd.grad(y, [x, *(p for p in mlp.parameters() if p.requires_grad)], dy)]
        )
    for got, expected in zip(*results, strict=True):
        tiny.assert_close(got, expected, within=1e-5, name=f"{tokens} tokens")


def test_the_inside_of_an_mlp_exists_for_a_tile_alone():
    peaks = []
    for tile in (10_000, 64):
        mlp = nn.Sequential(nn.Linear(8, 400), nn.SiLU(), nn.Linear(400, 8)).requires_grad_(False)
        x = torch.randn(1, 1024, 8, requires_grad=True)
        with LiveBytes() as live:
            module.tiled(mlp, x, parameters=(), tile_tokens=tile).sum().backward()
            peaks.append(live.peak_bytes)
    assert peaks[1] < peaks[0] / 4, peaks


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("policy", ["block", "offload"])
@pytest.mark.parametrize("what", ["full", "lora"])
def test_an_mlp_that_ends_its_block_is_not_needed_in_the_second_run(
    name: str, policy: str, what: str, monkeypatch: pytest.MonkeyPatch
):
    """Where it is skipped its output is NaN here: a family whose block looks at it again would have NaN gradients."""
    monkeypatch.setattr(module, "TILE_TOKENS", 16)
    unrun = []

    def forward(ctx: Any, function: Any, tile_tokens: int, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.function, ctx.tile_tokens = function, tile_tokens
        ctx.save_for_backward(x, *parameters)
        unrun.append(x)
        return torch.full_like(x, float("nan"))

    monkeypatch.setattr(module._Unrun, "forward", staticmethod(forward))
    results = []
    for chosen in (policy, "none"):
        model = tiny.model(name, attn="sdpa" if name in tiny.UNLISTED else attention.NAME)
        torch.manual_seed(2)
        if what == "full":
            model.requires_grad_(True)
        else:
            lora.apply(model, tiny.recipe(what={"lora": {"target_modules": "all-linear"}}).what.lora)
            for layer in lora.layers(model).values():
                layer.lora_B.data.normal_(std=0.1)
        lean.apply(model)
        module.apply(anatomy(model), chosen, random=False)
        results.append(_model_gradients(model.train()))
    parts = anatomy(model)
    assert bool(unrun) == (parts.ends_with_mlp and parts.packs and bool(parts.mlps)), name
    got, expected = results
    for weight in expected:
        tiny.assert_close(got[weight], expected[weight], within=2e-5, name=f"{name}: gradient of {weight}")


@pytest.mark.parametrize("base", ["plain", "int4"])
def test_a_frozen_last_projection_is_not_multiplied_with_a_second_time(base: str, monkeypatch: pytest.MonkeyPatch):
    model = tiny.model("llama", attn=attention.NAME, hidden_size=64, intermediate_size=128)
    if base == "int4":
        load.pack_linears(model, load.PACKINGS["int4"], filled=True)
    lora.apply(model, tiny.recipe(what={"lora": {"target_modules": ["q_proj"]}}).what.lora)
    for layer in lora.layers(model).values():
        layer.lora_B.data.normal_(std=0.1)
    lean.apply(model)
    down, calls = model.model.layers[0].mlp.down_proj, []
    down.register_forward_hook(lambda *_: calls.append(1))
    module.apply(anatomy(model), "block", random=False)
    _model_gradients(model.train())
    assert len(calls) == 1
