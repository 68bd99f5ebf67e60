"""A05: a base in half precision under loss scaling; what is trained is float32 all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tiny
from snugtune import step
from snugtune.data.pack import collate
from snugtune.events import EventLog
from snugtune.trainer.loop import train_rows

WHAT = {"lora": {"r": 4, "target_modules": "all-linear"}, "learning_rate": 1e-2, "global_batch_rows": 4, "max_steps": 4}


def _built(dtype: torch.dtype) -> step.Step:
    torch.manual_seed(0)
    return step.build(tiny.recipe(what=WHAT, how={"micro_batch_tokens": 40}), tiny.model("llama", dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a05_weights_gradients_and_moments_are_float32_over_a_half_base(dtype: torch.dtype):
    built = _built(dtype)
    built.forward_backward(collate(tiny.rows([9, 7])), label_tokens=10, loss_scale=2.0**10)
    assert {p.dtype for p in built.trainable} == {torch.float32}
    assert {p.dtype for p in built.model.parameters() if not p.requires_grad} == {dtype}
    for name, p in built.model.named_parameters():
        if p.requires_grad:
            assert p.grad is not None, name
            assert p.grad.dtype == torch.float32, name
            assert p.grad.isfinite().all(), f"gradient of {name} is not finite"
    built.update(factor=2.0**-10, learning_rate=1e-2)
    moments = {state["exp_avg"].dtype for state in built.optimizer.state.values()}
    assert moments == {torch.float32}


def test_a05_training_in_fp16_with_the_scaler_on_learns(tmp_path: Path):
    rows = tiny.rows([12, 9, 7, 5])
    built = _built(torch.float16)
    recipe = tiny.recipe(what=WHAT | {"max_steps": 12, "lr_scheduler_type": "constant"}, how={"micro_batch_tokens": 40})
    events = EventLog(tmp_path / "events.jsonl")
    done = train_rows(built, rows, recipe, events=events, fp16=True)
    events.close()
    assert done.steps - done.skipped_steps >= 8, f"{done.skipped_steps} of {done.steps} steps were skipped"
    assert done.losses[-1] < done.losses[0] * 0.98, f"losses {done.losses}"
    assert all(p.isfinite().all() for p in built.trainable)


@pytest.mark.parametrize(("dtype", "within"), [(torch.float16, 0.02), (torch.bfloat16, 0.15)])
def test_a05_gradients_over_a_half_base_are_those_over_a_float32_base(dtype: torch.dtype, within: float):
    found = []
    for chosen in (torch.float32, dtype):
        built = _built(chosen)
        built.forward_backward(collate(tiny.rows([9, 7])), label_tokens=10, loss_scale=2.0**10)
        found.append({n: p.grad / 2.0**10 for n, p in built.model.named_parameters() if p.grad is not None})
    for name, gradient in found[0].items():
        tiny.assert_close(found[1][name], gradient, within=within, name=f"{dtype} gradient of {name}")
