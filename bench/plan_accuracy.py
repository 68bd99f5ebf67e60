"""Predicted against measured peak of the real model on this machine, a process a recipe; rows go to results/.

python bench/plan_accuracy.py [--steps 3]     takes about half a minute a recipe
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

from first_run import ROOT, commit

RECIPES = {
    "lora none": ["--budget", "3GiB", "--set", "how.recompute=none"],
    "lora none 256": ["--budget", "3GiB", "--set", "how.recompute=none", "--set", "how.micro_batch_tokens=256"],
    "lora block": ["--budget", "3GiB", "--set", "how.recompute=block"],
    "lora block 128": ["--budget", "3GiB", "--set", "how.recompute=block", "--set", "how.micro_batch_tokens=128"],
    "lora in 1200MiB": ["--budget", "1200MiB"],
    "lora in 1500MiB": ["--budget", "1500MiB"],
    "lora in 1800MiB": ["--budget", "1800MiB"],
    "lora r32 all-linear, dropout": [
        "--budget", "3GiB", "--set", "what.lora.r=32", "--set", "what.lora.target_modules=all-linear", "--set",
        "what.lora.lora_dropout=0.1",
    ],
    "lora bf16": ["--budget", "2GiB", "--set", "what.base=bf16"],
    "lora bf16 block": ["--budget", "2GiB", "--set", "what.base=bf16", "--set", "how.recompute=block"],
    "lora, 77 intents": ["--budget", "2GiB", "--data", "banking77"],
    "lora, long rows": ["--budget", "3GiB", "--data", "{long}", "--set", "what.global_batch_rows=4"],
    "lora, long rows, block": ["--budget", "3GiB", "--data", "{long}", "--set", "how.recompute=block"],
    "full block": ["--budget", "4GiB", "--method", "full", "--set", "how.recompute=block"],
    "full none": ["--budget", "4GiB", "--method", "full", "--set", "how.recompute=none"],
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    steps = parser.parse_args().steps
    off = []
    with tempfile.TemporaryDirectory() as folder, (ROOT / "results/plan_accuracy.jsonl").open("a") as file:
        long = Path(folder) / "long.jsonl"
        long.write_text("".join(json.dumps(row) + "\n" for row in long_rows()))
        for name, flags in RECIPES.items():
            flags = [flag.replace("{long}", str(long)) for flag in flags]
            row = measure(name, flags, steps, Path(folder) / name.replace(" ", "_").replace(",", ""))
            file.write(json.dumps({"date": date.today().isoformat(), "commit": commit(), **row}) + "\n")
            if "error" in row:
                print(f"{name:<30} {row['error']}")
                continue
            off.append(row["predicted_peak_bytes"] / row["measured_peak_bytes"] - 1)
            print(
                f"{name:<30} {row['predicted_peak_bytes'] >> 20:>5} {row['measured_peak_bytes'] >> 20:>5} MiB {off[-1]:+7.1%}"
            )
    print(
        f"median error {statistics.median(map(abs, off)):.1%}, worst {max(off, key=abs):+.1%}, lowest {min(off):+.1%}"
    )


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
    )
    return {"recipe": name, **{key: report[key] for key in kept}}


def long_rows() -> list[dict]:
    """Rows of 200 to 900 tokens with answers of a third of that."""
    return [
        {"prompt": "word " * (150 + 37 * i % 450), "completion": " answer" * (60 + 53 * i % 300)} for i in range(40)
    ]


if __name__ == "__main__":
    main()
