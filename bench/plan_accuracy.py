"""Predicted against measured peak of the real model on this machine, a process a recipe; rows go to results/.

python bench/plan_accuracy.py [--steps 3]     measure, about half a minute a recipe
python bench/plan_accuracy.py --docs          write the newest commit's rows into docs/memory.md
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

from first_run import ROOT, commit, put_into_docs

_LONG = ["--data", "{long}", "--set", "what.global_batch_rows=8"]
_BLOCK, _NONE, _SELECTIVE = (["--set", f"how.recompute={policy}"] for policy in ("block", "none", "selective"))
_FULL = ["--method", "full"]
RECIPES = {
    "lora in 1200MiB": ["--budget", "1200MiB"],
    "lora in 1500MiB": ["--budget", "1500MiB"],
    "lora in 1800MiB": ["--budget", "1800MiB"],
    "lora in 3GiB": ["--budget", "3GiB"],
    "lora block": ["--budget", "3GiB", *_BLOCK],
    "lora selective": ["--budget", "3GiB", *_SELECTIVE],
    "lora none 256": ["--budget", "3GiB", *_NONE, "--set", "how.micro_batch_tokens=256"],
    "lora selective 512": ["--budget", "3GiB", *_SELECTIVE, "--set", "how.micro_batch_tokens=512"],
    "lora block 128": ["--budget", "3GiB", *_BLOCK, "--set", "how.micro_batch_tokens=128"],
    "lora r32 all-linear, dropout": [
        "--budget", "4GiB", "--set", "what.lora.r=32", "--set", "what.lora.target_modules=all-linear", "--set",
        "what.lora.lora_dropout=0.1",
    ],
    "lora r32 all-linear, selective": [
        "--budget", "4GiB", *_SELECTIVE, "--set", "what.lora.r=32", "--set", "what.lora.target_modules=all-linear",
    ],
    "lora bf16": ["--budget", "2GiB", "--set", "what.base=bf16"],
    "lora bf16 block": ["--budget", "2GiB", "--set", "what.base=bf16", *_BLOCK],
    "lora int4": ["--budget", "2GiB", "--set", "what.base=int4"],
    "lora int4 block in 1GiB": ["--budget", "1GiB", "--set", "what.base=int4"],
    "lora, 77 intents": ["--budget", "2GiB", "--data", "banking77"],
    "lora, 77 intents, large chunks": ["--budget", "3GiB", "--data", "banking77", "--set", "how.loss_chunk_tokens=1024"],
    "lora, long rows": ["--budget", "4GiB", *_LONG, *_NONE],
    "lora, long rows, selective": ["--budget", "3GiB", *_LONG, *_SELECTIVE],
    "lora, long rows, block": ["--budget", "3GiB", *_LONG, *_BLOCK],
    "lora, long rows in 6GiB": ["--budget", "6GiB", *_LONG],
    "full in 3GiB": ["--budget", "3GiB", *_FULL],
    "full none": ["--budget", "5GiB", *_FULL, *_NONE],
    "full none 512": ["--budget", "5GiB", *_FULL, *_NONE, "--set", "how.micro_batch_tokens=512"],
    "full selective 1024": ["--budget", "4GiB", *_FULL, *_SELECTIVE, "--set", "how.micro_batch_tokens=1024"],
    "full selective": ["--budget", "4GiB", *_FULL, *_SELECTIVE],
    "full block, 8 bits": ["--budget", "3GiB", *_FULL, *_BLOCK, "--set", "how.optimizer=adamw_8bit"],
    "full in 2GiB": ["--budget", "2GiB", *_FULL],
    "full bf16": ["--budget", "4GiB", *_FULL, "--set", "what.precision=bf16"],
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--docs", action="store_true")
    parser.add_argument("--only", default="", help="recipes whose names begin so")
    arguments = parser.parse_args()
    steps = arguments.steps
    if arguments.docs:
        write_docs()
        return
    off = []
    with tempfile.TemporaryDirectory() as folder, (ROOT / "results/plan_accuracy.jsonl").open("a") as file:
        long = Path(folder) / "long.jsonl"
        long.write_text("".join(json.dumps(row) + "\n" for row in long_rows()))
        for name, flags in RECIPES.items():
            if not name.startswith(arguments.only):
                continue
            flags = [flag.replace("{long}", str(long)) for flag in flags]
            row = measure(name, flags, steps, Path(folder) / name.replace(" ", "_").replace(",", ""))
            file.write(json.dumps({"date": date.today().isoformat(), "commit": commit(), **row}) + "\n")
            file.flush()
            if "error" in row:
                print(f"{name:<30} {row['error']}")
                continue
            off.append(row["predicted_peak_bytes"] / row["measured_peak_bytes"] - 1)
            speed = row["predicted_tokens_per_second"] / row["tokens_per_second"] - 1
            print(
                f"{name:<30} {row['predicted_peak_bytes'] >> 20:>5} {row['measured_peak_bytes'] >> 20:>5} MiB {off[-1]:+7.1%}"
                f"   {row['predicted_tokens_per_second']:>5.0f} {row['tokens_per_second']:>5.0f} tokens/s {speed:+5.0%}",
                flush=True,
            )
    print(
        f"median error {statistics.median(map(abs, off)):.1%}, worst {max(off, key=abs):+.1%}, lowest {min(off):+.1%}"
    )


def write_docs() -> None:
    rows = [json.loads(line) for line in (ROOT / "results/plan_accuracy.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["commit"] == rows[-1]["commit"]]
    lines = [
        f"Commit {rows[-1]['commit']}, {rows[-1]['date']}, {next(r['device'] for r in rows if 'device' in r)}; 4 steps, peaks in MiB.",
        "", "| recipe | recompute, micro-batch, optimiser | predicted | measured | off | predicted tokens/s | measured | off |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    off, speed_off = [], []
    for row in rows:
        if "error" in row:
            lines.append(f"| {row['recipe']} | | | | {row['error'][:120]} | | | |")
            continue
        how, predicted, measured = row["how"], row["predicted_peak_bytes"], row["measured_peak_bytes"]
        off.append(predicted / measured - 1)
        told, real = row["predicted_tokens_per_second"], row["tokens_per_second"]
        speed_off.append(told / real - 1)
        way = f"{how['recompute']}, {how['micro_batch_tokens']}, {how['optimizer']}"
        lines.append(
            f"| {row['recipe']} | {way} | {predicted >> 20} | {measured >> 20} | {off[-1]:+.1%} | {told:.0f} | {real:.0f} | "
            f"{speed_off[-1]:+.0%} |"
        )
    for name, values in (("Peak", off), ("Speed", speed_off)):
        lines += [
            "",
            f"{name}: median error {statistics.median(map(abs, values)):.1%}, highest {max(values):+.1%}, lowest {min(values):+.1%}.",
        ]
    put_into_docs("bench/plan_accuracy.py", lines)


def measure(name: str, flags: list[str], steps: int, output: Path) -> dict:
    command = [str(Path(sys.executable).parent / "snugtune"), "train", *flags, "--set", f"what.max_steps={steps}"]
    command += ["--set", "eval_rows=20", "--output", str(output), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        return {"recipe": name, "error": done.stderr.strip().splitlines()[-1][:300]}
    report = json.loads(done.stdout)
    kept = (
        "device",
        "allocator",
        "how",
        "predicted_peak_bytes",
        "measured_peak_bytes",
        "budget_bytes",
        "tokens_per_second",
        "predicted_tokens_per_second",
    )
    return {"recipe": name, **{key: report[key] for key in kept}}


def long_rows() -> list[dict]:
    """Rows of 200 to 900 tokens with answers of a third of that."""
    return [
        {"prompt": "word " * (150 + 37 * i % 450), "completion": " answer" * (60 + 53 * i % 300)} for i in range(40)
    ]


if __name__ == "__main__":
    main()
