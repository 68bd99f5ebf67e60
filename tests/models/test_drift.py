"""The distance of two models, against the same figures written out over whole forwards."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import tiny
from snugtune.models import drift, load

NAMES = ["llama", "llama-tied", "gemma2", "cohere", "granite", "gpt2", "mistral-sliding", "opt", "stablelm"]
LENGTHS = (9, 1, 17, 5, 12)


def _rows(most: int | None = None) -> list[drift.Row]:
    rows = tiny.rows(LENGTHS, seed=3)
    found = drift.choose([(row.ids, row.is_label) for row in rows], vocabulary=tiny.VOCAB)
    return found if most is None else found[:most]


def _model(name: str, **changes: Any) -> Any:
    attn = {"attn": "sdpa"} if name in tiny.UNLISTED else {}
    return tiny.model(name, **attn, **changes)


def _moved(name: str, by: float) -> tuple[Any, Any]:
    """A model as snugtune runs it, and the same weights as the family itself runs them, both moved a little."""
    first, second = _model(name), tiny.model(name, attn="eager")
    for model in (first, second):
        generator = torch.Generator().manual_seed(5)
        for parameter in model.parameters():
            parameter.data += torch.randn(parameter.shape, generator=generator) * by
    return first, second


def _written_out(model: Any, rows: list[drift.Row]) -> Tensor:
    with torch.no_grad():
        return torch.cat([
            model(input_ids=torch.tensor([row.ids]), use_cache=False).logits[0, list(row.positions)] for row in rows
        ]).double()  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_the_figures_are_those_of_whole_forwards(name: str):
    rows = _rows()
    moved, reference = _moved(name, by=0.02)
    kept = drift.keep(_model(name), rows)
    found = drift.measure(kept, moved, rows)
    first, second = _written_out(tiny.model(name, attn="eager"), rows), _written_out(reference, rows)
    tiny.assert_close(kept, first, within=1e-5, name=f"{name}: kept logits")
    expected_kl = F.kl_div(second.log_softmax(1), first.log_softmax(1), reduction="batchmean", log_target=True).item()
    assert found.kl == pytest.approx(expected_kl, rel=1e-3)
    assert found.max_logit_drift == pytest.approx((first - second).abs().max().item(), rel=1e-3)
    assert found.greedy_agreement == (first.argmax(1) == second.argmax(1)).double().mean().item()
    assert found.positions == len(first) == sum(len(row.positions) for row in rows)
    assert found.kl > 1e-5, "they differ"


def test_a_model_does_not_drift_from_itself():
    rows = _rows()
    model = _model("llama")
    assert drift.measure(drift.keep(model, rows), model, rows) == drift.Drift(0.0, 0.0, 1.0, found_positions(rows))


def found_positions(rows: list[drift.Row]) -> int:
    return sum(len(row.positions) for row in rows)


def test_a_tiny_difference_is_not_lost_in_rounding():
    """1e-4 on every logit row: a KL of about 1e-9, thousands of times below the rounding of a float32 log-softmax."""
    rows = _rows()
    model, other = _model("llama"), _model("llama")
    noise = torch.randn(other.lm_head.weight.shape, generator=torch.Generator().manual_seed(0))
    other.lm_head.weight.data += noise * 1e-5
    kept = drift.keep(model, rows)
    first, second = kept.double(), drift.keep(other, rows).double()
    expected = F.kl_div(second.log_softmax(1), first.log_softmax(1), reduction="batchmean", log_target=True).item()
    assert 0 < expected < 1e-7
    assert drift.measure(kept, other, rows).kl == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("side", ["first", "second"])
def test_a_broken_model_is_never_near(side: str):
    rows = _rows()
    whole, broken = _model("llama"), copy.deepcopy(_model("llama"))
    broken.lm_head.weight.data[7, 3] = float("nan")
    first, second = (broken, whole) if side == "first" else (whole, broken)
    found = drift.measure(drift.keep(first, rows), second, rows)
    assert math.isnan(found.kl) and math.isnan(found.max_logit_drift)


def test_it_does_not_matter_how_rows_are_packed(monkeypatch: pytest.MonkeyPatch):
    rows = _rows()
    model = _model("llama")
    together = drift.keep(model, rows)
    monkeypatch.setattr(drift, "PACKED_TOKENS", 10)
    tiny.assert_close(drift.keep(model, rows), together, within=1e-5, name="logits")


def test_it_runs_on_tensors_without_data():
    """As the planner runs it."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = load.shell(tiny.config("llama"), torch.float32)
        assert drift.keep(model, _rows()).shape == (found_positions(_rows()), tiny.VOCAB)


def test_positions_are_those_that_predict_the_labels():
    (row,) = drift.choose([([5, 6, 7, 8], [False, True, False, True])], vocabulary=10)
    assert row == drift.Row((5, 6, 7, 8), (0, 2))


def test_of_many_positions_evenly_spaced_ones_are_kept():
    rows = [([3] * 101, [False] + [True] * 100) for _ in range(40)]
    chosen = drift.choose(rows, vocabulary=1000)
    assert found_positions(chosen) == drift.MOST_POSITIONS
    assert len(chosen) == 40, "every row has a part in it"
    assert {len(row.positions) for row in chosen} <= {6, 7}
    large = drift.choose(rows, vocabulary=256_000)
    assert found_positions(large) == drift.KEPT_BYTES // (4 * 256_000)


def test_an_untold_row_is_not_run():
    assert drift.choose([([3, 4], [False, False]), ([5, 6], [False, True])], vocabulary=10) == [drift.Row((5, 6), (0,))]
