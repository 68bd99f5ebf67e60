"""What share of this CPU's matrix products a training step reaches, at the demo's own shapes and at 4096-wide ones.

python bench/limit.py           measure, rows to results/limit.jsonl; two minutes, alone on the machine
python bench/limit.py --docs    write the newest rows into docs/memory.md

The limit of a block is the time that its frozen weights' products take at the measured peak: 2 FLOPs a weight and token
forward and 2 backward, for the gradient of the input. Seconds of a block are those of a deeper model less those of a
shallower one, on the same packed rows; nothing is recomputed. Head and embedding are left out.
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import date
from statistics import median

import numpy as np
import torch
from transformers import AutoConfig

from first_run import ROOT, commit, put_into_docs
from published import SHAPES
from snugtune import device, step
from snugtune.data.encode import EncodedRow
from snugtune.data.pack import collate
from snugtune.models import load
from snugtune.planner import speed
from snugtune.planner.simulate import of_depth
from snugtune.recipe import check

RESULTS = ROOT / "results/limit.jsonl"
RUNS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", action="store_true")
    if parser.parse_args().docs:
        return write_docs()
    demo = load.read_config(load.resolve("demo"))
    wide = AutoConfig.for_model(**SHAPES["Llama-2-7B"])
    with RESULTS.open("a") as out:
        for name, config, depths, lengths in (
            ("SmolLM2-135M", demo, (2, 8), [320, 256, 192, 160]),
            ("Llama-2-7B", wide, (1, 2), [320, 256, 192, 160]),
        ):
            for precision in ("fp32", "bf16"):
                row = {"date": date.today().isoformat(), "commit": commit()} | share(
                    name, config, depths, lengths, precision
                )
                print(json.dumps(row), flush=True)
                out.write(json.dumps(row) + "\n")


def share(name: str, config: object, depths: tuple[int, int], lengths: list[int], precision: str) -> dict:
    generator = np.random.default_rng(0)
    rows = [
        EncodedRow(f"{i}", generator.integers(3, 30_000, n).astype(np.int32), np.arange(n) >= n - 2)
        for i, n in enumerate(lengths)
    ]
    batch, tokens = collate(rows), sum(lengths)
    recipe = check(
        {"what": {"base": precision, "precision": precision}, "how": {"recompute": "none", "loss_chunk_tokens": 256}}
    )
    seconds: dict[int, list[float]] = {depth: [] for depth in depths}
    steps, weights = {}, {}
    for depth in depths:
        torch.manual_seed(0)
        model = load.shell(of_depth(config, depth), load.DTYPES[precision]).requires_grad_(False)
        weights[depth] = sum(p.numel() for p in model.parameters())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(std=0.02)
        steps[depth] = step.build(recipe, model)
    for run in range(RUNS + 1):
        for depth, built in steps.items():
            started = time.perf_counter()
            built.forward_backward(batch, label_tokens=1)
            if run:
                seconds[depth].append(time.perf_counter() - started)
    few, many = depths
    per_block = (median(seconds[many]) - median(seconds[few])) / (many - few)
    flops = 4.0 * (weights[many] - weights[few]) / (many - few) * tokens
    spec = device.detect("cpu")
    peak = speed.measure(
        spec, precision=precision, tokens=tokens, width=config.hidden_size, inner=config.intermediate_size
    ).flops[precision]  # type: ignore[attr-defined]
    return {
        "shape": name, "width": config.hidden_size, "precision": precision, "tokens": tokens, "block_seconds": round(per_block, 5),  # type: ignore[attr-defined]
        "step_flops_per_second": round(flops / per_block), "peak_flops_per_second": round(peak), "share": round(flops / per_block / peak, 3),
    }  # fmt: skip


def write_docs() -> None:
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    newest = {(row["shape"], row["precision"]): row for row in rows}
    lines = [
        "| blocks of | width | precision | block's products, GFLOP/s | measured peak, GFLOP/s | share | commit, date |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in newest.values():
        lines.append(
            f"| {row['shape']} | {row['width']} | {row['precision']} | {row['step_flops_per_second'] / 1e9:.0f} | "
            f"{row['peak_flops_per_second'] / 1e9:.0f} | {row['share']:.0%} | {row['commit']}, {row['date']} |"
        )
    put_into_docs("bench/limit.py", lines)


if __name__ == "__main__":
    main()
