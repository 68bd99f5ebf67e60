"""Adapters on disk, in PEFT's format: adapter_config.json and adapter_model.safetensors.

Only adapter tensors are touched. A folder is written aside, synced and renamed, so that it is whole or absent.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedTokenizerBase as Tokenizer

from snugtune.adapters import lora
from snugtune.errors import ModelError
from snugtune.events import sync_folder
from snugtune.recipe import Lora, Packing

PREFIX = "base_model.model."
_UNSUPPORTED = {
    "use_rslora": "alpha / sqrt(r) scaling", "use_dora": "DoRA", "rank_pattern": "ranks by module",
    "alpha_pattern": "alphas by module", "modules_to_save": "whole trained modules", "bias": "trained biases",
    "trainable_token_indices": "trained token rows", "layer_replication": "replicated layers",
    "layers_to_transform": "a choice of layers", "target_parameters": "adapted bare parameters",
    "lora_bias": "a bias on B", "exclude_modules": "modules left out",
}  # fmt: skip
_READ = frozenset({"peft_type", "r", "lora_alpha", "lora_dropout", "target_modules", "init_lora_weights"})
_WITHOUT_EFFECT = frozenset({
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "fan_in_fan_out", "layers_pattern", "megatron_config", "megatron_core", "eva_config", "qalora_group_size",
    "ensure_weight_tying",
})  # fmt: skip
"""Keys that say nothing about what a trained adapter computes (or nothing without another key that is refused)."""
_INITS_OF_AB_ALONE = (None, True, False, "gaussian", "orthogonal", "eva")
"""The other values of init_lora_weights change the base's weights too, which the adapter's file does not hold."""


def save(
    model: nn.Module, cfg: Lora, folder: Path, *, base: str, base_name: str, tokenizer: Tokenizer, readme: str,
    packing: Packing | None = None,
) -> None:  # fmt: skip
    """Write the adapters of `model` to `folder`.

    Args:
        model: a model that `lora.apply` was called on.
        cfg: what it was called with.
        folder: replaced as a whole.
        base: the base model as others know it.
        base_name: the base model as the recipe names it (what `snugtune` itself loads).
        tokenizer: goes along, since an adapter is of little use with another one.
        readme: README.md of the folder.
        packing: how the base was stored, where it was in few bits: the adapter is right over nothing else.
    """
    layers = lora.layers(model)
    tensors = {}
    for name, layer in layers.items():
        tensors[f"{PREFIX}{name}.lora_A.weight"] = layer.lora_A.detach().contiguous()
        tensors[f"{PREFIX}{name}.lora_B.weight"] = layer.lora_B.detach().contiguous()
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True,
        "r": cfg.r, "lora_alpha": cfg.lora_alpha, "lora_dropout": cfg.lora_dropout,
        "target_modules": "all-linear" if cfg.target_modules == "all-linear" else list(cfg.target_modules),
        "fan_in_fan_out": any(layer.transposed for layer in layers.values()), "bias": "none", "modules_to_save": None,
        "use_rslora": False, "use_dora": False, "rank_pattern": {}, "alpha_pattern": {}, "init_lora_weights": True,
    }  # fmt: skip
    with whole_folder(folder) as aside:
        save_file(tensors, aside / "adapter_model.safetensors", metadata={"format": "pt"})
        (aside / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (aside / "snugtune.json").write_text(
            json.dumps({"base": base_name, "packing": packing}) + "\n", encoding="utf-8"
        )
        (aside / "README.md").write_text(readme, encoding="utf-8")
        tokenizer.save_pretrained(aside)


def read_config(folder: Path) -> Lora:
    """What an adapter was trained with. Raises ModelError for a kind of adapter that would be served wrongly."""
    settings = _settings(folder)
    if settings.get("peft_type") != "LORA":
        raise ModelError(f"{folder} is a {settings.get('peft_type')} adapter; only LORA is known")
    for key in settings.keys() - _READ - _WITHOUT_EFFECT:
        if settings[key] not in (None, False, {}, [], "none"):
            meaning = _UNSUPPORTED.get(key, "an unknown key")
            raise ModelError(f"{folder} uses {key} ({meaning}), which is not known here; it would give wrong answers")
    if (init := settings.get("init_lora_weights")) not in _INITS_OF_AB_ALONE:
        raise ModelError(f"{folder} was begun with init_lora_weights={init}, which changes the base's weights as well")
    targets = settings["target_modules"]
    return Lora(
        r=settings["r"], lora_alpha=settings["lora_alpha"], lora_dropout=settings.get("lora_dropout", 0.0),
        target_modules=targets if isinstance(targets, str) else tuple(targets),
    )  # fmt: skip


def load(model: nn.Module, folder: Path) -> None:
    """Put the adapter in `folder` on `model`, frozen. Raises ModelError where its tensors do not match the model's."""
    lora.apply(model, read_config(folder))
    file = folder / "adapter_model.safetensors"
    if not file.is_file():
        raise ModelError(f"{folder} has no adapter_model.safetensors (a pickled adapter is not read)")
    stored = load_file(file)
    for name, layer in lora.layers(model).items():
        for part, parameter in (("lora_A", layer.lora_A), ("lora_B", layer.lora_B)):
            tensor = stored.pop(f"{PREFIX}{name}.{part}.weight", None)
            if tensor is None or tensor.shape != parameter.shape:
                found = "is missing" if tensor is None else f"is {list(tensor.shape)}, not {list(parameter.shape)}"
                raise ModelError(f"{folder} does not fit this model: {part} of {name} {found}")
            parameter.data.copy_(tensor)
    if stored:
        raise ModelError(f"{folder} holds {len(stored)} tensors that this model has no place for: {next(iter(stored))}")
    model.requires_grad_(False)


def _settings(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder} holds no adapter: {error}") from None


@contextmanager
def whole_folder(folder: Path) -> Generator[Path]:
    """A new folder that takes the place of `folder` when the block ends well; until then the old one stays."""
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.new")
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        for file in aside.iterdir():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        if folder.exists():
            folder.rename(old)
        aside.rename(folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
