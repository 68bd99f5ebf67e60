"""LoRA: the same numbers and files as PEFT's, little kept for backward, float32 adapters whatever the base is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import tiny
from snugtune import step
from snugtune.adapters import lora, save
from snugtune.data.pack import collate
from snugtune.errors import ModelError, RecipeError
from snugtune.kernels.int4 import Int4Linear
from snugtune.models import load
from snugtune.recipe import Lora

FAMILIES = {
    "llama": ("q_proj", "v_proj"),
    "qwen2": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "gemma": ("gate_proj", "down_proj", "q_proj"),
    "gpt2": ("c_attn", "mlp.c_proj"),
}
TARGETS = [(name, targets) for name, own in FAMILIES.items() for targets in (own, "all-linear")]
IDS = torch.tensor([[5, 9, 77, 3, 40, 41, 8], [100, 3, 4, 4, 9, 11, 2]])


def _drawn(model: nn.Module, seed: int = 7) -> None:
    """B is zero at first, which hides everything that is wrong with A."""
    generator = torch.Generator().manual_seed(seed)
    for layer in lora.layers(model).values():
        for parameter in (layer.lora_A, layer.lora_B):
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3


def _ours(name: str, cfg: Lora, **changes: Any) -> nn.Module:
    model = tiny.model(name, attn="eager", **changes)
    lora.apply(model, cfg)
    _drawn(model)
    return model


def _theirs(name: str, cfg: Lora) -> peft.PeftModel:
    targets = cfg.target_modules if isinstance(cfg.target_modules, str) else list(cfg.target_modules)
    wished = peft.LoraConfig(
        r=cfg.r, lora_alpha=cfg.lora_alpha, lora_dropout=cfg.lora_dropout, target_modules=targets,
        fan_in_fan_out=name == "gpt2", task_type="CAUSAL_LM",
    )  # fmt: skip
    return peft.get_peft_model(tiny.model(name, attn="eager"), wished)


def _peft_layers(model: peft.PeftModel) -> dict[str, Any]:
    inner = model.get_base_model()
    return {name: m for name, m in inner.named_modules() if isinstance(m, peft.tuners.lora.LoraLayer)}


def _copy_to_peft(ours: nn.Module, theirs: peft.PeftModel) -> None:
    mine = lora.layers(ours)
    for name, layer in _peft_layers(theirs).items():
        layer.lora_A["default"].weight.data.copy_(mine[name].lora_A)
        layer.lora_B["default"].weight.data.copy_(mine[name].lora_B)


def _run(model: nn.Module, embeddings: nn.Module) -> tuple[Tensor, Tensor]:
    """Logits and the gradient of what flows in, of a loss that weighs every logit."""
    x = embeddings(IDS).detach().requires_grad_()
    logits = model(inputs_embeds=x, use_cache=False).logits
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    (logits * weights).sum().backward()
    assert x.grad is not None
    return logits.detach(), x.grad


def _logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def _save(model: nn.Module, cfg: Lora, folder: Path) -> None:
    save.save(
        model, cfg, folder, base="someone/tiny", base_name="tiny", tokenizer=tiny.tokenizer(), readme="# an adapter\n"
    )


# --- the same numbers as PEFT ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "targets"), TARGETS)
def test_forward_and_gradients_are_pefts(name: str, targets: Any):
    cfg = Lora(r=3, lora_alpha=7, target_modules=targets)
    ours, theirs = _ours(name, cfg), _theirs(name, cfg)
    _copy_to_peft(ours, theirs)
    assert lora.layers(ours).keys() == _peft_layers(theirs).keys(), "other modules are adapted than PEFT adapts"
    logits, dx = _run(ours, ours.get_input_embeddings())
    expected, expected_dx = _run(theirs, theirs.get_input_embeddings())
    tiny.assert_close(logits, expected, within=1e-5, name=f"{name}: logits")
    tiny.assert_close(dx, expected_dx, within=1e-5, name=f"{name}: gradient of the input")
    mine = lora.layers(ours)
    for layer_name, layer in _peft_layers(theirs).items():
        for part in ("lora_A", "lora_B"):
            got, wanted = getattr(mine[layer_name], part).grad, getattr(layer, part)["default"].weight.grad
            tiny.assert_close(got, wanted, within=1e-5, name=f"{name}: gradient of {layer_name}.{part}")


def test_a_new_adapter_changes_nothing_and_is_drawn_as_pefts():
    cfg = Lora(r=8)
    model = tiny.model("llama", attn="eager")
    before = _logits(model)
    torch.manual_seed(0)
    lora.apply(model, cfg)
    assert torch.equal(_logits(model), before), "B must begin at zero"
    (first, *_) = lora.layers(model).values()
    bound = 1 / first.lora_A.shape[1] ** 0.5  # kaiming_uniform_ with a = sqrt(5)
    assert first.lora_A.abs().max() <= bound
    assert first.lora_A.abs().max() > bound * 0.8
    assert [n for n, p in model.named_parameters() if p.requires_grad] == [
        f"{name}.{part}" for name in lora.layers(model) for part in ("lora_A", "lora_B")
    ]


def test_default_targets_on_gpt2_are_refused_with_what_it_has():
    with pytest.raises(RecipeError, match=r"'q_proj'.*it has: c_attn"):
        lora.apply(tiny.model("gpt2", attn="eager"), Lora())


@pytest.mark.parametrize("target", ["lm_head", ("q_proj", "lm_head")])
def test_the_output_head_as_a_target_is_refused(target: Any):
    with pytest.raises(RecipeError, match=r"'lm_head' is the output head"):
        lora.apply(tiny.model("llama", attn="eager"), Lora(target_modules=target))


def test_all_linear_leaves_the_head_alone_and_takes_everything_else():
    model = tiny.model("llama", attn="eager")
    names = lora.targets(model, Lora(target_modules="all-linear"))
    assert len(names) == 2 * 7
    assert not any("lm_head" in name for name in names)


def test_a_longer_end_of_a_name_means_that_module_alone():
    model = tiny.model("llama", attn="eager")
    assert lora.targets(model, Lora(target_modules=("1.self_attn.q_proj",))) == ["model.layers.1.self_attn.q_proj"]
    with pytest.raises(RecipeError, match="_proj"):  # the end of a name in letters is no module
        lora.targets(model, Lora(target_modules=("_proj",)))


# --- dropout ---------------------------------------------------------------------------------------------------------


def _linear(
    *, dropout: float, dtype: torch.dtype = torch.float32, inputs: int = 11, outputs: int = 13
) -> lora.LoraLinear:
    torch.manual_seed(0)
    layer = lora.LoraLinear(nn.Linear(inputs, outputs, dtype=dtype), r=3, alpha=6, dropout=dropout)
    nn.init.normal_(layer.lora_B)
    return layer


def test_dropout_does_nothing_in_evaluation():
    layer, plain = _linear(dropout=0.5), _linear(dropout=0.0)
    x = torch.randn(4, 5, 11)
    assert torch.equal(layer.eval()(x), plain(x))
    assert not torch.equal(layer.train()(x), plain(x))


@pytest.mark.parametrize("dropout", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("shape", [(7, 11), (2, 5, 11)])
def test_gradients_are_those_of_the_formula_written_out(dropout: float, shape: tuple[int, ...]):
    """y = x W^T + b + (alpha / r) dropout(x) A^T B^T, left to autograd, with the same random numbers."""
    layer = _linear(dropout=dropout).train()
    x = torch.randn(shape, requires_grad=True)
    weights = torch.randn(*shape[:-1], 13)
    torch.manual_seed(5)
    y = layer(x)
    got = torch.autograd.grad((y * weights).sum(), [x, layer.lora_A, layer.lora_B])
    torch.manual_seed(5)
    written = F.linear(x, layer.base.weight, layer.base.bias)
    written = written + layer.scale * (F.dropout(x, dropout) @ layer.lora_A.t() @ layer.lora_B.t())
    expected = torch.autograd.grad((written * weights).sum(), [x, layer.lora_A, layer.lora_B])
    tiny.assert_close(y.detach(), written.detach(), within=1e-6, name="output")
    for name, mine, theirs in zip(("input", "A", "B"), got, expected, strict=True):
        tiny.assert_close(mine, theirs, within=1e-5, name=f"dropout {dropout}: gradient of {name}")


def test_no_gradient_is_computed_for_an_input_that_needs_none():
    layer = _linear(dropout=0.2).train()
    layer(torch.randn(7, 11)).sum().backward()
    assert layer.lora_A.grad is not None
    assert layer.lora_B.grad is not None
    assert layer.base.weight.grad is None


# --- what is kept for backward ---------------------------------------------------------------------------------------


def _kept(run: Any, parameters: set[int]) -> dict[int, Tensor]:
    """Storages kept for backward, those of parameters left out."""
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in parameters:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run()
    del out
    return kept


def _storages(*modules: nn.Module) -> set[int]:
    return {p.untyped_storage().data_ptr() for module in modules for p in module.parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_linear_keeps_its_input_once_in_its_own_dtype_and_nothing_else(dtype: torch.dtype):
    layer = _linear(dropout=0.0, dtype=dtype)
    x = torch.randn(2, 17, 11, dtype=dtype, requires_grad=True)
    kept = _kept(lambda: layer(x), _storages(layer))
    assert list(kept) == [x.untyped_storage().data_ptr()], (
        f"kept besides the input: {[(list(t.shape), t.dtype) for t in kept.values()]}"
    )
    assert next(iter(kept.values())).dtype == dtype


def test_dropout_keeps_a_mask_of_one_byte_besides():
    layer = _linear(dropout=0.1).train()
    x = torch.randn(2, 17, 11, requires_grad=True)
    kept = [t for t in _kept(lambda: layer(x), _storages(layer)).values() if t.data_ptr() != x.data_ptr()]
    assert [(t.dtype, t.numel()) for t in kept] == [(torch.bool, x.numel())]


def test_q_and_v_share_the_input_that_they_keep():
    q, v = _linear(dropout=0.0), _linear(dropout=0.0)
    x = torch.randn(2, 17, 11, requires_grad=True)
    kept = _kept(lambda: (q(x), v(x)), _storages(q, v))
    assert list(kept) == [x.untyped_storage().data_ptr()]


@pytest.mark.parametrize("conv", [False, True])
def test_the_frozen_weight_is_not_copied_for_backward(conv: bool):
    """GPT-2's linear keeps its weight transposed: a view must do."""
    layer = _linear(dropout=0.0)
    if conv:
        base = lora.Conv1D(13, 11)
        layer = lora.LoraLinear(base, r=3, alpha=6, dropout=0.0)
    x = torch.randn(5, 11, requires_grad=True)
    kept = _kept(lambda: layer(x), {x.untyped_storage().data_ptr()} | _storages(layer))
    assert not kept, f"kept besides input and weights: {[list(t.shape) for t in kept.values()]}"


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "targets"), TARGETS)
def test_our_adapter_loads_in_peft_and_in_ours_with_the_same_logits(name: str, targets: Any, tmp_path: Path):
    cfg = Lora(r=3, lora_alpha=7, target_modules=targets)
    model = _ours(name, cfg)
    _save(model, cfg, tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(tiny.model(name, attn="eager"), tmp_path / "adapter").eval()
    tiny.assert_close(_logits(theirs), _logits(model), within=1e-5, name=f"{name}: logits in PEFT")
    again = tiny.model(name, attn="eager")
    save.load(again, tmp_path / "adapter")
    assert torch.equal(_logits(again), _logits(model)), f"{name}: the adapter read back gives other logits"
    assert save.read_config(tmp_path / "adapter") == cfg
    assert not any(p.requires_grad for p in again.parameters()), "a loaded adapter is frozen"


@pytest.mark.parametrize(("name", "targets"), TARGETS)
def test_pefts_adapter_loads_in_ours_with_the_same_logits(name: str, targets: Any, tmp_path: Path):
    cfg = Lora(r=4, lora_alpha=6, target_modules=targets)
    theirs = _theirs(name, cfg).eval()
    _copy_to_peft(_ours(name, cfg), theirs)
    theirs.save_pretrained(tmp_path)
    model = tiny.model(name, attn="eager")
    plain = _logits(model)
    save.load(model, tmp_path)
    tiny.assert_close(_logits(model), _logits(theirs), within=1e-5, name=f"{name}: logits")
    assert not torch.allclose(_logits(model), plain), "the adapter had no effect"


def _adapter(folder: Path, **changes: Any) -> Path:
    cfg = Lora(r=3, lora_alpha=7)
    _save(_ours("llama", cfg), cfg, folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


REFUSED = {
    "use_rslora": True, "use_dora": True, "alpha_pattern": {"q_proj": 3}, "rank_pattern": {"q_proj": 3}, "bias": "all",
    "modules_to_save": ["embed_tokens"], "trainable_token_indices": [3], "layer_replication": [[0, 2]],
    "layers_to_transform": [0], "target_parameters": ["x"], "lora_bias": True, "exclude_modules": ["v_proj"],
    "use_qalora": True, "alora_invocation_tokens": [1, 2], "arrow_config": {"top_k": 2}, "init_lora_weights": "pissa",
    "something_new": 3, "peft_type": "IA3",
}  # fmt: skip


@pytest.mark.parametrize("key", REFUSED)
def test_a_setting_that_would_be_served_wrongly_is_refused_by_name(key: str, tmp_path: Path):
    folder = _adapter(tmp_path / "adapter", **{key: REFUSED[key]})
    with pytest.raises(ModelError, match="IA3" if key == "peft_type" else key):
        save.load(tiny.model("llama", attn="eager"), folder)


def test_settings_that_change_nothing_are_not_refused(tmp_path: Path):
    folder = _adapter(
        tmp_path / "adapter", revision="main", peft_version="9", init_lora_weights="gaussian", megatron_core="m"
    )
    assert save.read_config(folder).r == 3


def test_an_adapter_of_another_shape_is_refused(tmp_path: Path):
    folder = _adapter(tmp_path / "adapter")
    with pytest.raises(ModelError, match=r"lora_A of model.layers.0.self_attn.q_proj is \[3, 32\], not \[3, 48\]"):
        save.load(tiny.model("llama", attn="eager", hidden_size=48), folder)
    with pytest.raises(ModelError, match=r"lora_A of model.layers.2.self_attn.q_proj is missing"):
        save.load(tiny.model("llama", attn="eager", num_hidden_layers=3), folder)
    with pytest.raises(ModelError, match=r"holds 4 tensors that this model has no place for"):
        save.load(tiny.model("llama", attn="eager", num_hidden_layers=1), folder)


def test_a_save_that_fails_leaves_the_old_folder_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = _adapter(tmp_path / "adapter")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(save, "save_file", full_disk)
    with pytest.raises(OSError, match="no space"):
        _save(_ours("llama", Lora()), Lora(), folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert [file.name for file in tmp_path.iterdir()] == ["adapter"], "a half-written folder was left behind"


# --- precision -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adapters_of_a_half_precision_base_are_float32_in_the_model_and_on_disk(dtype: torch.dtype, tmp_path: Path):
    cfg = Lora(r=3, target_modules="all-linear")
    model = tiny.model("llama", dtype=dtype)
    built = step.build(tiny.recipe(what={"lora": {"r": 3, "target_modules": "all-linear"}}), model)
    assert {p.dtype for p in built.trainable} == {torch.float32}
    _drawn(model)
    built.forward_backward(collate(tiny.rows([9, 5])), label_tokens=10, loss_scale=2.0**8)
    for name, layer in lora.layers(model).items():
        for part in (layer.lora_A, layer.lora_B):
            assert part.grad is not None, name
            assert part.grad.dtype == torch.float32, name
            assert part.grad.isfinite().all(), name
            assert part.grad.abs().max() > 0, name
    _save(model, cfg, tmp_path / "adapter")
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}


# --- over a base in 4 bits -------------------------------------------------------------------------------------------


def _unpacked(model: nn.Module) -> nn.Module:
    """The same model with plain linear layers that hold the weights which the packed ones stand for."""
    for name, layer in [(n, m) for n, m in model.named_modules() if isinstance(m, Int4Linear)]:
        plain = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
        plain.weight.data, plain.bias = layer.dense(torch.float32), layer.bias
        model.set_submodule(name, plain.requires_grad_(False))
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("bias", [True, False])
def test_over_4_bits_as_over_a_plain_linear_with_the_same_weight(dtype: torch.dtype, dropout: float, bias: bool):
    torch.manual_seed(0)
    packed = Int4Linear.from_linear(nn.Linear(64, 24, bias=bias, dtype=dtype), group=32)
    plain = nn.Linear(64, 24, bias=bias, dtype=dtype)
    plain.weight.data = packed.dense(dtype)
    plain.bias = packed.bias
    x, dy, results = torch.randn(2, 5, 64, dtype=dtype), torch.randn(2, 5, 24, dtype=dtype), []
    for base in (packed, plain):
        torch.manual_seed(1)
        layer = lora.LoraLinear(base, r=3, alpha=6, dropout=dropout).train()
        nn.init.normal_(layer.lora_B)
        leaf = x.clone().requires_grad_()
        out = layer(leaf)
        results.append([out.detach(), *torch.autograd.grad(out, [leaf, layer.lora_A, layer.lora_B], dy)])
    for got, expected, name in zip(*results, ("output", "input", "A", "B"), strict=True):
        assert torch.equal(got, expected), f"{name} differs"


def test_over_4_bits_nothing_but_the_input_is_kept():
    packed = Int4Linear.from_linear(nn.Linear(64, 24), group=32)
    layer = lora.LoraLinear(packed, r=3, alpha=6, dropout=0.0)
    x = torch.randn(2, 17, 64, requires_grad=True)
    assert list(_kept(lambda: layer(x), _storages(layer))) == [x.untyped_storage().data_ptr()]


@pytest.mark.parametrize("recompute", ["none", "block"])
@pytest.mark.parametrize(
    ("name", "targets"),
    [("llama", ["q_proj", "v_proj"]), ("llama", "all-linear"), ("qwen2", "all-linear"), ("gpt2", ["c_attn"]), ("gpt2", "all-linear")],
)  # fmt: skip
def test_a_step_over_4_bits_is_one_over_the_weights_that_they_stand_for(name: str, targets: Any, recompute: str):
    recipe = tiny.recipe(what={"lora": {"r": 3, "target_modules": targets}}, how={"recompute": recompute})
    batch = collate(tiny.rows([9, 5, 14]))
    results = []
    for prepare in (lambda model: model, _unpacked):
        model = tiny.model(name)
        load.pack_linears(model, Int4Linear, filled=True)
        torch.manual_seed(3)
        built = step.build(recipe, prepare(model))
        _drawn(model)
        loss = built.forward_backward(batch, label_tokens=10)
        assert not built.without_gradient()
        results.append({"loss": loss} | {n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    packed, plain = results
    assert packed.keys() == plain.keys()
    for key, value in packed.items():
        tiny.assert_close(value, plain[key], within=1e-5, name=key)


def test_the_same_layers_are_targets_over_4_bits():
    for name in ("llama", "gpt2"):
        plain, packed = tiny.model(name), tiny.model(name)
        load.pack_linears(packed, Int4Linear, filled=True)
        for cfg in (Lora(target_modules="all-linear"), Lora(target_modules=FAMILIES[name])):
            assert lora.targets(packed, cfg) == lora.targets(plain, cfg)


def test_an_adapter_trained_over_4_bits_loads_in_peft(tmp_path: Path):
    cfg = Lora(r=3, lora_alpha=7, target_modules="all-linear")
    packed = tiny.model("gpt2", attn="eager")
    load.pack_linears(packed, Int4Linear, filled=True)
    lora.apply(packed, cfg)
    _drawn(packed)
    _save(packed, cfg, tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["fan_in_fan_out"] is True
    base = tiny.model("gpt2", attn="eager")
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    ours = _ours("gpt2", cfg)  # the same adapters over the unrounded base
    tiny.assert_close(_logits(theirs), _logits(ours), within=1e-5, name="logits in PEFT")
