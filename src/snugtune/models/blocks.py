"""Where the parts of a transformers decoder are: backbone, blocks, head.

A family stands in `PACKED_FAMILIES` when a test on a tiny random configuration shows that its logits are
head(backbone(...)) and that it hands the row boundaries down to the attention function. Any other family is run as it
is, a row at a time and through its own forward: slower, never wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from snugtune.errors import ModelError

PACKED_FAMILIES = frozenset({
    "cohere", "cohere2", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt2", "gpt_neox", "granite",
    "helium", "llama", "mistral", "ministral", "olmo2", "olmo3", "phi", "phi3", "qwen2", "qwen3",
    "smollm3", "starcoder2",
})  # fmt: skip

ENDS_WITH_MLP = PACKED_FAMILIES - {"exaone4", "gemma2", "gemma3_text", "glm4", "olmo2", "olmo3"}
"""Their blocks add the MLP's output to the residual as it is. A test fills that output with NaN and looks at the gradients."""

_ROPE_BY_LENGTH = frozenset({"dynamic", "longrope"})
"""Rotary frequencies that transformers chooses by the largest position of a forward: a short row would change beside a
long one."""


@dataclass(frozen=True)
class Anatomy:
    """The parts of one model by their role. Modules, not copies."""

    backbone: nn.Module
    """Token ids to hidden states after the last norm."""
    blocks: nn.ModuleList
    mlps: tuple[nn.Module, ...]
    """The feed-forward part of each block, without the norm before it. Empty where a block has no module of that role (OPT
    writes it out in the block itself)."""
    ends_with_mlp: bool
    """Whether what a block gives is a sum with its MLP's output, unchanged but for a constant factor: no norm comes after it."""
    head: nn.Linear
    logit_scale: float
    softcap: float | None
    packs: bool
    """False: run it a row at a time through its own forward."""


def anatomy(model: PreTrainedModel) -> Anatomy:
    """Find the parts of `model`. Raises ModelError where there is no list of blocks or no output head."""
    config = model.config
    backbone = model.get_decoder()
    blocks = _blocks(backbone, config)
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelError(f"{type(model).__name__} has no linear output head; snugtune trains causal language models")
    return Anatomy(
        backbone=backbone,
        blocks=blocks,
        mlps=_mlps(blocks),
        ends_with_mlp=config.model_type in ENDS_WITH_MLP,
        head=head,
        logit_scale=_logit_scale(config),
        softcap=getattr(config, "final_logit_softcapping", None),
        packs=packs(config),
    )


def packs(config: PretrainedConfig) -> bool:
    """Whether rows of this model may stand together in one sequence and still be scored as if each were alone."""
    return config.model_type in PACKED_FAMILIES and not rope_types(config) & _ROPE_BY_LENGTH


def rope_types(config: PretrainedConfig) -> set[str]:
    """Every kind of rotary positions that the model's layers use."""
    settings = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [inner for inner in settings.values() if isinstance(inner, dict)]
    return {inner.get("rope_type", "default") for inner in (settings, *by_layer_type)}


def _blocks(backbone: nn.Module, config: PretrainedConfig) -> nn.ModuleList:
    depth = config.get_text_config().num_hidden_layers
    for module in backbone.modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return module
    raise ModelError(f"{type(backbone).__name__} has no list of {depth} blocks, though its config says so")


def _mlps(blocks: nn.ModuleList) -> tuple[nn.Module, ...]:
    """By their name: transformers calls them `mlp` in all of PACKED_FAMILIES and in most others."""
    found = [getattr(block, "mlp", None) for block in blocks]
    mlps = tuple(mlp for mlp in found if isinstance(mlp, nn.Module))
    return mlps if len(mlps) == len(blocks) else ()


def _logit_scale(config: PretrainedConfig) -> float:
    if config.model_type == "granite":
        return 1 / config.logits_scaling
    if config.model_type in ("cohere", "cohere2"):
        return config.logit_scale
    return 1.0
