"""The work that every peer does, and how a step of it is measured. Only the standard library: every peer's Python reads it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

LORA_R, LORA_ALPHA, TARGETS = 8, 32, ("q_proj", "v_proj")
LEARNING_RATE, CLIP, BATCH_ROWS = 2e-4, 1.0, 4
MAX_LENGTH = 1024
"""More tokens than any row of GSM8K has."""
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""What the model's own chat template puts first; peers that write the template themselves are told it."""
PROMPT = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{{question}}<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True)
class Work:
    """What peers.py hands to a runner."""

    peer: str
    model: Path
    data: Path
    steps: int
    output: Path
    precision: str
    """fp32 or bf16: of the frozen weights and of the computation."""

    @classmethod
    def from_argv(cls) -> Work:
        """python RUNNER PEER MODEL_FOLDER ROWS.jsonl STEPS OUTPUT_FOLDER PRECISION"""
        peer, model, data, steps, output, precision = sys.argv[1:]
        return cls(peer, Path(model), Path(data), int(steps), Path(output), precision)

    @property
    def dtype(self) -> str:
        """`precision` as torch calls it."""
        return {"fp32": "float32", "bf16": "bfloat16"}[self.precision]

    def rows(self) -> list[dict[str, str]]:
        """Question and answer, in file order: as many as the steps need."""
        return [json.loads(line) for line in self.data.read_text(encoding="utf-8").splitlines()]

    def messages(self) -> list[dict[str, list[dict[str, str]]]]:
        """The rows as chats, in two parts."""
        return [
            {
                "prompt": [{"role": "user", "content": row["question"]}],
                "completion": [{"role": "assistant", "content": row["answer"]}],
            }
            for row in self.rows()
        ]

    def encoded(self, encode: Callable[[str], list[int]]) -> list[dict[str, list[int]]]:
        """Token ids of the model's chat template filled in, and labels: -100 where the loss does not count."""
        done = []
        for row in self.rows():
            prompt = PROMPT.format(question=row["question"])
            ids, skipped = encode(f"{prompt}{row['answer']}<|im_end|>\n"), len(encode(prompt))
            done.append({"input_ids": ids, "labels": [-100] * skipped + ids[skipped:]})
        return done


@dataclass
class Meter:
    """Wall and CPU seconds of each step, and the tokens in it that are no padding."""

    steps: list[dict[str, float]] = field(default_factory=list)
    first_loss: float | None = None
    _started: tuple[float, float] = (0.0, 0.0)

    def begin(self) -> None:
        """A step starts."""
        self._started = time.perf_counter(), time.process_time()

    def end(self, tokens: int) -> None:
        """It has ended."""
        wall, cpu = self._started
        seconds, cpu_seconds = time.perf_counter() - wall, time.process_time() - cpu
        self.steps.append({"tokens": tokens, "seconds": seconds, "cpu_seconds": cpu_seconds})

    def loss(self, value: float) -> None:
        """Keep the first."""
        if self.first_loss is None:
            self.first_loss = value

    def print(self, *packages: str) -> None:
        """The one line that peers.py reads."""
        versions = {name: version(name) for name in packages if _installed(name)}
        print(json.dumps({"steps": self.steps, "versions": versions, "first_loss": self.first_loss}), flush=True)


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
