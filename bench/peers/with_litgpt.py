"""LitGPT's finetune_lora, with the rows in file order. It has no clipping of gradients."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

from litgpt.args import EvalArgs, TrainArgs
from litgpt.data import DataModule
from litgpt.data.base import SFTDataset, get_sft_collate_fn
from litgpt.finetune.lora import setup
from litgpt.prompts import SmolLM2
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader
from work import BATCH_ROWS, LEARNING_RATE, LORA_ALPHA, LORA_R, Meter, Work


class Rows(DataModule):
    """The rows, with a meter that is told when a batch is fetched and when the optimiser is done with it."""

    def __init__(self, rows: list[dict[str, str]], meter: Meter) -> None:
        super().__init__()
        self.rows = [{"instruction": row["question"], "output": row["answer"]} for row in rows]
        self.meter, self.tokens = meter, 0
        self.prompt_style = SmolLM2()

    def connect(self, tokenizer: Any = None, batch_size: int = 1, max_seq_length: int | None = None) -> None:
        self.tokenizer, self.batch_size = tokenizer, batch_size

    def train_dataloader(self) -> DataLoader:
        collate = get_sft_collate_fn()

        def counted(rows: list[Any]) -> Any:
            self.meter.begin()
            batch = collate(rows)
            self.tokens = int(batch["token_counts"]["raw_plus_prompt_template"].sum())
            return batch

        return DataLoader(self._dataset(self.rows), batch_size=self.batch_size, collate_fn=counted)

    def val_dataloader(self) -> DataLoader:
        """One row: LitGPT asks for some and looks at them before training."""
        return DataLoader(self._dataset(self.rows[:1]), batch_size=1, collate_fn=get_sft_collate_fn())

    def _dataset(self, rows: list[dict[str, str]]) -> SFTDataset:
        return SFTDataset(rows, self.tokenizer, self.prompt_style, mask_prompt=True)


def main(work: Work) -> None:
    # It knows a model by its folder's name, and reads weights in its own format.
    folder = work.output / "SmolLM2-135M-Instruct"
    folder.mkdir(parents=True)
    for file in work.model.iterdir():
        (folder / file.name).symlink_to(file)
    litgpt = Path(sys.executable).parent / "litgpt"
    subprocess.run([str(litgpt), "convert_to_litgpt", str(folder)], check=True)

    meter = Meter()
    data = Rows(work.rows(), meter)
    register_optimizer_step_post_hook(lambda *_: meter.end(data.tokens))
    sys.argv = ["litgpt", str(folder)]  # at the end it reads its own command line
    setup(
        folder, work.output / "run", precision={"fp32": "32-true", "bf16": "bf16-true"}[work.precision], devices=1, lora_r=LORA_R, lora_alpha=LORA_ALPHA, lora_dropout=0.0,
        data=data, optimizer={"class_path": "torch.optim.AdamW", "init_args": {"lr": LEARNING_RATE, "weight_decay": 0.0}},
        train=TrainArgs(
            save_interval=1000, log_interval=1, global_batch_size=BATCH_ROWS, micro_batch_size=BATCH_ROWS, lr_warmup_steps=1,
            epochs=2, max_steps=work.steps,
        ),
        eval=EvalArgs(interval=1000, max_new_tokens=1, max_iters=1, final_validation=False),
    )  # fmt: skip
    (log,) = (work.output / "run").rglob("metrics.csv")
    with log.open() as file:
        meter.loss(next(float(row["loss"]) for row in csv.DictReader(file) if row["loss"]))
    meter.print("litgpt", "lightning", "torch")


if __name__ == "__main__":
    main(Work.from_argv())
