"""A model of float32 weights under 16-bit compute is the cast model, bit for bit, and keeps no copy of a linear's weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

import tiny
from snugtune.data.pack import collate
from snugtune.kernels import attention
from snugtune.memory import master, recompute
from snugtune.models import load
from snugtune.planner.simulate import LiveBytes
from snugtune.step import Scorer

NAMES = [*tiny.VARIANTS, *tiny.UNLISTED]
LENGTHS = [19, 18, 9, 4, 3, 1]
HALVES = [torch.bfloat16, torch.float16]


def _made(name: str, *, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    attn = "sdpa" if name in tiny.UNLISTED else attention.NAME
    return tiny.model(name, attn=attn, dtype=dtype, **changes).requires_grad_(True).train()


def _over_float32(name: str, dtype: torch.dtype, **changes: Any) -> PreTrainedModel:
    model = _made(name, **changes)
    master.apply(model, dtype)
    return model


def _loss_and_gradients(model: PreTrainedModel) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(3)
    loss = Scorer(model, chunk_tokens=7)._loss(collate(tiny.rows(LENGTHS)))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _looked_up_or_head(model: PreTrainedModel) -> set[str]:
    """Weights whose gradients are summed in float32, where the cast model rounds as it sums."""
    owners = [m for m in model.modules() if isinstance(m, nn.Embedding) or m is model.get_output_embeddings()]
    found = {id(p) for owner in owners for p in owner.parameters()}
    return {name for name, p in model.named_parameters() if id(p) in found}


# --- it is the cast model --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_are_the_cast_models(name: str, dtype: torch.dtype):
    ours, cast = _over_float32(name, dtype), _made(name, dtype=dtype)
    loss, gradients = _loss_and_gradients(ours)
    cast_loss, cast_gradients = _loss_and_gradients(cast)
    assert torch.equal(loss, cast_loss), f"{name}: loss {loss} of the model over float32, {cast_loss} of the cast one"
    assert not torch.equal(loss, _loss_and_gradients(_made(name))[0]), "this test compares nothing"
    assert gradients.keys() == cast_gradients.keys()
    assert {p.dtype for p in ours.parameters()} == {g.dtype for g in gradients.values()} == {torch.float32}
    # A family that goes row by row sums its rows' gradients in float32 here, and in 16 bits in the cast model.
    near = _looked_up_or_head(ours) if name in tiny.VARIANTS else gradients.keys()
    for weight, expected in cast_gradients.items():
        if weight in near:
            tiny.assert_close(gradients[weight], expected, within=1e-2, name=f"{name}: gradient of {weight}")
        else:
            assert torch.equal(gradients[weight], expected.float()), f"{name}: gradient of {weight}"


@pytest.mark.parametrize("name", ["llama-tied", "gpt2"])
def test_looked_up_rows_have_more_exact_gradients_than_the_cast_model(name: str):
    """One token many times: its row's gradient is a sum of many, which 16 bits round as they go."""
    exact, ours, cast = _made(name), _over_float32(name, torch.bfloat16), _made(name, dtype=torch.bfloat16)
    ids = torch.full((1, 60), 7)
    found = []
    for model in (exact, ours, cast):
        rows = model.get_input_embeddings()(ids)
        assert rows.dtype == (torch.float32 if model is exact else torch.bfloat16)
        upstream = torch.linspace(0.5, 1.5, rows.numel()).view_as(rows).bfloat16().to(rows.dtype)
        found += torch.autograd.grad(rows, [model.get_input_embeddings().weight], upstream)
    exact_VD, ours_VD, cast_VD = found
    tiny.assert_close(ours_VD, exact_VD, within=1e-6, name=f"{name}: gradient of the embedding")
    assert (cast_VD.float() - exact_VD).abs().max() > (ours_VD - exact_VD).abs().max()


@pytest.mark.parametrize("shape", [(5, 8), (1, 5, 8), (2, 3, 5, 8)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [nn.Linear, Conv1D])
def test_a_linear_is_the_cast_linear(kind: type[nn.Module], bias: bool, shape: tuple[int, ...]):
    if kind is Conv1D and not bias:
        pytest.skip("Conv1D always has a bias")
    torch.manual_seed(0)
    ours = nn.Linear(8, 6, bias=bias) if kind is nn.Linear else Conv1D(6, 8)
    nn.init.normal_(ours.weight)
    cast = type(ours)(8, 6, bias) if isinstance(ours, nn.Linear) else Conv1D(6, 8)
    cast.load_state_dict(ours.state_dict())
    cast.bfloat16()
    master.apply(ours, torch.bfloat16)
    for strided in (False, True):
        x = torch.randn(*shape, 2)[..., 0] if strided else torch.randn(shape)
        results = []
        for layer in (ours, cast):
            x16 = x.bfloat16().requires_grad_()
            y = layer(x16)
            y.backward(torch.sin(torch.arange(y.numel())).view_as(y).bfloat16())
            results.append([y, x16.grad, *(p.grad.float() for p in layer.parameters())])
            layer.zero_grad()
        for mine, theirs in zip(*results, strict=True):
            assert torch.equal(mine, theirs)


def test_an_input_of_another_dtype_is_an_error_as_in_the_cast_model():
    layer = nn.Linear(4, 4)
    master.apply(layer, torch.bfloat16)
    with pytest.raises(RuntimeError, match="dtype"):
        layer(torch.randn(2, 4))


def test_updated_weights_are_used_by_the_next_forward_and_may_move_by_less_than_16_bits_tell():
    ours = _over_float32("llama", torch.bfloat16)
    weight = ours.model.layers[0].mlp.up_proj.weight
    before, first = weight.detach().clone(), _loss_and_gradients(ours)[0]
    for _ in range(400):
        weight.data.mul_(1 + 1e-4)  # alone, bf16 would round each of these away
    cast = _made("llama", dtype=torch.bfloat16)
    cast.model.layers[0].mlp.up_proj.weight.data = weight.detach().bfloat16()
    after = _loss_and_gradients(ours)[0]
    assert torch.equal((before.bfloat16() * (1 + 1e-4)).bfloat16(), before.bfloat16())
    assert not torch.equal(after, first)
    assert torch.equal(after, _loss_and_gradients(cast)[0])


def test_frozen_weights_get_no_gradient_and_let_it_through():
    ours = _over_float32("llama", torch.bfloat16)
    for name, p in ours.named_parameters():
        p.requires_grad_("layers.0.self_attn.q_proj" in name)
    (name,) = _loss_and_gradients(ours)[1]
    assert name == "model.layers.0.self_attn.q_proj.weight"


# --- beside other techniques -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["selective", "block"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "phi"])
def test_recompute_is_bit_equal(name: str, policy: Any):
    """Dropout included where the family has it."""
    changes = {"resid_pdrop": 0.1} if name in ("gpt2", "phi") else {}
    plain, again = (_over_float32(name, torch.bfloat16, **changes) for _ in range(2))
    recompute.apply(Scorer(again).parts, policy)
    loss, gradients = _loss_and_gradients(plain)
    same_loss, same_gradients = _loss_and_gradients(again)
    assert torch.equal(loss, same_loss)
    assert gradients.keys() == same_gradients.keys()
    for weight, gradient in gradients.items():
        assert torch.equal(same_gradients[weight], gradient), f"{name}, {policy}: gradient of {weight}"


@pytest.mark.parametrize("policy", ["none", "selective", "block"])
@pytest.mark.parametrize("name", NAMES)
def test_it_runs_on_fake_tensors(name: str, policy: Any):
    """A fake tensor has no value, so that a look at one is an error."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = load.shell(tiny.config(name), torch.float32).requires_grad_(True).train()
        master.apply(model, torch.bfloat16)
        recompute.apply(Scorer(model).parts, policy)
        _, gradients = _loss_and_gradients(model)
    assert gradients.keys() == {weight for weight, _ in model.named_parameters()}
    assert {g.dtype for g in gradients.values()} == {torch.float32}


# --- on and off ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "gemma2"])
def test_names_and_tensors_stay_and_removing_gives_the_float32_model_back(name: str, tmp_path: Path):
    model, plain = _made(name), _made(name)
    before = model.state_dict(keep_vars=True)
    master.apply(model, torch.bfloat16)
    _loss_and_gradients(model)
    during = model.state_dict(keep_vars=True)
    assert during.keys() == before.keys()
    assert all(during[weight] is before[weight] for weight in before)
    model.zero_grad()
    master.remove(model)
    assert not [n for n, module in model.named_modules() if "forward" in vars(module)]
    loss, gradients = _loss_and_gradients(model)
    plain_loss, plain_gradients = _loss_and_gradients(plain)
    assert torch.equal(loss, plain_loss)
    assert all(torch.equal(gradients[weight], plain_gradients[weight]) for weight in plain_gradients)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=attention.NAME)
    for weight, p in loaded.named_parameters():
        assert torch.equal(p, plain.get_parameter(weight)), weight


def test_float32_compute_needs_no_stand_in():
    model = _made("llama")
    master.apply(model, torch.float32)
    assert not [n for n, module in model.named_modules() if "forward" in vars(module)]


def test_a_forward_that_fails_leaves_the_parameters_in_place():
    norm = nn.LayerNorm(4)
    own = dict(norm.named_parameters())
    master.apply(norm, torch.bfloat16)
    with pytest.raises(RuntimeError):
        norm(torch.randn(2, 5).bfloat16())
    assert all(p is own[name] for name, p in norm.named_parameters())


# --- memory ----------------------------------------------------------------------------------------------------------


def _kept_bytes(model: PreTrainedModel) -> int:
    """What the forward leaves alive for backward, besides the model."""
    batch = collate(tiny.rows(LENGTHS))
    with LiveBytes() as live:
        live.note([*model.parameters(), *model.buffers()])
        before = live.live_bytes
        loss = Scorer(model)._loss(batch)
        kept = live.live_bytes - before
        del loss
    return kept


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "llama-tied"])
def test_no_copy_of_a_linear_or_an_embedding_is_kept_for_backward(name: str):
    """The cast model's activations, and 16-bit copies of norms, which are next to nothing."""
    ours, cast = _over_float32(name, torch.bfloat16), _made(name, dtype=torch.bfloat16)
    vectors = sum(p.numel() * 2 for p in ours.parameters() if p.ndim == 1)
    smallest_matrix = min(p.numel() * 2 for p in ours.parameters() if p.ndim == 2)
    assert 0 <= _kept_bytes(ours) - _kept_bytes(cast) <= vectors
    assert vectors < 2 * smallest_matrix, "the bound would not see two kept copies"


def test_one_copy_of_a_weight_is_alive_at_a_time():
    """Forward: 16-bit copy and output. Backward: copy and input gradient, then the weight's gradient in both widths."""
    tokens, width = 4, 256
    layer = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(5)))
    master.apply(layer, torch.bfloat16)
    x = torch.randn(tokens, width).bfloat16().requires_grad_()
    layer(x).sum().backward()  # the gradients' own storages are there now
    copy_bytes, row_bytes = width * width * 2, tokens * width * 2
    with LiveBytes() as live:
        live.note([x, x.grad, *(t for p in layer.parameters() for t in (p, p.grad))])
        before = live.live_bytes
        y = layer(x)
        assert live.peak_bytes - before <= copy_bytes + 6 * row_bytes
        live.peak_bytes = live.live_bytes
        y.sum().backward()
        assert live.peak_bytes - before <= 3 * copy_bytes + 9 * row_bytes
