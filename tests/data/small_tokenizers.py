"""Real small tokenizers, trained here on a few sentences, in the kinds that models come with."""

from __future__ import annotations

from functools import lru_cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>")
SENTENCES = (
    "Customer message: my card has not arrived yet\nIntent: card arrival",
    "What is the capital of France? The capital of France is Paris.",
    "def f(x):\n    if x:\n        return  x + 1\n",
    "user assistant system yes no maybe Yes No", "system\nYou are a helpful assistant.\n",
    "42 3.5 true null 1234567890",
)  # fmt: skip

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Qwen's, without its default system text; there is no generation marker in it."""
DEFAULT_SYSTEM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""SmolLM2's: a system text that nobody wrote comes first."""
STRICT = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] | trim + eos_token }}{% endif %}{% endfor %}"
)
"""Llama 2's and Mistral's: no system role, roles alternate, the answer is trimmed, no generation prompt."""
REWRITES = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and not loop.last %}{{ message['content'].split('</think>')[-1] }}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Qwen 3's: what an earlier turn thought is taken out again."""


THINKS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Qwen 3's, of answers without thoughts: the last one gets an empty thought, earlier ones do not."""
TOOLS = (
    "{% if tools %}{{ '<|im_start|>tools\n' }}{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}{{ '<tool_call>' + call['function'] | tojson + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Qwen 2.5's kind, with functions."""


def _trained() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=list(SPECIAL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(SENTENCES * 4, trainer)
    return tokenizer


def _wrapped(tokenizer: Tokenizer, *, eos: str, pad: str, template: str | None = None) -> PreTrainedTokenizerFast:
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token=eos, pad_token=pad, clean_up_tokenization_spaces=False
    )
    wrapped.chat_template = template
    return wrapped


@lru_cache
def chat(template: str = CHATML) -> PreTrainedTokenizerFast:
    """A chat model's: turns end with its end token."""
    return _wrapped(
        _trained(), eos="</s>" if template == STRICT else "<|im_end|>", pad="<|endoftext|>", template=template
    )


@lru_cache
def plain() -> PreTrainedTokenizerFast:
    """A base model's: no template, nothing is added, and pad is the end token."""
    return _wrapped(_trained(), eos="</s>", pad="</s>")


@lru_cache
def begins(*, ends: bool = False) -> PreTrainedTokenizerFast:
    """One that puts its begin token (and, where `ends`, its end token) around every text, and trims white space off its
    ranges, as Llama 3's does."""
    tokenizer = _trained()
    around = processors.TemplateProcessing(
        single="<s> $A </s>" if ends else "<s> $A",
        special_tokens=[(t, tokenizer.token_to_id(t)) for t in ("<s>", "</s>")],
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), around])
    return _wrapped(tokenizer, eos="</s>", pad="</s>")
