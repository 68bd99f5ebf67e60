"""`snugtune train`, watched from outside: its events tell the steps, /proc the CPU seconds at each."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import tokenizers
from work import BATCH_ROWS, LEARNING_RATE, Meter, Work

from snugtune.data.pack import global_batches
from snugtune.recipe import What


def main(work: Work) -> None:
    encode = tokenizers.Tokenizer.from_file(str(work.model / "tokenizer.json")).encode
    lengths = [len(row["input_ids"]) for row in work.encoded(lambda text: encode(text).ids)]
    # It shuffles rows by their number; laid out so that file order comes out of it.
    batches = global_batches(What(global_batch_rows=BATCH_ROWS, max_steps=work.steps), len(lengths))
    lines = work.data.read_text(encoding="utf-8").splitlines()
    laid_out = dict(zip((row for batch in batches for row in batch), lines, strict=True))
    work.output.mkdir(parents=True)
    rows = work.output / "rows.jsonl"
    rows.write_text("".join(laid_out[place] + "\n" for place in sorted(laid_out)), encoding="utf-8")
    settings = {
        "what.base": work.precision, "what.precision": work.precision, "what.global_batch_rows": BATCH_ROWS, "what.max_steps": work.steps,
        "what.learning_rate": LEARNING_RATE, "eval_rows": 0, "how.recompute": "none", "how.micro_batch_tokens": 4096,
    }  # fmt: skip
    command = [str(Path(sys.executable).parent / "snugtune"), "train", "--model", str(work.model), "--data", str(rows)]
    command += ["--budget", "8GiB", "--output", str(work.output / "run"), "--json"]
    process = subprocess.Popen(
        command + [part for name, value in settings.items() for part in ("--set", f"{name}={value}")], stdout=sys.stderr
    )
    cpu, watched, ends, size = psutil.Process(process.pid), work.output / "run/events.jsonl", [], 0
    while process.poll() is None:
        time.sleep(0.02)
        if not watched.exists() or watched.stat().st_size == size:  # asking costs next to nothing, reading would not
            continue
        times, size = cpu.cpu_times(), watched.stat().st_size
        ends += [times.user + times.system] * (len(_steps(watched)) - len(ends))
    if process.returncode:
        raise SystemExit(process.returncode)
    meter = Meter()
    for number, step in enumerate(_steps(watched)):
        tokens = sum(lengths[number * BATCH_ROWS : (number + 1) * BATCH_ROWS])
        facts = {"tokens": tokens, "seconds": tokens / step["tokens_per_second"]}
        meter.steps.append(facts | ({"cpu_seconds": ends[number] - ends[number - 1]} if number else {}))
        meter.loss(step["loss"])
    meter.print("snugtune", "torch", "transformers")


def _steps(events: Path) -> list[dict[str, float]]:
    lines = events.read_text().split("\n")[:-1] if events.exists() else []
    return [fields for line in lines if (fields := json.loads(line))["event"] == "step"]


if __name__ == "__main__":
    main(Work.from_argv())
