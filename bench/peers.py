"""Speed and peak memory of other trainers beside ours on a CPU: the same model, rows, LoRA and steps; rows go to results/.

python bench/peers.py --setup [NAME ...]   make the peers' virtual environments (several GB, in the user's cache folder)
python bench/peers.py [NAME ...]           run those that are there, one after the other, and append a row each
python bench/peers.py --docs               write the newest rows into docs/memory.md

The work: SmolLM2-135M-Instruct in float32 (or `--precision bf16`), LoRA r 8 on q_proj and v_proj, GSM8K rows as chats in file order, the loss on
answers, 4 rows a step, AdamW, no recompute. How each peer is told so stands in bench/peers/.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from platformdirs import user_cache_path

from first_run import ROOT, commit, put_into_docs

RESULTS = ROOT / "results/peers.jsonl"
LEFT_OUT_STEPS = 2
"""Not counted: the first steps also prepare kernels and fill caches."""
BATCH_ROWS = 4
TORCH = "torch==2.13.0"
"""Constrained in every environment, so that none brings a build of its own."""


@dataclass(frozen=True)
class Peer:
    """How a trainer is installed and run, and what of the work it does in another way."""

    title: str
    runner: str
    install: tuple[str, ...] = ()
    """Packages with what they need; empty: the environment that runs this script."""
    alone: tuple[str, ...] = ()
    """Packages installed without what they say they need: they would replace torch, or ask for what is not used."""
    remove: str = ""
    """Files of the environment's packages that are taken out again."""
    differs: str = ""
    why_not: str = ""
    """Why it is not run."""


PEERS = {
    "snugtune": Peer("snugtune", "with_snugtune.py", differs="packs, no padding; mimalloc in front of malloc; line end not a label"),
    "trainer": Peer("transformers Trainer + PEFT", "with_trainer.py", differs="pads to the longest row of a batch"),
    "trl": Peer(
        "TRL SFTTrainer", "with_trainer.py",
        ("trl==1.16.0", "transformers==5.24.0", "peft==0.21.2", "accelerate==1.15.0", "datasets==5.2.0"),
        differs="pads; gradient_checkpointing off, which is on by default",
    ),
    # It asks for torchvision and gradio, which text needs not; torchaudio's compiled part needs CUDA.
    "llamafactory": Peer(
        "LLaMA-Factory", "with_trainer.py",
        (
            "transformers==5.6.0", "peft==0.18.1", "accelerate==1.11.0", "datasets==4.0.0", "trl==0.24.0", "tyro<0.9.0",
            "torchdata==0.11.0", "av<=16.0.0", "einops", "fastapi", "fire", "hf-transfer", "matplotlib", "modelscope",
            "omegaconf", "packaging", "pandas", "protobuf", "pydantic", "pyyaml", "safetensors", "scipy", "sentencepiece",
            "sse-starlette", "tiktoken", "uvicorn",
        ),
        alone=("llamafactory==0.9.5", "torchaudio==2.11.1"), remove="torchaudio/lib/*.so",
        differs="pads to a multiple of 8; disable_gradient_checkpointing",
    ),
    # 0.6.1 imports what later releases of torchao have moved, and does not say that it needs torchao.
    "torchtune": Peer(
        "torchtune", "with_torchtune.py", ("torchtune==0.6.1", "torchao==0.9.0"),
        differs="pads; the loss in chunks; no recipe for this model: Llama 3.2's builder with its shape",
    ),
    # requests is imported and not declared.
    "litgpt": Peer(
        "LitGPT", "with_litgpt.py", ("litgpt==0.5.13", "requests"),
        differs="pads; no clipping; unties the embedding; no line end after the answer",
    ),
    "ms-swift": Peer("ms-swift", "with_trainer.py", ("ms-swift==4.6.0",), differs="pads; logits of answers only"),
    # It asks for xformers and torchvision, built for CUDA.
    "unsloth": Peer(
        "Unsloth", "with_trainer.py",
        (
            "transformers==5.17.0", "trl==1.15.0", "peft==0.21.2", "accelerate==1.15.0", "datasets>=4.6,<5", "torchao==0.18.0",
            "bitsandbytes", "triton", "diffusers", "tyro", "protobuf", "sentencepiece", "hf_transfer", "typer", "rich",
            "pydantic", "pyyaml", "json5", "nest-asyncio", "structlog", "click", "cut_cross_entropy", "einops", "pillow",
            "regex", "msgspec", "requests", "wheel", "packaging", "psutil", "certifi>=2026.10.19",
        ),
        alone=("unsloth==2026.10.9", "unsloth_zoo==2026.10.9"),
        differs="pads; the loss in chunks; use_gradient_checkpointing off, which is on by default",
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(PEERS)}; all without")
    parser.add_argument("--setup", action="store_true", help="make the environments instead of running")
    parser.add_argument("--docs", action="store_true", help="write docs/memory.md from the rows instead of running")
    parser.add_argument("--dry", action="store_true", help="run, and keep no row")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared/data/gsm8k_train.jsonl")
    parser.add_argument("--venvs", type=Path, default=user_cache_path("snugtune") / "peers")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(PEERS):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are: {', '.join(PEERS)}")
    if arguments.steps <= LEFT_OUT_STEPS:
        parser.error(f"the first {LEFT_OUT_STEPS} steps are not counted; give more")
    if arguments.docs:
        write_docs()
        return
    for name in arguments.names or PEERS:
        peer = PEERS[name]
        if peer.why_not:
            print(f"{name:<13} not run: {peer.why_not}")
        elif arguments.setup:
            set_up(peer, arguments.venvs / name)
        elif not python_of(peer, arguments.venvs / name).exists():
            print(f"{name:<13} not run: no environment in {arguments.venvs / name}; make it with --setup {name}")
        else:
            row = measure(name, arguments)
            print(summary(row), flush=True)
            if not arguments.dry:
                with RESULTS.open("a") as file:
                    file.write(json.dumps(row) + "\n")


def python_of(peer: Peer, folder: Path) -> Path:
    return folder / "bin/python" if peer.install else Path(sys.executable)


def set_up(peer: Peer, folder: Path) -> None:
    if not peer.install:
        return
    venv.create(folder, with_pip=True, symlinks=True)
    constraints = folder / "constraints.txt"
    constraints.write_text(TORCH + "\n")
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", "--constraint", str(constraints)]
    subprocess.run([*pip, "torch", *peer.install], check=True)
    if peer.alone:
        subprocess.run([*pip, "--no-deps", *peer.alone], check=True)
    if peer.remove:
        for file in folder.glob(f"lib/python*/site-packages/{peer.remove}"):
            file.unlink()


def measure(name: str, arguments: argparse.Namespace) -> dict:
    """One peer in a process of its own: its own word for the steps, the kernel's for memory and CPU seconds."""
    from snugtune.models import load

    folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    with arguments.data.open(encoding="utf-8") as file:
        lines = [line for line, _ in zip(file, range(arguments.steps * BATCH_ROWS), strict=False)]
    (folder / "rows.jsonl").write_text("".join(lines), encoding="utf-8")
    python = python_of(PEERS[name], arguments.venvs / name)
    command = [str(python), str(ROOT / "bench/peers" / PEERS[name].runner), name, str(load.resolve("demo").folder)]
    command += [str(folder / "rows.jsonl"), str(arguments.steps), str(folder / "run"), arguments.precision]
    environment = os.environ | {
        "PATH": f"{python.parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": str(arguments.threads), "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    with (folder / "out.txt").open("w") as out:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)  # its peak is that of the largest process below it
    row = {"date": date.today().isoformat(), "commit": commit(), "peer": name, "precision": arguments.precision}
    output = (folder / "out.txt").read_text(errors="replace")
    if status:
        return row | {"error": f"see {folder}/out.txt; its last line: {output.strip().splitlines()[-1][-300:]}"}
    told = json.loads(next(line for line in reversed(output.splitlines()) if line.startswith('{"steps"')))
    shutil.rmtree(folder)
    timed = told["steps"][LEFT_OUT_STEPS:]
    cpu_seconds = sum(step.get("cpu_seconds", 0.0) for step in timed)
    return row | {
        "versions": told["versions"],
        "tokens_per_second": round(statistics.median(step["tokens"] / step["seconds"] for step in timed), 1),
        "tokens_per_cpu_second": round(sum(step["tokens"] for step in timed) / cpu_seconds, 1) if cpu_seconds else None,
        "peak_bytes": used.ru_maxrss * 1024,
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "threads": arguments.threads,
        "tokens": sum(step["tokens"] for step in told["steps"]),
        "steps": len(told["steps"]),
        "first_loss": told["first_loss"],
    }


def summary(row: dict) -> str:
    if "error" in row:
        return f"{row['peer']:<13} {row['error']}"
    per_cpu = row["tokens_per_cpu_second"]
    return (
        f"{row['peer']:<13} {row['tokens_per_second']:>6.0f} tokens/s  {per_cpu if per_cpu is None else round(per_cpu)!s:>5} a CPU second"
        f"  {row['peak_bytes'] >> 20:>6} MiB  {row['steps']} steps, first loss {row['first_loss']:.4f}"
    )


def write_docs() -> None:
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    newest = {(row["peer"], row.get("precision", "fp32")): row for row in rows if "error" not in row}
    lines = [
        "| trainer | precision | versions | tokens/s | tokens a CPU second | peak, MiB | first loss | commit, date | what differs |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for precision, (name, peer) in itertools.product(("fp32", "bf16"), PEERS.items()):
        if (name, precision) not in newest:
            why = peer.why_not or "not run yet"
            lines.append(f"| {peer.title} | {precision} | | | | | | | {why} |")
            continue
        row = newest[name, precision]
        versions = ", ".join(f"{package} {version}" for package, version in row["versions"].items())
        per_cpu = "" if row["tokens_per_cpu_second"] is None else f"{row['tokens_per_cpu_second']:.0f}"
        lines.append(
            f"| {peer.title} | {precision} | {versions} | {row['tokens_per_second']:.0f} | {per_cpu} | {row['peak_bytes'] >> 20} | "
            f"{row['first_loss']:.4f} | {row['commit']}, {row['date']} | {peer.differs} |"
        )
    put_into_docs("bench/peers.py", lines)


if __name__ == "__main__":
    main()
