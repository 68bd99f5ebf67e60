"""The loss that is taken a chunk at a time is the plain cross-entropy, gradients too, and no [N, V] buffer exists."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import tiny
from snugtune.data.pack import collate
from snugtune.memory.chunked_loss import Head, chunked_loss, token_log_probs
from snugtune.planner.simulate import LiveBytes
from snugtune.step import Scorer


def _logits(h_ND: Tensor, head: Head) -> Tensor:
    z_NV = F.linear(h_ND.float(), head.weight_VD.float(), None if head.bias_V is None else head.bias_V.float())
    z_NV = z_NV * head.scale
    return z_NV if head.softcap is None else head.softcap * torch.tanh(z_NV / head.softcap)


def _plain(h_ND: Tensor, labels_N: Tensor, head: Head) -> Tensor:
    return F.cross_entropy(_logits(h_ND, head), labels_N, reduction="sum")


def _made(
    label_tokens: int, *, seed: int = 0, bias: bool = True, scale: float = 1.0, softcap: float | None = None,
    dtype: torch.dtype = torch.float32, width: int = 7, vocabulary: int = 23,
) -> tuple[Tensor, Tensor, Head]:  # fmt: skip
    torch.manual_seed(seed)
    h_ND = torch.randn(label_tokens, width, dtype=dtype, requires_grad=True)
    weight_VD = torch.randn(vocabulary, width, dtype=dtype, requires_grad=True)
    bias_V = torch.randn(vocabulary, dtype=dtype, requires_grad=True) if bias else None
    return h_ND, torch.randint(0, vocabulary, (label_tokens,)), Head(weight_VD, bias_V, scale, softcap)


def _inputs(h_ND: Tensor, head: Head) -> dict[str, Tensor]:
    found = {"hidden": h_ND, "weight": head.weight_VD, "bias": head.bias_V}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


@given(
    label_tokens=st.integers(1, 20), chunk=st.integers(1, 25), bias=st.booleans(), seed=st.integers(0, 50),
    scale=st.sampled_from([1.0, 0.3, 2.0]), softcap=st.sampled_from([None, 2.0, 30.0]),
    upstream=st.sampled_from([1.0, 0.01, 300.0]),
)  # fmt: skip
def test_loss_and_gradients_are_plain_cross_entropys_for_any_chunk(
    label_tokens: int, chunk: int, bias: bool, seed: int, scale: float, softcap: float | None, upstream: float
):
    h_ND, labels_N, head = _made(label_tokens, seed=seed, bias=bias, scale=scale, softcap=softcap)
    got, expected = chunked_loss(h_ND, labels_N, head, chunk_tokens=chunk), _plain(h_ND, labels_N, head)
    # A loss near zero is a difference of logits, and cannot be nearer than they are.
    tiny.assert_close(got.detach() + 1, expected.detach() + 1, within=1e-5, name="loss")
    inputs = _inputs(h_ND, head)
    gradients = torch.autograd.grad(got * upstream, list(inputs.values()))
    wanted = torch.autograd.grad(expected * upstream, list(inputs.values()))
    for name, mine, theirs in zip(inputs, gradients, wanted, strict=True):
        tiny.assert_close(mine, theirs, within=1e-5, name=f"gradient of {name}")


@pytest.mark.parametrize("trained", ["hidden", "weight", "bias"])
def test_each_input_gets_its_gradient_alone(trained: str):
    h_ND, labels_N, head = _made(9, scale=0.3, softcap=3.0)
    inputs = _inputs(h_ND, head)
    for name, tensor in inputs.items():
        tensor.requires_grad_(name == trained)
    (got,) = torch.autograd.grad(chunked_loss(h_ND, labels_N, head, chunk_tokens=4), [inputs[trained]])
    (expected,) = torch.autograd.grad(_plain(h_ND, labels_N, head), [inputs[trained]])
    tiny.assert_close(got, expected, within=1e-5, name=f"gradient of {trained}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_half_precision_is_near_and_sums_in_float32(dtype: torch.dtype, softcap: float | None):
    h_ND, labels_N, head = _made(300, dtype=dtype, softcap=softcap)
    got, expected = chunked_loss(h_ND, labels_N, head, chunk_tokens=7), _plain(h_ND, labels_N, head)
    assert got.dtype == torch.float32
    tiny.assert_close(got.detach(), expected.detach(), within=3e-3, name=f"{dtype} loss")
    inputs = _inputs(h_ND, head)
    gradients = torch.autograd.grad(got, list(inputs.values()))
    for (name, tensor), mine, theirs in zip(
        inputs.items(), gradients, torch.autograd.grad(expected, list(inputs.values())), strict=True
    ):
        assert mine.dtype == tensor.dtype, name
        tiny.assert_close(mine.float(), theirs.float(), within=2e-2, name=f"{dtype} gradient of {name}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_a_float32_head_under_16_bit_hidden_states_computes_as_the_cast_head(dtype: torch.dtype, softcap: float | None):
    """Loss and hidden states' gradient bit for bit; the head's own gradients arrive in float32."""
    h_ND, labels_N, cast = _made(60, dtype=dtype, softcap=softcap, scale=0.3)
    ours = Head(
        cast.weight_VD.detach().float().requires_grad_(), cast.bias_V.detach().float().requires_grad_(), 0.3, softcap
    )
    results = []
    for head in (ours, cast):
        loss = chunked_loss(h_ND, labels_N, head, chunk_tokens=7)
        results.append([loss, *torch.autograd.grad(loss, [h_ND, head.weight_VD, head.bias_V])])
    (loss, dh_ND, dweight_VD, dbias_V), (cast_loss, cast_dh_ND, cast_dweight_VD, cast_dbias_V) = results
    assert torch.equal(loss, cast_loss)
    assert torch.equal(dh_ND, cast_dh_ND)
    assert dweight_VD.dtype == dbias_V.dtype == torch.float32
    assert torch.equal(dweight_VD.to(dtype), cast_dweight_VD), "the cast head's gradient is this one, rounded"
    assert torch.equal(dbias_V.to(dtype), cast_dbias_V)


def test_large_logits_neither_overflow_nor_lose_the_loss():
    h_ND, labels_N, head = _made(6)
    big_ND = (h_ND.detach() * 1e4).requires_grad_()
    got, expected = chunked_loss(big_ND, labels_N, head, chunk_tokens=4), _plain(big_ND, labels_N, head)
    tiny.assert_close(got.detach(), expected.detach(), within=1e-5, name="loss")
    (gradient,) = torch.autograd.grad(got, [big_ND])
    assert gradient.isfinite().all()


def test_no_label_token_is_a_loss_of_zero_with_gradients_of_zero():
    h_ND, labels_N, head = _made(0)
    loss = chunked_loss(h_ND, labels_N, head, chunk_tokens=4)
    assert loss.item() == 0.0
    assert loss.dtype == torch.float32
    loss.backward()
    for name, tensor in _inputs(h_ND, head).items():
        assert tensor.grad is not None, name
        assert not tensor.grad.any(), name


def test_without_gradients_the_loss_is_the_same_and_none_is_prepared():
    h_ND, labels_N, head = _made(40, width=64, vocabulary=8)
    with torch.no_grad(), LiveBytes() as live:
        live.note([*_inputs(h_ND, head).values(), labels_N])
        before = live.live_bytes
        loss = chunked_loss(h_ND, labels_N, head, chunk_tokens=40)
        assert live.peak_bytes - before < h_ND.nbytes, "a gradient of the hidden states was prepared"
    tiny.assert_close(loss, _plain(h_ND, labels_N, head).detach(), within=1e-5, name="loss")


def test_a_second_backward_through_the_same_loss_is_an_error_and_not_a_wrong_gradient():
    h_ND, labels_N, head = _made(5)
    loss = chunked_loss(h_ND, labels_N, head, chunk_tokens=4) * 3
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# --- memory ----------------------------------------------------------------------------------------------------------

WIDTH, VOCABULARY = 8, 1000


def _peak_bytes(label_tokens: int, chunk: int, softcap: float | None = None) -> int:
    """Most bytes alive besides the inputs, forward and backward; the head is frozen."""
    h_ND, labels_N, head = _made(label_tokens, bias=False, width=WIDTH, vocabulary=VOCABULARY, softcap=softcap)
    head.weight_VD.requires_grad_(False)
    with LiveBytes() as live:
        live.note([h_ND, labels_N, head.weight_VD])
        before = live.live_bytes
        chunked_loss(h_ND, labels_N, head, chunk_tokens=chunk).backward()
        return live.peak_bytes - before


def test_memory_grows_with_the_chunk_and_not_with_the_label_tokens_times_the_vocabulary():
    logits_of = VOCABULARY * 4  # bytes of one position's logits
    assert _peak_bytes(400, chunk=10) < 400 * logits_of / 10, "as much as all the logits were alive"
    more_tokens = _peak_bytes(800, chunk=10) - _peak_bytes(400, chunk=10)
    assert more_tokens <= 400 * (WIDTH + 2) * 4, "the peak grew by more than the hidden states' gradient"
    for softcap, buffers in ((None, 1), (5.0, 2)):
        more_chunk = _peak_bytes(400, chunk=40, softcap=softcap) - _peak_bytes(400, chunk=20, softcap=softcap)
        assert buffers * 20 * logits_of <= more_chunk <= (buffers + 0.1) * 20 * logits_of, f"softcap {softcap}"


@pytest.mark.parametrize("trained", [True, False])
def test_a_float32_head_costs_one_16_bit_copy_in_the_forward_and_no_second_gradient(trained: bool):
    h_ND, labels_N, head = _made(40, bias=False, width=64, vocabulary=2000)
    h_ND = h_ND.detach().bfloat16().requires_grad_()
    weight = head.weight_VD.requires_grad_(trained)
    gradient_bytes, chunk_bytes = weight.nbytes * trained, 10 * 2000 * 4
    with LiveBytes() as live:
        live.note([h_ND, labels_N, weight])
        before = live.live_bytes
        loss = chunked_loss(h_ND, labels_N, head, chunk_tokens=10)
        more = live.peak_bytes - before - gradient_bytes - h_ND.nbytes
        assert weight.nbytes / 2 <= more <= weight.nbytes / 2 + 1.6 * chunk_bytes, "copy, and logits in both widths"
        assert live.live_bytes - before <= gradient_bytes + h_ND.nbytes + 100, "the copy outlives the forward"
        live.peak_bytes = live.live_bytes
        torch.autograd.grad(loss, [h_ND, weight] if trained else [h_ND])
        assert live.peak_bytes - before <= gradient_bytes + h_ND.nbytes + 100


# --- inside a model --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 5, 1000])
@pytest.mark.parametrize("name", ["llama-tied", "llama", "gemma2", "cohere", "granite", "phi"])
def test_a_whole_model_gets_the_gradients_of_the_plain_loss(name: str, chunk: int):
    """Tied embeddings take the head's gradient and the embedding's; caps, scales and biases of the head count."""
    ours, reference = tiny.pair(name)
    for model in (ours, reference):
        model.requires_grad_(True)
    rows = tiny.rows([8, 5])
    sum(tiny.row_loss(reference, row) for row in rows).backward()
    Scorer(ours, chunk_tokens=chunk)._loss(collate(rows)).backward()
    expected = {n: p.grad for n, p in reference.named_parameters()}
    for weight, parameter in ours.named_parameters():
        tiny.assert_close(parameter.grad, expected[weight], within=1e-5, name=f"{name}: gradient of {weight}")


# --- log-probabilities of chosen tokens ------------------------------------------------------------------------------


@given(
    pairs=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 22)), min_size=1, max_size=30).map(sorted),
    chunk=st.integers(1, 10), softcap=st.sampled_from([None, 2.0]),
)  # fmt: skip
def test_log_probabilities_of_pairs_are_log_softmax(pairs: list[tuple[int, int]], chunk: int, softcap: float | None):
    h_ND, _, head = _made(9, scale=0.7, softcap=softcap)
    position_M, token_M = torch.tensor(pairs).T
    counts = [sum(start <= p < start + chunk for p, _ in pairs) for start in range(0, 9, chunk)]
    got = token_log_probs(
        h_ND, head, pair_position_M=position_M, pair_token_M=token_M, pairs_per_chunk=tuple(counts), chunk_tokens=chunk
    )
    expected = _logits(h_ND, head).log_softmax(-1)[position_M, token_M].detach()
    tiny.assert_close(got, expected, within=1e-5, name="log-probabilities")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_log_probabilities_of_a_float32_head_are_the_cast_heads(dtype: torch.dtype):
    h_ND, _, cast = _made(9, dtype=dtype, scale=0.7)
    ours = Head(cast.weight_VD.float(), cast.bias_V.float(), cast.scale)
    position_M, token_M = torch.tensor([0, 3, 8]), torch.tensor([4, 5, 22])
    pairs = {"pair_position_M": position_M, "pair_token_M": token_M, "pairs_per_chunk": (2, 1), "chunk_tokens": 5}
    assert torch.equal(token_log_probs(h_ND, ours, **pairs), token_log_probs(h_ND, cast, **pairs))
