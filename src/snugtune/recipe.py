"""Every choice of one run. `what` decides the result, `how` only memory and time.

Plain data: no torch here. A recipe is a YAML file; `load` reads one, lays `--set section.key=value` over it and checks
it; `dump` writes it back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError

from snugtune import cards
from snugtune.errors import RecipeError, nearest
from snugtune.units import MIB, parse_bytes

Precision = Literal["auto", "fp32", "bf16", "fp16"]
Packing = Literal["int4", "nf4", "bf16", "fp16"]
Base = Literal["auto", "fp32", "bf16", "fp16", "int4", "nf4"]
Update = Literal["after_backward", "in_backward"]
Recompute = Literal["none", "selective", "block", "offload"]
Optimizer = Literal["adamw", "adamw_host", "adamw_8bit"]
Batching = Literal["packing", "grouping", "padding"]
Scheduler = Literal["cosine", "linear", "constant", "constant_with_warmup"]


def _check_size(value: Any) -> Any:
    return value if value == "auto" else parse_bytes(value)


def _write_size(value: Any) -> Any:
    return value if value == "auto" or value % MIB else f"{value // MIB}MiB"


Size = Annotated[Literal["auto"] | int, BeforeValidator(_check_size), PlainSerializer(_write_size, when_used="json")]


def _check_device(name: str) -> str:
    if name not in ("auto", "cpu", "cuda"):
        try:
            cards.find(name)
        except RecipeError as error:
            raise ValueError(f"auto, cpu, cuda or a card: {error}") from None
    return name


def _as_list(names: Any) -> Any:
    if isinstance(names, str) and names != "all-linear":
        return tuple(name.strip() for name in names.split(",") if name.strip())
    return names


def _distinct(names: tuple[str, ...] | str) -> tuple[str, ...] | str:
    if not names or not all(names):
        raise ValueError("name at least one module, or write all-linear")
    if names == ("all-linear",):
        return "all-linear"
    return names if isinstance(names, str) else tuple(dict.fromkeys(names))


class Section(BaseModel):
    """A part of the recipe: frozen, and a key that it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Lora(Section):
    """Low-rank adapters, arXiv 2106.09685. Names and meaning are PEFT's."""

    r: int = Field(8, ge=1)
    lora_alpha: float = Field(32, gt=0)
    """The adapter's output is scaled by lora_alpha / r."""
    target_modules: Annotated[
        Literal["all-linear"] | tuple[str, ...], BeforeValidator(_as_list), AfterValidator(_distinct)
    ] = ("q_proj", "v_proj")
    """Last parts of module names (`q_proj`) or longer ends of them (`0.self_attn.q_proj`)."""
    lora_dropout: float = Field(0.0, ge=0, lt=1)


class What(Section):
    """The half that decides the result. The planner never touches it."""

    method: Literal["lora", "full"] = "lora"
    base: Base = "auto"
    """How the frozen base is stored; auto is the compute precision, 16 bits where that loses nothing of the files, and int4
    where no way with either fits the budget."""
    precision: Precision = "auto"
    """What forward and backward compute in; auto is bf16 on a GPU that has it and on a CPU that is measured to
    be at least 1.5 times as fast in it at the model's widths; elsewhere fp16 on a GPU and fp32 on a CPU."""
    lora: Lora = Lora()
    learning_rate: float = Field(2e-4, gt=0)
    global_batch_rows: int = Field(32, ge=1)
    """Rows that one optimiser step sees, however they are cut into micro-batches."""
    num_train_epochs: float = Field(1, gt=0)
    max_steps: int | None = Field(None, ge=1)
    """Ends the run after so many optimiser steps; wins over num_train_epochs."""
    max_length: int = Field(1024, ge=2)
    """Longest row in tokens; a longer one is cut at its end, and left out when no label token is left."""
    lr_scheduler_type: Scheduler = "cosine"
    warmup_ratio: float = Field(0.03, ge=0, le=1)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0, allow_inf_nan=True)
    """Longer gradients are shortened to it; .inf leaves them as they are."""
    seed: int = Field(0, ge=0, lt=2**63)


class How(Section):
    """The half that only decides memory and time. None means: the planner chooses."""

    micro_batch_tokens: int | None = Field(None, ge=1)
    """Most tokens of one forward; a single longer row is a micro-batch of its own."""
    batching: Batching = "packing"
    """How rows share a micro-batch: end to end without padding, or padded to its longest, in order or by like length. The
    planner leaves it as it is: the other two compute the same and more."""
    recompute: Recompute | None = None
    """Activation checkpointing: keep everything, all but the inside of the MLPs, only the input of each block, or not even
    that: it waits in the host's memory (on a CPU, in a file)."""
    loss_chunk_tokens: int | None = Field(None, ge=1)
    """Label tokens whose logits exist at one time."""
    optimizer: Optimizer | None = None
    """Where AdamW keeps its moments: in float32 on the device or in host memory, or in 8 bits on the device. The last
    leaves gradients as they are but not the updates: it is chosen only where neither of the others fits."""
    update: Update | None = None
    """When weights are updated: after the whole backward, or each as soon as its gradient is there, so that the gradients
    never exist together. The latter needs the global batch in one micro-batch, and computes it twice: its norm comes first."""


def _how(value: Any) -> Any:
    return {} if value in (None, "auto") else value


class DataSource(Section):
    """Rows of one file (or packaged data, or a data set of the hub), and how they are read."""

    path: str
    task: str | None = None
    """Which of several tasks they are of."""
    weight: float = Field(1.0, gt=0, le=1000)
    """How often each row comes in an epoch; of a part of one, so many rows are drawn by the seed once and for all."""
    columns: dict[str, str] = {}
    """Name that we know a field by -> name of the column that holds it: {prompt: question_text, completion: reply}."""
    skip_broken_lines: bool = False
    """Leave out lines of a .jsonl that are no JSON, instead of taking the file for damaged."""


def _data(value: Any) -> Any:
    """A path alone, or one source, or several."""
    sources = value if isinstance(value, list) else [value]
    return [{"path": source} if isinstance(source, str) else source for source in sources]


def _short(sources: list[DataSource]) -> Any:
    """As a person would write it: a path alone where nothing else is said."""
    said = [source.model_dump(mode="json", exclude_defaults=True) for source in sources]
    shortest = [one["path"] if set(one) == {"path"} else one for one in said]
    return shortest[0] if len(shortest) == 1 else shortest


class Recipe(Section):
    """One run, whole."""

    model: str = "demo"
    data: Annotated[list[DataSource], BeforeValidator(_data), PlainSerializer(_short), Field(min_length=1)] = [
        DataSource(path="demo")
    ]
    """A file, an id of the hub or `demo`, one with its columns ({path: ..., columns: ...}), or a list of these."""
    eval_data: str | None = None
    """Held-out rows; without it the packaged data brings its own, and other data gives up `eval_rows` of its rows."""
    eval_rows: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    """How many held-out rows are scored; auto is at most 200, and of data without its own held-out rows at most a tenth."""
    most_left_out: float = Field(0.5, ge=0, le=1)
    """Share of the rows that may be left out for what is wrong with them before the run is refused."""
    budget: Size = "auto"
    """Bytes of device memory that may be in use: the whole process on a CPU, context and allocator on a GPU."""
    device: Annotated[str, AfterValidator(_check_device)] = "auto"
    """auto, cpu or cuda; `plan` also takes the name of a card (a100-80gb), at hand or not."""
    what: What = What()
    how: Annotated[How, BeforeValidator(_how)] = How()
    output: str = "runs/demo"

    @property
    def data_names(self) -> str:
        """What it trains on, for a person."""
        return ", ".join(source.path for source in self.data)


def load(path: str | Path | None = None, *, overrides: Sequence[str] = (), **keys: Any) -> Recipe:
    """Read a recipe file, lay `keys` and then `overrides` (each `section.key=value`, value in YAML) over it, check it.

    Raises:
        RecipeError: for a file that is no mapping, an unknown key (with the nearest right one), or a value that does
            not fit its key.
    """
    tree = _read(path) if path is not None else {}
    for key, value in keys.items():
        if value is not None:
            tree[key] = deepcopy(value)  # an override is laid over it, and the caller keeps its own
    for override in overrides:
        _set(tree, override)
    return check(tree)


def check(tree: Mapping[str, Any]) -> Recipe:
    """A recipe from nested plain data. Raises RecipeError as `load` does."""
    try:
        return Recipe.model_validate(dict(tree))
    except ValidationError as error:
        raise RecipeError("\n".join(dict.fromkeys(_explain(e) for e in error.errors()))) from None


def dump(recipe: Recipe, comments: Mapping[str, str] | None = None) -> str:
    """The recipe as YAML, keys in their own order, every default written out; `comments` by whole key (how.recompute)."""
    text = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=1 << 16)
    lines, path = [], list[str]()
    for line in text.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        path = [*path[:depth], line.strip().partition(":")[0]]
        comment = (comments or {}).get(".".join(path))
        lines.append(f"{line}  # {comment}" if comment else line)
    return "\n".join(lines) + "\n"


def _read(path: str | Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"there is no recipe at {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} cannot be read: {error}") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that is none, 2024-99-99
        raise RecipeError(f"{path} is not YAML: {error}") from None
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise RecipeError(f"{path} holds no recipe: its top is a {type(tree).__name__}, not keys with values")
    return tree


def _set(tree: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    if not equals or not path.strip():
        raise RecipeError(f"--set takes section.key=value, not '{override}'")
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        raise RecipeError(f"--set {path}: '{text}' is not a YAML value") from None
    *sections, key = path.strip().split(".")
    here: dict[str, Any] = tree
    for section in sections:
        inner = here.get(section)
        if not isinstance(inner, dict):  # absent, or `how: auto`, or `data: FILE`
            if isinstance(inner, list):
                raise RecipeError(
                    f"--set {override}: {section} is a list here; set this in the recipe, for the one that it is meant for"
                )
            is_path = section == "data" and here is tree
            inner = here[section] = dict[str, Any](path=inner or "demo") if is_path else dict[str, Any]()
        here = inner
    here[key] = _number(value) if value == text.strip() else value  # quoted, it is meant as text


def _number(value: Any) -> Any:
    """YAML 1.1 reads 1e-4 (no dot) as text; a recipe's author means the number."""
    if isinstance(value, str):
        try:
            return float(value) if "e" in value.lower() else value
        except ValueError:
            return value
    return value


def _explain(error: Any) -> str:
    if error["type"] == "extra_forbidden":
        location = [str(part) for part in error["loc"]]  # as written: a wrong key may hold a dash, or nothing at all
        return f"unknown key '{'.'.join(location)}'{_meant(location)}"
    # A union adds its member's name to the location; it says nothing to a user.
    name = ".".join(part for part in error["loc"] if isinstance(part, str) and part.isidentifier())
    message = error["msg"].removeprefix("Value error, ")
    return f"{name or 'the recipe'}: {message[0].lower()}{message[1:]}, not {error['input']!r}"


def _meant(location: Sequence[str]) -> str:
    """Which key an unknown one was to be: its own name in another section, else a name like it here, else elsewhere."""
    *sections, wrong = location
    everywhere = _keys(Recipe)
    here = {key: path for key, path in everywhere.items() if path.split(".")[:-1] == sections}
    for names in ({wrong: everywhere[wrong]} if wrong in everywhere else {}, here, everywhere):
        close = get_close_matches(wrong.lower(), names, n=1)
        if close:
            return nearest(names[close[0]], [names[close[0]]])
    return nearest("", here.values())


def _keys(section: type[BaseModel], prefix: str = "") -> dict[str, str]:
    """Name -> whole key of everything that `section` holds, the sections inside it too."""
    keys: dict[str, str] = {}
    for name, field in section.model_fields.items():
        keys[name] = prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            keys |= _keys(field.annotation, f"{prefix}{name}.")
    return keys
