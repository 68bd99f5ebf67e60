"""How fast rows become tokens, and in how much memory, beside datasets.map and the tokenizer alone; rows go to results/.

python bench/data.py                   a million rows by us, and a part of them by the others
python bench/data.py --docs            write the newest rows into docs/data.md

The rows: GSM8K questions and answers, over and over, each with its number in it so that none is like another.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import date
from pathlib import Path

from first_run import ROOT, commit, put_into_docs

RESULTS = ROOT / "results/data.jsonl"
WAYS = {
    "snugtune": "reads, checks, renders, tokenises, finds the labels, looks for duplicates, keeps it on disk",
    "datasets.map": "load_dataset, apply_chat_template and tokenizer in batches of 1,000, num_proc as cores; no labels",
    "tokenizer alone": "encode_batch over texts that are rendered already, 1,000 at a time, on all cores",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--others", type=int, default=50_000, help="rows for the other ways, and for us once more")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared/data/gsm8k_train.jsonl")
    parser.add_argument("--docs", action="store_true")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.docs:
        return write_docs()
    if arguments.way:
        return print(json.dumps(RUN[arguments.way](arguments.file)))
    with tempfile.TemporaryDirectory() as scratch, RESULTS.open("a") as out:
        sizes = [("snugtune", arguments.rows)] + [(way, arguments.others) for way in WAYS]
        for way, rows in sizes:
            row = measure(way, make(arguments.data, rows, Path(scratch)), rows, Path(scratch))
            print(json.dumps(row), flush=True)
            out.write(json.dumps(row) + "\n")


def make(source: Path, rows: int, folder: Path) -> Path:
    file = folder / f"{rows}.jsonl"
    if not file.exists():
        known = [json.loads(line) for line in source.read_text().splitlines()]
        with file.open("w") as out:
            for number in range(rows):
                row = known[number % len(known)]
                out.write(json.dumps({"question": f"{number}. {row['question']}", "answer": row["answer"]}) + "\n")
    return file


def measure(way: str, file: Path, rows: int, scratch: Path) -> dict:
    """One way in a process of its own; memory of the largest process, and of its children that it is made of."""
    environment = os.environ | {
        "XDG_CACHE_HOME": str(scratch / "cache"),
        "HF_HOME": str(scratch / "hf"),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, __file__, "--way", way, "--file", str(file)]
    process = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if process.returncode:
        raise SystemExit(process.stderr[-2000:])
    told = json.loads(process.stdout.splitlines()[-1])
    return {
        "date": date.today().isoformat(),
        "commit": commit(),
        "way": way,
        "rows": rows,
        "cores": len(os.sched_getaffinity(0)),
    } | told


def ours(file: Path) -> dict:
    from snugtune.data import tokens
    from snugtune.models import load
    from snugtune.recipe import DataSource

    tokenizer = load.load_tokenizer(load.resolve("demo"))
    return timed(lambda: len(tokens.load(DataSource(path=str(file)), tokenizer)))


def with_datasets(file: Path) -> dict:
    import datasets

    from snugtune.models import load

    tokenizer = load.load_tokenizer(load.resolve("demo"))

    def encode(batch: dict) -> dict:
        pairs = zip(batch["question"], batch["answer"], strict=True)
        chats = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in pairs]
        return tokenizer(tokenizer.apply_chat_template(chats, tokenize=False), add_special_tokens=False)

    def run() -> int:
        found = datasets.load_dataset("json", data_files=str(file), split="train")
        return len(
            found.map(encode, batched=True, num_proc=len(os.sched_getaffinity(0)), remove_columns=found.column_names)
        )

    return timed(run)


def tokenizer_alone(file: Path) -> dict:
    from snugtune.data.rows import LeftOut, render
    from snugtune.data.sources import read
    from snugtune.models import load

    tokenizer = load.load_tokenizer(load.resolve("demo"))
    texts = [row.text for row in render(read(str(file)), tokenizer, LeftOut())]
    backend = tokenizer.backend_tokenizer
    return timed(lambda: sum(len(backend.encode_batch(texts[i : i + 1000])) for i in range(0, len(texts), 1000)))


def timed(run: Callable[[], int]) -> dict:
    import resource
    import time

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    rows = run()
    seconds = time.perf_counter() - started
    peaks = {"peak_bytes": resource.RUSAGE_SELF, "largest_worker_bytes": resource.RUSAGE_CHILDREN}
    told = {name: resource.getrusage(who).ru_maxrss * 1024 for name, who in peaks.items()}
    return {
        "seconds": round(seconds, 2),
        "rows_per_second": round(rows / seconds),
        "before_bytes": before * 1024,
    } | told


RUN = {"snugtune": ours, "datasets.map": with_datasets, "tokenizer alone": tokenizer_alone}


def write_docs() -> None:
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    newest = {(row["way"], row["rows"]): row for row in rows if row["commit"] == rows[-1]["commit"]}
    lines = [
        f"Commit {rows[-1]['commit']}, {rows[-1]['date']}, {rows[-1]['cores']} cores; SmolLM2's tokenizer, GSM8K as chats.", "",
        "| way | rows | rows/s | peak, MiB | largest worker, MiB | what it does |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for (way, count), row in newest.items():
        lines.append(
            f"| {way} | {count:,} | {row['rows_per_second']:,} | {row['peak_bytes'] >> 20} | {row['largest_worker_bytes'] >> 20} | {WAYS[way]} |"
        )
    put_into_docs("bench/data.py", lines, file="docs/data.md")


if __name__ == "__main__":
    main()
