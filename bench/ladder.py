"""The predicted ladder of a 7B model: what each way needs, which card holds it, how fast it is; and the longest row a card holds.

python bench/ladder.py           plan them all (no GPU needed), rows to results/ladder.jsonl; a few minutes
python bench/ladder.py --docs    write the newest rows into docs/memory.md
"""

from __future__ import annotations

import argparse
import json
import tempfile
from datetime import date
from itertools import chain
from pathlib import Path
from typing import Any

import snugtune
from first_run import ROOT, commit, put_into_docs
from published import SHAPES
from snugtune import recipe as recipes
from snugtune.errors import DoesNotFit

DEVICE = "a100-80gb"
CARDS_GB = (80, 40, 24, 16, 12, 8, 6)
_LORA = ("what.base=bf16",)
WAYS = {
    "full, float32 moments": ("what.method=full", "how.optimizer=adamw", "how.recompute=block"),
    "full, moments on the host": ("what.method=full", "how.optimizer=adamw_host", "how.recompute=block"),
    "full, 8-bit moments": ("what.method=full", "how.optimizer=adamw_8bit", "how.recompute=block"),
    "LoRA": (*_LORA, "how.recompute=none"),
    "LoRA, recompute selective": (*_LORA, "how.recompute=selective"),
    "LoRA, recompute": (*_LORA, "how.recompute=block"),
    "LoRA, recompute, inputs on the host": (*_LORA, "how.recompute=offload"),
    "nf4": ("what.base=nf4", "how.recompute=none"),
    "nf4 + recompute": ("what.base=nf4", "how.recompute=block"),
    "nf4 + recompute, inputs on the host": ("what.base=nf4", "how.recompute=offload"),
    "int4 + recompute": ("what.base=int4", "how.recompute=block"),
}
PUBLISHED_LONGEST = {8: 2972, 12: 21848, 16: 40724, 24: 78475, 40: 153977, 48: 191728, 80: 342733}
"""Tokens of one row: Unsloth's README, Llama-3-8B, QLoRA r=32 on all linears, one row (CLAIMS of 2025)."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--docs", action="store_true", help="write docs/memory.md's tables from the newest rows")
    parser.add_argument("--only", choices=["ways", "longest"], help="one of the tables")
    arguments = parser.parse_args()
    if arguments.docs:
        return write_docs()
    tables = [table for table in (ways, longest) if arguments.only in (None, table.__name__)]
    made = {"date": date.today().isoformat(), "commit": commit(), "device": DEVICE}
    with tempfile.TemporaryDirectory() as scratch, (ROOT / "results/ladder.jsonl").open("a") as out:
        for row in chain.from_iterable(table(Path(scratch)) for table in tables):
            print(json.dumps(row), flush=True)
            out.write(json.dumps(made | row) + "\n")
            out.flush()


def planned(folder: Path, shape: str, lengths: str, *choices: str, budget: str = "80GB", **changes: Any) -> Any:
    """The ladder for a model of this shape."""
    model = folder / shape
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(SHAPES[shape] | changes))
    recipe = recipes.load(model=str(model), budget=budget, device=DEVICE, overrides=choices)
    return snugtune.plan(recipe, token_lengths=lengths)


def ways(folder: Path) -> Any:
    for way, choices in WAYS.items():
        for rows in (1, 4):
            size = ("what.global_batch_rows=4", f"how.micro_batch_tokens={rows * 1024}")
            try:
                ladder = planned(folder, "Llama-2-7B", "1024x64", *choices, *size)
                plan = ladder.chosen
                alive = sum(tensor.size_bytes for tensor in ladder.contents["step"])
                found = {
                    "needed_bytes": plan.needed_bytes,
                    "tensor_bytes": alive,
                    "tokens_per_second": plan.tokens_per_second,
                }
            except DoesNotFit as error:
                found = {"needed_bytes": error.smallest_bytes, "tensor_bytes": None, "tokens_per_second": None}
            yield {"table": "ways", "way": way, "rows": rows} | found


def longest(folder: Path) -> Any:
    """By a line through two lengths, and then planned whole and shortened until it fits."""
    needs: dict[int, int] = {}

    def plan(tokens: int, budget: str) -> Any:
        return planned(
            folder, "Llama-3-8B", f"{tokens}x2", "what.base=nf4", "how.recompute=offload", "what.lora.r=32",
            "what.lora.target_modules=all-linear", "what.global_batch_rows=1", f"what.max_length={tokens}",
            "how.optimizer=adamw", "how.update=after_backward",
            f"how.micro_batch_tokens={tokens}", budget=budget, max_position_embeddings=1 << 20,
        ).chosen  # fmt: skip

    def needed(tokens: int) -> int:
        if tokens not in needs:
            try:
                plan(tokens, "1GB")
            except DoesNotFit as error:
                needs[tokens] = error.smallest_bytes
        return needs[tokens]

    for card, published in PUBLISHED_LONGEST.items():
        # Bytes grow by a line with the tokens: two lengths tell where it meets the card.
        one, other = needed(published // 2), needed(published)
        fits = published // 2 + int((card * 10**9 - one) / (other - one) * (published - published // 2))
        found = None
        while found is None:
            try:
                found = plan(fits, f"{card}GB")
            except DoesNotFit:
                fits = fits * 99 // 100
        yield {
            "table": "longest", "card_gb": card, "tokens": fits, "published_tokens": published, "needed_bytes": found.needed_bytes,
            "tokens_per_second": found.tokens_per_second,
        }  # fmt: skip


def write_docs() -> None:
    rows = [json.loads(line) for line in (ROOT / "results/ladder.jsonl").read_text().splitlines()]
    last = {row["table"]: (row["commit"], row["date"]) for row in rows}
    newest = [row for row in rows if (row["commit"], row["date"]) == last[row["table"]]]
    gib = 1 << 30
    lines = [
        f"Commit {newest[0]['commit']}, {newest[0]['date']}, predicted for {DEVICE}. Llama-2-7B, LoRA r=8 on q and v. 'Needs' is everything that the card "
        "has to hold, 'tensors' what of it is alive in tensors.", "",
        "| way | micro-batch | tensors, GiB | needs, GiB | smallest card | tokens/s |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in newest:
        if row["table"] == "ways":
            cards = [card for card in CARDS_GB if row["needed_bytes"] <= card * 10**9]
            alive = f"{row['tensor_bytes'] / gib:.1f}" if row["tensor_bytes"] else "-"
            speed = f"{row['tokens_per_second']:,.0f}" if row["tokens_per_second"] else "-"
            card = f"{min(cards)} GB" if cards else "more than 80 GB"
            lines.append(
                f"| {row['way']} | {row['rows']} x 1024 | {alive} | {row['needed_bytes'] / gib:.1f} | {card} | {speed} |"
            )
    longest_rows = [row for row in newest if row["table"] == "longest"]
    if longest_rows:
        lines += [
            "", "The longest row that a card holds: Llama-3-8B, nf4, LoRA r=32 on all linears, recompute with inputs on the host. Published: Unsloth's README.", "",
            "| card | predicted, tokens | published, tokens |", "|---|---|---|",
        ]  # fmt: skip
    for row in longest_rows:
        lines.append(f"| {row['card_gb']} GB | {row['tokens']:,} | {row['published_tokens']:,} |")
    put_into_docs("bench/ladder.py", lines)


if __name__ == "__main__":
    main()
