"""On a CUDA device: the same step gives the same gradients as on the CPU."""

from __future__ import annotations

import pytest
import torch

import tiny
from snugtune import step as steps
from snugtune.data.pack import collate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_gradients_on_cuda_equal_those_on_the_cpu(name, recompute):
    found = {}
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        recipe = tiny.recipe(what={"lora": {"target_modules": "all-linear"}}, how={"recompute": recompute})
        step = steps.build(recipe, tiny.model(name))
        for parameter in step.trainable:
            torch.nn.init.normal_(parameter, std=0.1)
        step.model.to(device)
        step.forward_backward(collate(tiny.rows([9, 7, 7, 3]), device=device), label_tokens=10)
        found[device] = [p.grad.cpu() for p in step.trainable]
    for here, there in zip(found["cpu"], found["cuda"], strict=True):
        torch.testing.assert_close(here, there, rtol=1e-3, atol=1e-5)
