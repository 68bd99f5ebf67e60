"""torchtune's LoRA recipe for one device, with the rows and the tokenizer given to it as components."""

from __future__ import annotations

import runpy
import sysconfig
from pathlib import Path
from typing import Any

import tokenizers
from omegaconf import OmegaConf
from torchtune.training.metric_logging import StdoutLogger
from work import BATCH_ROWS, CLIP, LEARNING_RATE, LORA_ALPHA, LORA_R, TARGETS, Meter, Work

SHAPE = {
    "vocab_size": 49152, "num_layers": 30, "num_heads": 9, "num_kv_heads": 3, "embed_dim": 576, "max_seq_len": 8192,
    "intermediate_dim": 1536, "rope_base": 100_000, "norm_eps": 1e-5, "scale_factor": 1,
}  # fmt: skip
"""SmolLM2-135M; torchtune has no builder of its own for it, and Llama 3.2's is the same with tied embeddings."""


class Tokenizer:
    """What the recipe asks of a tokenizer."""

    def __init__(self, path: str) -> None:
        self.model = tokenizers.Tokenizer.from_file(f"{path}/tokenizer.json")
        self.pad_id = self.model.token_to_id("<|im_end|>")

    def encode(self, text: str) -> list[int]:
        return self.model.encode(text).ids


def rows(tokenizer: Tokenizer, *, work: dict[str, Any]) -> list[dict[str, list[int]]]:
    encoded = as_work(work).encoded(tokenizer.encode)
    return [{"tokens": row["input_ids"], "labels": row["labels"]} for row in encoded]


def as_work(fields: dict[str, Any]) -> Work:
    return Work(
        fields["peer"],
        Path(fields["model"]),
        Path(fields["data"]),
        fields["steps"],
        Path(fields["output"]),
        fields["precision"],
    )


def main(work: Work) -> None:
    fields = {"peer": work.peer, "model": str(work.model), "data": str(work.data), "steps": work.steps}
    fields |= {"output": str(work.output), "precision": work.precision}
    lengths = [len(row["tokens"]) for row in rows(Tokenizer(fields["model"]), work=fields)]
    meter = Meter()
    # Its folder of recipes says that it is not to be imported; `tune run` runs the file too.
    file = Path(sysconfig.get_path("purelib")) / "recipes/lora_finetune_single_device.py"
    recipe_class: Any = runpy.run_path(str(file))["LoRAFinetuneRecipeSingleDevice"]

    class Logger(StdoutLogger):
        def log_dict(self, payload: Any, step: int) -> None:
            meter.end(sum(lengths[(step - 1) * BATCH_ROWS : step * BATCH_ROWS]))
            meter.loss(float(payload["loss"]))

    class Watched(recipe_class):
        def setup(self, cfg: Any) -> None:
            super().setup(cfg)
            self._metric_logger = Logger()

        def _loss_step(self, batch: Any) -> Any:
            meter.begin()
            return super()._loss_step(batch)

        def save_checkpoint(self, epoch: int) -> None:
            """The others save nothing either."""

    settings = OmegaConf.create({
        "model": {
            "_component_": "torchtune.models.llama3_2.lora_llama3_2", **SHAPE, "lora_attn_modules": list(TARGETS),
            "apply_lora_to_mlp": False, "lora_rank": LORA_R, "lora_alpha": LORA_ALPHA, "lora_dropout": 0.0,
        },
        "tokenizer": {"_component_": "with_torchtune.Tokenizer", "path": str(work.model)},
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer", "checkpoint_dir": str(work.model),
            "checkpoint_files": ["model.safetensors"], "model_type": "LLAMA3_2", "output_dir": str(work.output),
        },
        "dataset": {"_component_": "with_torchtune.rows", "work": fields},
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": LEARNING_RATE, "weight_decay": 0.0},
        "lr_scheduler": {
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup", "num_warmup_steps": 0,
        },
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "metric_logger": {"_component_": "torchtune.training.metric_logging.StdoutLogger"},
        "batch_size": BATCH_ROWS, "gradient_accumulation_steps": 1, "clip_grad_norm": CLIP, "epochs": 1,
        "max_steps_per_epoch": work.steps, "shuffle": False, "seed": 0, "device": "cpu", "dtype": work.precision,
        "enable_activation_checkpointing": False, "compile": False, "resume_from_checkpoint": False,
        "output_dir": str(work.output),
    })  # fmt: skip
    recipe = Watched(cfg=settings)
    recipe.setup(cfg=settings)
    recipe.train()
    meter.print("torchtune", "torchao", "torch")


if __name__ == "__main__":
    main(Work.from_argv())
