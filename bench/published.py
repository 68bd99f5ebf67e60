"""Our prediction for the recipe of ours nearest to each published run: a comparison, not a target, since the stacks differ.

python bench/published.py           plan them all (no GPU needed), rows to results/published.jsonl, about ten seconds each
python bench/published.py --docs    write the newest rows into docs/memory.md
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from first_run import ROOT, commit, put_into_docs

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
}
SHAPES = {
    "Llama-2-7B": _LLAMA | {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 32000, "tie_word_embeddings": False,
    },
    "Llama-3-8B": _LLAMA | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    },
    "Llama-3.2-3B": _LLAMA | {
        "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
        "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True,
    },
    # Qwen-7B of 2023 has the layers of Llama-2-7B and a large vocabulary.
    "Qwen-7B": _LLAMA | {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 151936, "tie_word_embeddings": False,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Published:
    """One published figure, and how to ask us for the like of it."""

    source: str
    setting: str
    shape: str
    lengths: str
    """Of the rows that one optimiser step sees."""
    micro_batch_rows: int
    memory: str = ""
    """As published, with its unit."""
    speed: float | None = None
    """Tokens/s as published, or worked out from seconds a step."""
    device: str = "a100-80gb"
    choices: tuple[str, ...] = field(default=())
    why: str = ""
    """Where the stacks differ."""


_NONE, _BLOCK, _FULL, _INT4 = "how.recompute=none", "how.recompute=block", "what.method=full", "what.base=int4"
_NF4 = "what.base=nf4"
_QWEN = "no chunked loss there: logits of 152k tokens in float32; its flash attention is the same"
RUNS = (
    Published("LitGPT resource tables", "LoRA r8 q+v, 1 x 1304", "Llama-2-7B", "1304x8", 1, "21.30 GB", device="a100-40gb",
              choices=(_NONE,), why="whole logits, a mask, LoRA on a fused qkv"),
    Published("LitGPT resource tables", "LoRA r8 q+v, 2 x 1304", "Llama-2-7B", "1304x8", 2, "29.07 GB", device="a100-40gb",
              choices=(_NONE,), why="same"),
    Published("LitGPT resource tables", "nf4, 1 x 1304", "Llama-2-7B", "1304x8", 1, "14.14 GB", device="a100-40gb",
              choices=(_NONE, _NF4), why="nf4 without double quantising there"),
    Published("torchtune docs", "LoRA r8 q,v, 2 rows (length not stated, 512 taken), recompute", "Llama-2-7B", "512x8", 2, "15.57 GB",
              choices=(_BLOCK,), why="length unknown"),
    Published("torchtune docs", "QLoRA, same", "Llama-2-7B", "512x8", 2, "9.29 GB", choices=(_BLOCK, _NF4), why="length unknown"),
    *(
        Published("Qwen README", f"LoRA, 1 x {tokens}", "Qwen-7B", f"{tokens}x8", 1, f"{memory} GB", 8 * tokens / seconds,
                  choices=(_NONE if tokens < 4096 else _BLOCK, f"what.max_length={tokens}"), why=_QWEN)
        for tokens, memory, seconds in ((256, 20.1, 1.2), (1024, 21.5, 2.8), (2048, 23.8, 5.2), (8192, 36.6, 21.3))
    ),
    *(
        Published("Qwen README", f"Q-LoRA int4, 1 x {tokens}", "Qwen-7B", f"{tokens}x8", 1, f"{memory} GB",
                  choices=(_BLOCK, _INT4, f"what.max_length={tokens}"), why="its embedding and head are 16-bit too")
        for tokens, memory in ((1024, 12.3), (8192, 23.5))
    ),
    Published("LLaMA-Factory wiki", "HF 16-bit + FlashAttention 2, 4 x 1024", "Llama-2-7B", "1024x8", 4, "17 GB", 2954.0,
              choices=(_BLOCK,), why="whole logits there"),
    Published("LLaMA-Factory wiki", "Unsloth 16-bit, 4 x 1024", "Llama-2-7B", "1024x8", 4, "16 GB", 4007.0, choices=(_BLOCK,),
              why="fused kernels there"),
    Published("LLaMA-Factory wiki", "Unsloth 4-bit, 4 x 1024", "Llama-2-7B", "1024x8", 4, "7 GB", 3726.0, choices=(_BLOCK, _INT4),
              why="nf4, inputs of blocks offloaded to the host"),
    Published("torchtune README", "full, 2 x 4096, chunked loss, recompute, compiled", "Llama-3.2-3B", "4096x2", 2, "24.9 GiB", 7210.0,
              choices=(_FULL, _BLOCK, "what.max_length=4096"), why="bf16 weights and moments there, float32 here"),
    Published("torchtune README", "LoRA, same", "Llama-3.2-3B", "4096x2", 2, "8.5 GiB", 8210.0,
              choices=(_BLOCK, "what.max_length=4096"), why="compiled there"),
    Published("NeMo AutoModel summary", "LoRA, 2 x 4096", "Llama-3-8B", "4096x2", 2, "", 12473.0, device="h100-80gb",
              choices=(_NONE, "what.max_length=4096"), why="fused kernels there"),
    Published("ms-swift examples", "full, one card", "Llama-2-7B", "1024x8", 1, "76 GiB",
              choices=(_FULL, _BLOCK, "how.optimizer=adamw_host"), why="moments on the host here"),
    Published("PEFT MetaMathQA", "LoRA r32, 4 x 512 taken", "Llama-3.2-3B", "512x8", 4, "20.8 GiB",
              choices=(_NONE, "what.lora.r=32"), why="whole logits of 128k tokens there"),
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", action="store_true")
    if parser.parse_args().docs:
        write_docs()
        return
    from snugtune import api
    from snugtune import recipe as recipes

    with tempfile.TemporaryDirectory() as folder, (ROOT / "results/published.jsonl").open("a") as file:
        for name, shape in SHAPES.items():
            (Path(folder) / name).mkdir()
            (Path(folder) / name / "config.json").write_text(json.dumps(shape))
        for run in RUNS:
            length, rows = (int(part) for part in run.lengths.split("x"))
            recipe = recipes.load(
                model=str(Path(folder) / run.shape), budget="160GiB", device=run.device,
                overrides=[f"what.global_batch_rows={rows}", "what.max_steps=1", f"how.micro_batch_tokens={run.micro_batch_rows * length}",
                           *run.choices],
            )  # fmt: skip
            ladder = api.plan(recipe, token_lengths=run.lengths)
            plan = ladder.plans[0] if ladder.plans else min(ladder.too_large, key=lambda p: p.needed_bytes)
            row = {
                "date": date.today().isoformat(), "commit": commit(), "source": run.source, "model": run.shape, "setting": run.setting,
                "published_memory": run.memory, "published_tokens_per_second": run.speed, "device": run.device,
                "predicted_peak_bytes": plan.peak_bytes, "predicted_tokens_per_second": plan.tokens_per_second, "why": run.why,
            }  # fmt: skip
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(f"{run.source:<24} {run.setting:<60} {run.memory:>9} {plan.peak_bytes / 1e9:6.1f} GB "
                  f"{run.speed or 0:6.0f} {plan.tokens_per_second:6.0f} tokens/s", flush=True)  # fmt: skip


def write_docs() -> None:
    rows = [json.loads(line) for line in (ROOT / "results/published.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["commit"] == rows[-1]["commit"]]
    lines = [
        f"Commit {rows[-1]['commit']}, {rows[-1]['date']}; ours is predicted, nothing of it was run.", "",
        "| source | model, setting | card | published | ours | published tokens/s | ours | what differs |", "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in rows:
        unit, size = ("GiB", 1 << 30) if "GiB" in row["published_memory"] else ("GB", 10**9)
        speed = f"{row['published_tokens_per_second']:.0f}" if row["published_tokens_per_second"] else ""
        lines.append(
            f"| {row['source']} | {row['model']}, {row['setting']} | {row['device']} | {row['published_memory']} | "
            f"{row['predicted_peak_bytes'] / size:.1f} {unit} | {speed} | {row['predicted_tokens_per_second']:.0f} | {row['why']} |"
        )
    put_into_docs("bench/published.py", lines)


if __name__ == "__main__":
    main()
