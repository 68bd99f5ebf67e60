"""A LoRA adapter folded into the weights beneath it, written as a model folder of its own.

    W' = W + (alpha / r) B A        summed in float32, rounded once to the dtype that is written

Every tensor of the base goes through a piece of at most PIECE_BYTES at a time, from the base's files to the new ones, so
that no model and not even a whole tensor is ever in memory. What no adapter touches and is stored in the right dtype
already is copied bit by bit. Where the adapter was trained over a base in 4 bits, W is what it saw: the weight rounded to 4
bits and unpacked again (of every layer that was packed, adapted or not), exact in float32.

Shapes: K input width, N output width, r rank.
"""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from snugtune.adapters import lora, save
from snugtune.errors import InputError, ModelError
from snugtune.kernels.packed import PackedLinear, Rows
from snugtune.models import load, stored
from snugtune.models.stored import Stored
from snugtune.units import MIB, format_bytes

SHARD_BYTES = 500 * MIB
"""A model's weights go into files of at most this size (a single larger tensor has a file to itself)."""
PIECE_BYTES = 16 * MIB
"""Weights that are in float32 at one time."""
TRANSIENT_BYTES = 4 * PIECE_BYTES
"""Most that `write` holds beside the adapter: a piece as it is read, merged, and as it is written (measured: 50 to 55 MiB)."""

_WEIGHTS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_TOKENIZER_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken",
    "chat_template*",
)  # fmt: skip
_OTHER_FILES = ("generation_config.json", "LICENSE*", "NOTICE*")

Advance = Callable[[int, int], None]
"""Called with (tensors done, tensors in all)."""


@dataclass(frozen=True)
class Written:
    """What `write` made."""

    dtype: torch.dtype
    """Of the weights."""
    merged_tensors: int
    size_bytes: int
    """Of all weights."""
    files: int


def merged(
    weight: Tensor, a_rK: Tensor, b_Nr: Tensor, scale: float, dtype: torch.dtype, *, transposed: bool = False
) -> Tensor:
    """weight + scale * B A in `dtype`, through one float32 copy of `weight`.

    Args:
        weight: [N, K], or [K, N] where `transposed` (GPT-2's Conv1D). Any number of its rows do, with the same rows of B
            (of A's columns where transposed).
    """
    sum_ = weight.to(torch.float32, copy=True)
    if transposed:
        sum_.addmm_(a_rK.t().float(), b_Nr.t().float(), alpha=scale)
    else:
        sum_.addmm_(b_Nr.float(), a_rK.float(), alpha=scale)
    return sum_.to(dtype)


@dataclass(frozen=True)
class Role:
    """What is done to one stored weight before it is rounded to the dtype that is written."""

    adapter: lora.LoraLinear | None = None
    """Holds A, B and scale."""
    packed: PackedLinear | None = None
    """The layer that held it in 4 bits, without data."""


def pieces(weight: Rows, shape: Sequence[int], role: Role, dtype: torch.dtype) -> Iterator[Tensor]:
    """A weight with its adapter merged, in `dtype`, a few rows at a time: all that is in memory of it.

    Args:
        weight: a tensor, or one that is still in its file.
        shape: of the whole weight.
        role: what is done to it.
        dtype: of what is given.
    """
    step = rows_at_once(shape, role)
    for start in range(0, shape[0], step):
        stop = min(start + step, shape[0])
        part = weight[start:stop]
        if role.packed is not None:
            part = _as_packed(part, role.packed)
        layer = role.adapter
        if layer is None:
            yield part.to(dtype)
            continue
        a_rK, b_Nr = layer.lora_A, layer.lora_B
        if layer.transposed:
            a_rK = a_rK[:, start:stop]
        else:
            b_Nr = b_Nr[start:stop]
        yield merged(part, a_rK, b_Nr, layer.scale, dtype, transposed=layer.transposed)


def rows_at_once(shape: Sequence[int], role: Role) -> int:
    """Rows of a weight of this shape whose float32 copy takes PIECE_BYTES at most (one row at least; whole groups of inputs
    where they are the rows of a packed weight)."""
    row_bytes = 4 * max(1, torch.Size(shape[1:]).numel())
    rows = max(1, PIECE_BYTES // row_bytes)
    if role.packed is not None and role.packed.transposed:
        return max(rows - rows % role.packed.group, role.packed.group)
    return rows


def _as_packed(weight: Tensor, layer: PackedLinear) -> Tensor:
    """Rows of a weight's file as `layer` held them, float32."""
    return layer.as_stored(weight.t()).t() if layer.transposed else layer.as_stored(weight)


# --- a whole model ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Entry:
    """One tensor on its way from a base's file to a new one."""

    name: str
    stored: Stored
    dtype: torch.dtype
    role: Role

    @property
    def size_bytes(self) -> int:
        return self.stored.numel * self.dtype.itemsize

    @property
    def copied(self) -> bool:
        """Whether it goes over bit by bit."""
        return self.role == Role() and self.dtype == self.stored.dtype


@torch.no_grad()
def write(
    source: load.ModelSource, folder: Path, *, dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES, advance: Advance = lambda done, total: None,
) -> Written:  # fmt: skip
    """Write the base of `source` with its adapter merged into it to `folder`, which exists and is empty.

    All but a README: weights, index where there are several files, config, generation config, licence, and the tokenizer
    that the adapter was saved with (the base's where it has none).

    Args:
        source: a base and an adapter on it.
        folder: see there.
        dtype: of the weights that are written. None: the base's own where that has 16 bits, else bfloat16. A tensor
            that the base stores in another precision than most of its weights (on purpose, then) stays as it is.
        shard_bytes: most weights in a file.
        advance: told after each tensor.

    Raises:
        ModelError: where the adapter does not fit, the base is quantised, or a merged weight is not finite in `dtype`.
        InputError: where the disk has no room for it.
    """
    assert source.adapter is not None
    settings = _config(source)
    entries, dtype = _entries(source, dtype)
    shards = _shards(entries, shard_bytes)
    total_bytes = sum(entry.size_bytes for entry in entries)
    if (free := shutil.disk_usage(folder).free) < total_bytes:
        raise InputError(
            f"the merged weights take {format_bytes(total_bytes)}, and {folder.parent} has {format_bytes(free)} free"
        )
    done = 0
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        with (folder / name).open("wb") as out:
            out.write(stored.header((entry.name, entry.dtype, entry.stored.shape) for entry in shard))
            for entry in shard:
                _copy(entry, out)
                weight_map[entry.name] = name
                done += 1
                advance(done, len(entries))
    if len(shards) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(_in_dtype(settings, dtype), indent=2) + "\n", encoding="utf-8")
    for file in (*_files(tokenizer_folder(source), _TOKENIZER_FILES), *_files(source.folder, _OTHER_FILES)):
        shutil.copyfile(file, folder / file.name)
    return Written(
        dtype=dtype,
        merged_tensors=sum(e.role.adapter is not None for e in entries),
        size_bytes=total_bytes,
        files=len(shards),
    )


def tokenizer_folder(source: load.ModelSource) -> Path:
    """Where the tokenizer lies that belongs to the merged model: the adapter's own where it brought one."""
    assert source.adapter is not None
    own = source.adapter
    brought = (own / "tokenizer_config.json").is_file() and any(own.glob("tokenizer.[jm]*"))  # .json or .model
    return own if brought else source.folder


def _entries(source: load.ModelSource, dtype: torch.dtype | None) -> tuple[list[_Entry], torch.dtype]:
    """Every tensor of the base, in the order of its files, and the dtype of the weights."""
    assert source.adapter is not None
    found: dict[str, Stored] = {}
    for file in load.weight_files(source):  # which looks whether the files are whole
        found |= stored.contents(file)
    sizes: Counter[torch.dtype] = Counter()
    for tensor in found.values():
        if tensor.dtype in _WEIGHTS:
            sizes[tensor.dtype] += tensor.numel
    if not sizes:
        raise ModelError(f"{source.name} holds no weights of 16 or 32 bits to merge into")
    usual = sizes.most_common(1)[0][0]
    dtype = dtype or (usual if usual.itemsize == 2 else torch.bfloat16)
    roles = _roles(source, {name: tensor.shape for name, tensor in found.items()})
    entries = []
    for name, tensor in found.items():
        becomes = dtype if name in roles or tensor.dtype == usual else tensor.dtype
        entries.append(_Entry(name, tensor, becomes, roles.get(name, Role())))
    return entries, dtype


def _roles(source: load.ModelSource, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Role]:
    """What to do to which weight of the base's files. The model's own weights are not loaded.

    Raises:
        ModelError: as `adapters.save.load`, and where a weight is not among the files.
    """
    assert source.adapter is not None
    with torch.device("meta"):
        model = load.shell(load.read_config(source), torch.float32, packing=source.packing)
        save.load(model, source.adapter)  # checks every name and shape; onto meta nothing is copied
    roles: dict[str, Role] = {}
    adapter = stored.contents(source.adapter / "adapter_model.safetensors")
    layers = lora.layers(model)
    for module, layer in layers.items():
        for part in ("lora_A", "lora_B"):
            tensor = adapter[f"{save.PREFIX}{module}.{part}.weight"][:]
            setattr(layer, part, torch.nn.Parameter(tensor, requires_grad=False))
        beneath = layer.base if isinstance(layer.base, PackedLinear) else None
        roles[_stored_name(module, layer.base, model.base_model_prefix, shapes, source)] = Role(layer, beneath)
    for module, layer in model.named_modules():
        if isinstance(layer, PackedLinear) and module.removesuffix(".base") not in layers:
            roles[_stored_name(module, layer, model.base_model_prefix, shapes, source)] = Role(packed=layer)
    return roles


def _stored_name(
    module: str, layer: Any, prefix: str, shapes: Mapping[str, tuple[int, ...]], source: load.ModelSource
) -> str:
    """The name of a linear's weight in the base's files. GPT-2's leave the model's prefix out."""
    if isinstance(layer, PackedLinear):
        expected = [layer.out_features, layer.in_features][:: -1 if layer.transposed else 1]
    else:
        expected = list(layer.weight.shape)
    name = f"{module}.weight"
    found = next((n for n in (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}") if n in shapes), None)
    if found is None or list(shapes[found]) != expected:
        what = "lacks" if found is None else f"has {list(shapes[found])}, not {expected}, for"
        raise ModelError(
            f"the base at {source.folder} {what} the weight of {module}, which is to be merged; if its files use other "
            "names, load it with transformers and save it anew"
        )
    return found


def _shards(entries: Sequence[_Entry], shard_bytes: int) -> list[list[_Entry]]:
    shards: list[list[_Entry]] = [[]]
    filled = 0
    for entry in entries:
        if shards[-1] and filled + entry.size_bytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(entry)
        filled += entry.size_bytes
    # Wide items first, so that each begins at a multiple of its own width.
    return [sorted(shard, key=lambda entry: -entry.dtype.itemsize) for shard in shards]


def _copy(entry: _Entry, out: BinaryIO) -> None:
    """One tensor from its old file to its new one, merged and cast on the way."""
    for piece in pieces(entry.stored, entry.stored.shape or (1,), entry.role, entry.dtype):
        if not entry.copied and not all(math.isfinite(end) for end in torch.stack(piece.aminmax()).tolist()):
            raise ModelError(
                f"{entry.name} is not finite in {_word(entry.dtype)}: the adapter or the base is broken, or this weight is "
                "too large for that dtype"
            )
        out.write(stored.as_bytes(piece))


# --- what lies beside the weights ------------------------------------------------------------------------------------


def _config(source: load.ModelSource) -> dict[str, Any]:
    settings = json.loads((source.folder / "config.json").read_text(encoding="utf-8"))
    if settings.get("quantization_config"):
        raise ModelError(
            f"the weights of {source.folder} are quantised, and an adapter that is folded into them is rounded away; merge "
            "into the 16-bit model that they were made from"
        )
    return settings


def _in_dtype(settings: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The config with its statement of the weights' dtype set right, wherever and under whatever name it makes it."""
    changed = {k: _in_dtype(v, dtype) if k == "text_config" and isinstance(v, dict) else v for k, v in settings.items()}
    for key in ("dtype", "torch_dtype"):
        if key in settings or key == "dtype":
            changed[key] = _word(dtype)
    return changed


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _files(folder: Path, patterns: Sequence[str]) -> list[Path]:
    return sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()})
