"""Merging: PEFT's numbers, tensor by tensor, in files that transformers reads; whole or not at all."""

from __future__ import annotations

import json
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import tiny
from snugtune.adapters import lora, merge, save
from snugtune.errors import InputError, ModelError
from snugtune.kernels.packed import PackedLinear
from snugtune.models import drift, load
from snugtune.recipe import Lora

FAMILIES: dict[str, Any] = {
    "llama": ("q_proj", "v_proj"),
    "llama-tied": ("q_proj", "down_proj"),
    "qwen3": "all-linear",
    "phi3": ("qkv_proj", "gate_up_proj"),
    "gemma2": ("gate_proj", "down_proj", "q_proj"),
    "gpt2": ("c_attn", "mlp.c_proj"),
    "gpt_neox": "all-linear",
    "opt": ("q_proj", "fc1"),
}
IDS = torch.tensor([[5, 9, 77, 3, 40, 41, 8], [100, 3, 4, 4, 9, 11, 2]])
SIXTEEN = {torch.float32: torch.bfloat16, torch.bfloat16: torch.bfloat16, torch.float16: torch.float16}


def _base(folder: Path, name: str = "llama", *, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    made = tiny.model(name, attn="eager", **changes)
    made.to(dtype).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


def _source(base: Path, cfg: Lora, *, size: float = 0.3, dtype: torch.dtype = torch.float32) -> load.ModelSource:
    """`base` with an adapter of random A and B, as PEFT saves it."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    targets = cfg.target_modules if isinstance(cfg.target_modules, str) else list(cfg.target_modules)
    wished = peft.LoraConfig(
        r=cfg.r, lora_alpha=cfg.lora_alpha, target_modules=targets, task_type="CAUSAL_LM",
        fan_in_fan_out=model.config.model_type == "gpt2",
    )  # fmt: skip
    made = peft.get_peft_model(model, wished)
    generator = torch.Generator().manual_seed(7)
    for name, parameter in made.named_parameters():
        if "lora_" in name:
            parameter.data = (torch.randn(parameter.shape, generator=generator) * size).to(dtype)
    made.save_pretrained(base.parent / "adapter")
    return load.ModelSource("a run", base, "someone/tiny", base.parent / "adapter")


def _write(source: load.ModelSource, **options: Any) -> Path:
    folder = source.folder.parent / "merged"
    folder.mkdir()
    merge.write(source, folder, **options)
    return folder


def _theirs(source: load.ModelSource) -> PreTrainedModel:
    base = AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32, attn_implementation="eager")
    assert source.adapter is not None
    return peft.PeftModel.from_pretrained(base, source.adapter).merge_and_unload().eval()


def _read(folder: Path) -> PreTrainedModel:
    found, facts = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", output_loading_info=True)
    assert not facts["missing_keys"] and not facts["unexpected_keys"]
    return found.eval()


def _logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def _stored(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


# --- one weight ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_merged_weight_is_the_sum_rounded_once(transposed: bool, stored: torch.dtype, dtype: torch.dtype):
    torch.manual_seed(0)
    weight, a_rK, b_Nr = torch.randn(13, 7).to(stored), torch.randn(3, 7), torch.randn(13, 3)
    expected = weight.double() + 2.5 * b_Nr.double() @ a_rK.double()
    given = weight.t().contiguous() if transposed else weight
    before = given.clone()
    got = merge.merged(given, a_rK, b_Nr, 2.5, dtype, transposed=transposed)
    assert got.dtype == dtype
    assert torch.equal(given, before), "the base's weight was changed in place"
    tiny.assert_close(
        got.t() if transposed else got, expected, within={torch.float32: 1e-6}.get(dtype, 4e-3), name="merged"
    )
    if dtype != torch.float32:  # twice rounded it would be off by more than half a step somewhere
        assert torch.equal(got, merge.merged(given, a_rK, b_Nr, 2.5, torch.float32, transposed=transposed).to(dtype))


@pytest.mark.parametrize("transposed", [False, True])
def test_pieces_are_the_whole_and_none_is_larger_than_promised(transposed: bool, monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    base = lora.Conv1D(13, 7) if transposed else torch.nn.Linear(7, 13)
    layer = lora.LoraLinear(base, r=3, alpha=6, dropout=0.0).requires_grad_(False)
    torch.nn.init.normal_(layer.lora_B)
    weight = layer.base.weight

    def run() -> list[Tensor]:
        return list(merge.pieces(weight, weight.shape, merge.Role(layer), torch.float32))

    (whole,) = run()
    monkeypatch.setattr(merge, "PIECE_BYTES", 4 * weight.shape[1] * 2 + 1)
    parts = run()
    assert [len(part) for part in parts] == [2] * (len(weight) // 2) + [1] * (len(weight) % 2)
    tiny.assert_close(torch.cat(parts), whole, within=1e-6, name="pieces")


def test_it_runs_on_tensors_without_data():
    with FakeTensorMode():
        layer = lora.LoraLinear(torch.nn.Linear(4096, 11008), r=8, alpha=16, dropout=0.0)
        weight = layer.base.weight
        rows = [len(p) for p in merge.pieces(weight, weight.shape, merge.Role(layer), torch.bfloat16)]
    assert sum(rows) == 11008
    assert max(rows) * 4096 * 4 <= merge.PIECE_BYTES


# --- a whole model ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_in_float32_it_is_pefts_merge(name: str, tmp_path: Path):
    source = _source(_base(tmp_path / "base", name), Lora(r=3, lora_alpha=7, target_modules=FAMILIES[name]))
    folder = _write(source, dtype=torch.float32)
    theirs, ours = _theirs(source), _read(folder)
    expected = theirs.state_dict()
    for key, tensor in ours.state_dict().items():
        tiny.assert_close(tensor, expected[key], within=1e-6, name=f"{name}: {key}")
    tiny.assert_close(_logits(ours), _logits(theirs), within=1e-5, name=f"{name}: logits")
    plain = _read(source.folder)
    assert not torch.allclose(_logits(plain), _logits(ours)), "the adapter had no effect"
    assert _stored(folder).keys() == _stored(source.folder).keys()


@pytest.mark.parametrize(("r", "alpha"), [(1, 32), (8, 32), (16, 16), (3, 0.5)])
def test_the_scale_is_alpha_over_r(r: int, alpha: float, tmp_path: Path):
    source = _source(_base(tmp_path / "base"), Lora(r=r, lora_alpha=alpha))
    tiny.assert_close(
        _logits(_read(_write(source, dtype=torch.float32))), _logits(_theirs(source)), within=1e-5, name="logits"
    )


def test_our_own_adapter_merges_to_what_it_answered(tmp_path: Path):
    base, cfg = _base(tmp_path / "base"), Lora(r=3, target_modules="all-linear")
    model = tiny.model("llama", attn="eager")
    lora.apply(model, cfg)
    for layer in lora.layers(model).values():
        torch.nn.init.normal_(layer.lora_B, std=0.3)
    save.save(model, cfg, tmp_path / "adapter", base="x", base_name="x", tokenizer=tiny.tokenizer(), readme="")
    folder = _write(load.ModelSource("a run", base, "x", tmp_path / "adapter"), dtype=torch.float32)
    tiny.assert_close(_logits(_read(folder)), _logits(model), within=1e-5, name="logits")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_adapter_saved_in_16_bits_is_merged_in_float32(dtype: torch.dtype, tmp_path: Path):
    source = _source(_base(tmp_path / "base"), Lora(r=3), dtype=dtype)
    tiny.assert_close(
        _logits(_read(_write(source, dtype=torch.float32))), _logits(_theirs(source)), within=1e-5, name="logits"
    )


@pytest.mark.parametrize("stored", SIXTEEN)
def test_the_default_is_the_bases_own_16_bits(stored: torch.dtype, tmp_path: Path):
    source = _source(_base(tmp_path / "base", dtype=stored), Lora(r=3))
    folder = _write(source)
    before, after = _stored(source.folder), _stored(folder)
    assert {tensor.dtype for tensor in after.values()} == {SIXTEEN[stored]}
    assert json.loads((folder / "config.json").read_text())["dtype"] == str(SIXTEEN[stored]).removeprefix("torch.")
    assert _read(folder).dtype == SIXTEEN[stored], "what transformers loads without being told"
    changed = {name for name in after if not torch.equal(after[name], before[name].to(SIXTEEN[stored]))}
    assert changed == {f"model.layers.{i}.self_attn.{p}.weight" for i in (0, 1) for p in ("q_proj", "v_proj")}
    expected = _theirs(source).state_dict()
    for name in changed:  # one rounding of the float32 sum, and not of a sum that was rounded before
        tiny.assert_close(
            after[name].float(), expected[name].to(SIXTEEN[stored]).float(), within=8e-3, name=f"{stored}: {name}"
        )


def test_a_tensor_that_the_base_keeps_in_another_precision_stays_as_it_is(tmp_path: Path):
    base = _base(tmp_path / "base", dtype=torch.bfloat16)
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float() + 1e-4
    tensors["model.layers.0.self_attn.q_proj.weight"] = tensors["model.layers.0.self_attn.q_proj.weight"].float()
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    after = _stored(_write(_source(base, Lora(r=3))))
    assert torch.equal(after.pop("model.norm.weight"), tensors["model.norm.weight"])
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}, "an adapted one is of the merged dtype"


@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "qwen3"])
def test_tied_embeddings_stay_tied_and_are_stored_once(name: str, tmp_path: Path):
    folder = _write(_source(_base(tmp_path / "base", name), Lora(r=3, target_modules=FAMILIES[name])))
    assert "lm_head.weight" not in _stored(folder)
    model = _read(folder)
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_names_without_the_models_prefix_are_found(tmp_path: Path):
    """GPT-2's own files on the hub say h.0.attn.c_attn.weight, and so do the merged ones."""
    source = _source(_base(tmp_path / "base", "gpt2"), Lora(r=3, target_modules=FAMILIES["gpt2"]))
    expected = _logits(_theirs(source))
    file = source.folder / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    folder = _write(source, dtype=torch.float32)
    assert _stored(folder).keys() == tensors.keys()
    tiny.assert_close(_logits(_read(folder)), expected, within=1e-5, name="logits")


# --- an adapter that was trained over 4 bits --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "packing"), [*((name, "int4") for name in ("llama", "gpt2", "qwen3", "phi3")), ("llama", "nf4")]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_over_4_bits_it_is_merged_into_what_it_saw(name: str, packing: Any, dtype: torch.dtype, tmp_path: Path):
    wider = {"hidden_size": 64, "intermediate_size": 128} if packing == "nf4" else {}
    unpacked = _source(_base(tmp_path / "base", name, **wider), Lora(r=3, target_modules=FAMILIES[name]))
    source = replace(unpacked, packing=packing)
    folder = _write(source, dtype=dtype)
    trained = load.load_model(source, dtype=torch.float32, packing=packing)
    assert source.adapter is not None
    save.load(trained, source.adapter)
    rows = drift.choose([(ids, [False] + [True] * 6) for ids in IDS.tolist()], vocabulary=tiny.VOCAB)
    merged = load.load_model(load.ModelSource("merged", folder, "merged"), dtype=torch.float32)
    found = drift.measure(drift.keep(trained, rows), merged, rows)
    original = _read(source.folder)
    if dtype == torch.float32:
        assert found.max_logit_drift < 1e-4
    for key, tensor in _stored(folder).items():  # every packed layer, adapted or not, and nothing else
        is_packed = any(
            key == f"{n.removesuffix('.base')}.weight"
            for n, m in trained.named_modules()
            if isinstance(m, PackedLinear)
        )
        adapted = any(key == f"{n}.weight" for n in lora.layers(trained))
        same = torch.equal(tensor, original.state_dict()[key].to(dtype))
        assert same != (is_packed or adapted), key
    plain = tmp_path / "plain"
    plain.mkdir()
    merge.write(unpacked, plain, dtype=dtype)
    other = load.load_model(load.ModelSource("merged", plain, "merged"), dtype=torch.float32)
    from_original = drift.measure(drift.keep(trained, rows), other, rows)
    assert found.kl < from_original.kl * (0.01 if dtype == torch.float32 else 0.5), "the original weights are no worse"


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_small_pieces_of_4_bits_write_the_same_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = replace(_source(_base(tmp_path / "base", name), Lora(r=3, target_modules=FAMILIES[name])), packing="int4")
    folder = _write(source, dtype=torch.float32)
    expected = _stored(folder)
    monkeypatch.setattr(merge, "PIECE_BYTES", 1000)
    merge.write(source, folder, dtype=torch.float32)
    for key, tensor in _stored(folder).items():
        tiny.assert_close(tensor, expected[key], within=1e-6, name=key)


# --- files -----------------------------------------------------------------------------------------------------------


def test_shards_stay_under_their_size_and_the_index_names_every_tensor(tmp_path: Path):
    source = _source(_base(tmp_path / "base"), Lora(r=3))
    sizes = {name: tensor.numel() * 2 for name, tensor in _stored(source.folder).items()}
    most = 10_000
    folder = _write(source, shard_bytes=most)
    files = sorted(folder.glob("*.safetensors"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(files) > 2
    assert [file.name for file in files] == [
        f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)
    ]
    assert index["metadata"]["total_size"] == sum(sizes.values())
    for file in files:
        names = [name for name, place in index["weight_map"].items() if place == file.name]
        assert set(safe_open(file, "pt").keys()) == set(names)
        assert sum(sizes[name] for name in names) <= most or len(names) == 1
    one = tmp_path / "one"
    one.mkdir()
    merge.write(source, one)
    assert not (one / "model.safetensors.index.json").exists()
    assert torch.equal(_logits(_read(folder)), _logits(_read(one)))


def test_a_sharded_base_is_read(tmp_path: Path):
    base = _base(tmp_path / "base")
    source = _source(base, Lora(r=3))
    expected = _stored(_write(source))
    model = tiny.model("llama", attn="eager")
    (base / "model.safetensors").unlink()
    model.save_pretrained(base, max_shard_size="20KB")
    assert len(list(base.glob("*.safetensors"))) > 2
    again = tmp_path / "again"
    again.mkdir()
    merge.write(source, again)
    got = _stored(again)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in got)


def test_small_pieces_write_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = _source(_base(tmp_path / "base"), Lora(r=3))
    file = _write(source) / "model.safetensors"
    expected = file.read_bytes()
    monkeypatch.setattr(merge, "PIECE_BYTES", 1000)
    merge.write(source, file.parent)
    assert file.read_bytes() == expected


def test_every_tensor_begins_at_a_multiple_of_its_width(tmp_path: Path):
    base = _base(tmp_path / "base", dtype=torch.bfloat16)
    tensors = load_file(base / "model.safetensors")
    tensors |= {
        "model.odd": torch.tensor([True] * 3),
        "model.scalar": torch.tensor(1.5),
        "model.empty": torch.ones(0, 4),
    }
    tensors["model.counts"] = torch.arange(3)
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    folder = _write(load.ModelSource("x", base, "x", _source(_base(tmp_path / "other"), Lora(r=3)).adapter))
    after = _stored(folder)
    for name in ("model.odd", "model.scalar", "model.empty", "model.counts"):
        assert torch.equal(after[name], tensors[name]) and after[name].dtype == tensors[name].dtype
    raw = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    for name, facts in header.items():
        assert (8 + length + facts["data_offsets"][0]) % after[name].element_size() == 0, name


def test_config_tokenizer_and_licence_come_along(tmp_path: Path):
    base = _base(tmp_path / "base")
    (base / "LICENSE").write_text("do as you like")
    (base / "generation_config.json").write_text('{"temperature": 0.5}')
    settings = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(settings | {"torch_dtype": "float32", "of_the_maker": 3}))
    source = _source(base, Lora(r=3))
    folder = _write(source)
    written = json.loads((folder / "config.json").read_text())
    assert written == settings | {"dtype": "bfloat16", "torch_dtype": "bfloat16", "of_the_maker": 3}
    for name in ("LICENSE", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (folder / name).read_bytes() == (base / name).read_bytes()
    assert not (folder / "adapter_config.json").exists()


def test_the_tokenizer_is_the_adapters_own_where_it_has_one(tmp_path: Path):
    source = _source(_base(tmp_path / "base"), Lora(r=3))
    assert source.adapter is not None
    own = tiny.tokenizer()
    own.chat_template = "{{ messages[0].content }}!"
    own.save_pretrained(source.adapter)
    (source.folder / "vocab.txt").write_text("of another tokenizer")
    folder = _write(source)
    assert AutoTokenizer.from_pretrained(folder).chat_template == own.chat_template
    assert not (folder / "vocab.txt").exists()


def test_memory_does_not_grow_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Nothing larger than a piece is made, whatever the size of the tensor."""
    source = _source(_base(tmp_path / "base"), Lora(r=3))
    monkeypatch.setattr(merge, "PIECE_BYTES", 2048)
    largest = 0
    true_pieces = merge.pieces

    def watched(*args: Any) -> Any:
        nonlocal largest
        for piece in true_pieces(*args):
            largest = max(largest, piece.nbytes)
            yield piece

    monkeypatch.setattr(merge, "pieces", watched)
    _write(source, dtype=torch.float32)
    assert 0 < largest <= 2048


# --- what is refused -------------------------------------------------------------------------------------------------


def test_an_adapter_of_another_model_is_refused(tmp_path: Path):
    source = _source(_base(tmp_path / "base"), Lora(r=3))
    wide = _base(tmp_path / "wide", hidden_size=48)
    with pytest.raises(ModelError, match=r"lora_A of model.layers.0.self_attn.q_proj is \[3, 32\], not \[3, 48\]"):
        _write(load.ModelSource("a run", wide, "x", source.adapter))


@pytest.mark.parametrize("setting", [{"use_rslora": True}, {"alpha_pattern": {"q_proj": 3}}, {"use_dora": True}])
def test_an_adapter_that_would_be_scaled_wrongly_is_refused(setting: dict[str, Any], tmp_path: Path):
    source = _source(_base(tmp_path / "base"), Lora(r=3))
    assert source.adapter is not None
    file = source.adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | setting))
    with pytest.raises(ModelError, match=next(iter(setting))):
        _write(source)


def test_a_base_whose_files_do_not_fit_its_config_is_refused(tmp_path: Path):
    source = _source(_base(tmp_path / "base"), Lora(r=3))
    file = source.folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.self_attn.v_proj.weight"
    save_file(tensors | {name: torch.zeros(3, 4)}, file)
    with pytest.raises(ModelError, match=r"has \[3, 4\], not \[16, 32\], for the weight of model.layers.1"):
        _write(source)
    del tensors[name]
    save_file(tensors, file)
    (tmp_path / "merged").rmdir()
    with pytest.raises(ModelError, match=r"lacks the weight of model.layers.1.self_attn.v_proj"):
        _write(source)


def test_a_quantised_base_is_refused(tmp_path: Path):
    source = _source(_base(tmp_path / "base"), Lora(r=3))
    file = source.folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(ModelError, match="quantised"):
        _write(source)


def test_eight_bit_weights_are_refused(tmp_path: Path):
    source = _source(_base(tmp_path / "base"), Lora(r=3))
    file = source.folder / "model.safetensors"
    save_file({name: tensor.to(torch.float8_e4m3fn) for name, tensor in load_file(file).items()}, file)
    with pytest.raises(ModelError, match="F8_E4M3"):
        _write(source)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_adapter_is_named_and_not_shipped(value: float, tmp_path: Path):
    source = _source(_base(tmp_path / "base"), Lora(r=3))
    assert source.adapter is not None
    file = source.adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors["base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"][2, 1] = value
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"model.layers.1.self_attn.v_proj.weight is not finite"):
        _write(source)


def test_a_weight_too_large_for_fp16_is_named(tmp_path: Path):
    base = _base(tmp_path / "base", dtype=torch.bfloat16)
    tensors = load_file(base / "model.safetensors")
    tensors["model.norm.weight"][3] = 1e5
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model.norm.weight is not finite in float16"):
        _write(_source(base, Lora(r=3)), dtype=torch.float16)


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = _source(_base(tmp_path / "base"), Lora(r=3))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(merge.shutil, "disk_usage", lambda _: usage(10**6, 10**6 - 5000, 5000))
    with pytest.raises(InputError, match="5 KiB free"):
        _write(source)
    assert not list((tmp_path / "merged").iterdir())
