"""Tiny random models, one or more for every family that is packed, and rows of random tokens for them.

Norm weights of exactly one and biases of exactly zero hide mistakes (a scale left out, a bias added twice), so every
parameter is drawn anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tokenizers
import tokenizers.models
import tokenizers.pre_tokenizers
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from snugtune.data.encode import EncodedRow
from snugtune.kernels import attention
from snugtune.recipe import Recipe, check

VOCAB = 128
WINDOW = 5
"""Sliding windows are this wide, so that most rows are longer."""

_SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_BOTH_LAYERS = ["sliding_attention", "full_attention"]
_SLIDING = {"sliding_window": WINDOW, "layer_types": _BOTH_LAYERS}
_WHOLE_HEADS = {"num_key_value_heads": 4}
_GPT2 = {
    "vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere": ("cohere", {"logit_scale": 0.3}),
    "cohere-qk-norm": ("cohere", {"logit_scale": 0.3, "use_qk_norm": True}),
    "cohere2": ("cohere2", {"logit_scale": 0.3, "head_dim": 8, **_SLIDING}),
    "exaone4": ("exaone4", {"head_dim": 8, **_SLIDING}),
    "gemma": ("gemma", {"head_dim": 12}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 12, "query_pre_attn_scalar": 20, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 3.0,
            **_SLIDING,
        },
    ),
    "gemma3_text": ("gemma3_text", {"head_dim": 12, "query_pre_attn_scalar": 20, **_SLIDING}),
    "glm": ("glm", {"head_dim": 8}),
    "glm4": ("glm4", {"head_dim": 8}),
    "gpt2": ("gpt2", _GPT2),
    "gpt2-scaled-by-depth": ("gpt2", _GPT2 | {"scale_attn_by_inverse_layer_idx": True}),
    "gpt_neox": ("gpt_neox", {}),
    "gpt_neox-one-after-the-other": ("gpt_neox", {"use_parallel_residual": False}),
    "granite": (
        "granite",
        {"embedding_multiplier": 1.7, "logits_scaling": 2.5, "residual_multiplier": 0.6, "attention_multiplier": 0.2},
    ),
    "helium": ("helium", {"head_dim": 8}),
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama-llama3-rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
            }
        },
    ),
    "llama-yarn-rope": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
            }
        },
    ),
    "ministral": ("ministral", {"head_dim": 8, **_SLIDING}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-sliding": ("mistral", {"sliding_window": WINDOW}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", _SLIDING),
    "phi": ("phi", _WHOLE_HEADS),
    "phi-qk-norm": ("phi", {"qk_layernorm": True}),
    "phi3": ("phi3", {}),
    "phi3-sliding": ("phi3", {"sliding_window": WINDOW}),
    "qwen2": ("qwen2", {}),
    "qwen2-sliding": ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": WINDOW}),
    "qwen3": ("qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "starcoder2": ("starcoder2", {}),
    "starcoder2-sliding": ("starcoder2", {"sliding_window": WINDOW}),
}  # fmt: skip
"""name -> (family, what is set besides the common shape); every packed family has at least one."""

UNLISTED: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo": ("olmo", {}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "nemotron": ("nemotron", {"head_dim": 8}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
}
"""Families that are run a row at a time: nobody has looked at the first two, and the others do not hand the row
boundaries down to their attention function."""


def config(name: str, **changes: Any) -> PretrainedConfig:
    """The configuration of one of VARIANTS (or of an unlisted family), with `changes`."""
    family, own = (VARIANTS | UNLISTED)[name]
    shape = {} if family == "gpt2" else _SHAPE
    return CONFIG_MAPPING[family](**(shape | own | changes))


def model(
    name: str, *, attn: str = attention.NAME, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """A frozen random model. The same name, seed and changes give the same weights whatever `attn` and `dtype` are."""
    attention.register()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = AutoModelForCausalLM.from_config(config(name, **changes), attn_implementation=attn, dtype=torch.float32)
        _draw(made.parameters(), torch.Generator().manual_seed(seed))
    for parameter in made.parameters():
        parameter.data = parameter.data.to(dtype)  # buffers (rotary frequencies) stay float32, as in a loaded model
    return made.requires_grad_(False).eval()


@torch.no_grad()
def _draw(parameters: Iterable[Tensor], generator: torch.Generator) -> None:
    for parameter in parameters:
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(noise * 0.2 if parameter.ndim > 1 else parameter + noise * 0.2)


def pair(name: str, *, seed: int = 0, **changes: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """(model with our attention, the same weights with the family's own eager attention)."""
    return model(name, seed=seed, **changes), model(name, attn="eager", seed=seed, **changes)


def rows(lengths: Sequence[int], *, seed: int = 0, labels: Sequence[int] | None = None) -> list[EncodedRow]:
    """Rows of random tokens. `labels`: how many of each row's last tokens are labels; without it two thirds of all are.

    The first token of a row never is one, and the last one always is (but in a row of a single token).
    """
    random = np.random.default_rng(seed)
    made = []
    for number, length in enumerate(lengths):
        ids = random.integers(3, VOCAB, length).astype(np.int32)
        if labels is None:
            is_label = random.random(length) < 2 / 3
            is_label[-1] = True
        else:
            is_label = np.arange(length) >= length - labels[number]
        is_label[0] = False
        made.append(EncodedRow(f"row {number}", ids, is_label))
    return made


def choice_rows(trees: Sequence[tuple[int, Sequence[Sequence[int]]]], *, seed: int = 0) -> list[EncodedRow]:
    """Rows with known answers: for each, the prompt's length and its answers' tokens; the right answer goes round."""
    random = np.random.default_rng(seed)
    made = []
    for number, (prompt, answers) in enumerate(trees):
        start = random.integers(3, VOCAB, prompt).tolist()
        choices = tuple((*start, *answer) for answer in answers)
        right = number % len(answers)
        ids = np.array(choices[right], dtype=np.int32)
        made.append(EncodedRow(f"row {number}", ids, np.arange(len(ids)) >= prompt, choices, right))
    return made


def tokenizer(words: int = VOCAB - 3, *, pad: str = "</s>") -> PreTrainedTokenizerFast:
    """Words w3, w4, ... split at spaces. Its pad token is the end token unless told otherwise."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, words + 3)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token=pad
    )


def row_loss(reference: PreTrainedModel, row: EncodedRow) -> Tensor:
    """Summed token loss of one row through the family's own forward, in plain words."""
    ids = torch.tensor(row.ids.tolist())
    logits = reference(input_ids=ids[None], use_cache=False).logits[0].float()
    at = torch.tensor(np.flatnonzero(row.is_label))
    return F.cross_entropy(logits[at - 1], ids[at], reduction="sum")


def recipe(*, what: dict[str, Any] | None = None, how: dict[str, Any] | None = None) -> Recipe:
    """A recipe with these choices."""
    return check({"what": what or {}, "how": how or {}})


def assert_close(got: Tensor | float, expected: Tensor | float, *, within: float, name: str) -> None:
    """Largest difference at most `within` of the largest expected value (not elementwise: small entries are sums of
    large ones)."""
    got_D, expected_D = (torch.as_tensor(x, dtype=torch.float64) for x in (got, expected))
    assert got_D.shape == expected_D.shape, f"{name}: shape {list(got_D.shape)}, expected {list(expected_D.shape)}"
    if got_D.numel() == 0:
        return
    worst = (got_D - expected_D).abs().max().item()
    size = expected_D.abs().max().item()
    assert worst <= within * max(size, 1e-8), f"{name}: off by {worst:.3e} where the largest value is {size:.3e}"
