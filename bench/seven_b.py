"""A 7B model trained within a small memory: a random Llama-2-7B checkpoint is loaded with a 4-bit base and trained.

python bench/seven_b.py [--budget 6GiB] [--steps 2] [--base int4|nf4] [--folder DIR] [--keep] [--json]

Writes 13.5 GB of bf16 safetensors, a file for each block (never the model whole in memory), trains `steps` steps of one row
of 512 tokens, and keeps what `snugtune train` reported as a row in results/seven_b.jsonl. About half an hour on two cores.
"""

from __future__ import annotations

import argparse
import gzip
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from first_run import ROOT, commit
from published import SHAPES

TOKENS = 512
CONFIG = SHAPES["Llama-2-7B"] | {"dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2}
NEEDED_BYTES = 15 * 10**9


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--budget", default="6GiB")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--base", default="int4", choices=("int4", "nf4"))
    parser.add_argument("--folder", type=Path, help="where the checkpoint is, or is to be written")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoint there")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="seven-b-"))
    try:
        if not (folder / "model.safetensors.index.json").exists():
            free = shutil.disk_usage(folder if folder.exists() else folder.parent).free
            if free < NEEDED_BYTES:
                raise SystemExit(
                    f"{folder} has {free / 1e9:.1f} GB free, the checkpoint takes {NEEDED_BYTES / 1e9:.0f}; name another --folder"
                )
            write_checkpoint(folder)
        row = train(folder, options.budget, options.steps, options.base)
    finally:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
    with (ROOT / "results/seven_b.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row) if options.json else json.dumps(row, indent=2))


def write_checkpoint(folder: Path) -> None:
    """Random weights of the size that training begins with, and a tokenizer of the vocabulary's size or less."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2))
    write_tokenizer(folder)
    torch.manual_seed(0)
    where: dict[str, str] = {}
    parts = list(shards())
    for number, part in enumerate(parts, start=1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        tensors = {name: weight(name, shape) for name, shape in part.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
        print(f"\rwriting the checkpoint: {number} of {len(parts)} files", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def shards() -> Iterator[dict[str, torch.Size]]:
    """Names and shapes of the weights, a block at a time."""
    config = AutoConfig.for_model(**CONFIG)
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in AutoModelForCausalLM.from_config(config).named_parameters()}
    blocks: dict[str, dict[str, torch.Size]] = {}
    for name, shape in shapes.items():
        block = name.split(".")[2] if name.startswith("model.layers.") else name
        blocks.setdefault(block, {})[name] = shape
    yield from blocks.values()


def weight(name: str, shape: torch.Size) -> torch.Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02)


def write_tokenizer(folder: Path) -> None:
    """A byte-pair tokenizer, trained on the texts that the package carries."""
    with gzip.open(ROOT / "src/snugtune/data/packaged/banking77_train.csv.gz", "rt", encoding="utf-8") as file:
        lines = file.read().splitlines()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        lines,
        trainers.BpeTrainer(
            vocab_size=CONFIG["vocab_size"], special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
        ),
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as out:
        for start in range(0, 200, 50):  # each of them longer than a row
            out.write(json.dumps({"text": " ".join(lines[start : start + 100])}) + "\n")


def train(folder: Path, budget: str, steps: int, base: str) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="seven-b-run-") as run:
        chosen = {
            "what.base": base, "what.max_length": TOKENS, "what.max_steps": steps, "what.global_batch_rows": 1, "eval_rows": 0,
            "what.num_train_epochs": 1,
        }  # fmt: skip
        started = time.monotonic()
        done = subprocess.run(
            [Path(sys.executable).parent / "snugtune", "train", "--model", folder, "--data", folder / "rows.jsonl", "--budget", budget,
             *(part for key, value in chosen.items() for part in ("--set", f"{key}={value}")), "--output", f"{run}/run", "--json"],
            stdout=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(done.returncode)
        report = json.loads(done.stdout)
        saved = sum(file.stat().st_size for file in Path(report["adapter"]).iterdir())
    kept = (
        "device", "allocator", "how", "steps", "loss_first", "loss_last", "computed_tokens", "tokens_per_second", "predicted_tokens_per_second",
        "train_seconds", "total_seconds", "predicted_peak_bytes", "measured_peak_bytes", "budget_bytes",
    )  # fmt: skip
    return {
        "date": date.today().isoformat(), "commit": commit(), "model": "Llama-2-7B, random weights", "base": base, "row_tokens": TOKENS,
        "seconds": round(time.monotonic() - started, 1), "adapter_bytes": saved,
        "process_peak_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
    } | {key: report[key] for key in kept}  # fmt: skip


if __name__ == "__main__":
    main()
