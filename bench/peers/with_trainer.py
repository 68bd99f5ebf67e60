"""The peers that stand on transformers' Trainer, each through its own front door, watched by one callback."""

from __future__ import annotations

import json
from collections import deque
from typing import Any

from work import BATCH_ROWS, CLIP, LEARNING_RATE, LORA_ALPHA, LORA_R, MAX_LENGTH, SYSTEM, TARGETS, Meter, Work

METER = Meter()
COMMON: dict[str, Any] = {
    "per_device_train_batch_size": BATCH_ROWS, "gradient_accumulation_steps": 1, "learning_rate": LEARNING_RATE,
    "max_grad_norm": CLIP, "lr_scheduler_type": "constant", "optim": "adamw_torch", "logging_steps": 1,
    "save_strategy": "no", "fp16": False, "gradient_checkpointing": False, "use_cpu": True,
    "disable_tqdm": True, "seed": 0,
}  # fmt: skip


def common(work: Work) -> dict[str, Any]:
    """Arguments of every Trainer. In bf16 the frozen weights are bf16 and autocast is on, as their guides do it."""
    return COMMON | {"bf16": work.precision == "bf16"}


def watch() -> None:
    """Every Trainer made from here on tells METER of its steps."""
    import transformers

    class Watch(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.tokens: deque[int] = deque()

        def on_train_begin(self, *_: Any, train_dataloader: Any, **__: Any) -> None:
            loader = getattr(train_dataloader, "base_dataloader", train_dataloader)  # accelerate's wraps torch's
            collate = loader.collate_fn

            def counted(rows: list[Any]) -> Any:  # the loader is one batch ahead of the step, hence the queue
                batch = collate(rows)
                mask = batch.get("attention_mask")
                self.tokens.append(int(batch["input_ids"].numel() if mask is None else mask.sum()))
                return batch

            loader.collate_fn = counted

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            METER.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            METER.end(self.tokens.popleft())

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            if "loss" in logs:
                METER.loss(float(logs["loss"]))

    transformers.trainer.DEFAULT_CALLBACKS.append(Watch)


def trainer(work: Work) -> None:
    """Plain Trainer and PEFT; rows are padded to the longest of their batch."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

    tokenizer = AutoTokenizer.from_pretrained(work.model)
    model = AutoModelForCausalLM.from_pretrained(work.model, dtype=getattr(torch, work.dtype))
    model = get_peft_model(model, LoraConfig(r=LORA_R, lora_alpha=LORA_ALPHA, target_modules=list(TARGETS)))
    arguments = TrainingArguments(
        output_dir=str(work.output),
        max_steps=work.steps,
        report_to="none",
        train_sampling_strategy="sequential",
        **common(work),
    )
    rows: Any = work.encoded(tokenizer.encode)
    Trainer(model, arguments, train_dataset=rows, data_collator=DataCollatorForSeq2Seq(tokenizer)).train()


def trl(work: Work) -> None:
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    arguments = SFTConfig(
        output_dir=str(work.output), max_steps=work.steps, report_to="none", train_sampling_strategy="sequential",
        max_length=MAX_LENGTH, model_init_kwargs={"dtype": getattr(torch, work.dtype)}, **common(work),
    )  # fmt: skip
    lora = LoraConfig(r=LORA_R, lora_alpha=LORA_ALPHA, target_modules=list(TARGETS))
    SFTTrainer(str(work.model), arguments, train_dataset=Dataset.from_list(work.messages()), peft_config=lora).train()


def unsloth(work: Work) -> None:
    from unsloth import FastLanguageModel  # isort: skip  it wants to be imported before the others
    import torch
    from datasets import Dataset
    from transformers import DataCollatorForSeq2Seq
    from trl import SFTConfig, SFTTrainer

    watch()  # after its import, which makes the Trainer anew
    model, tokenizer = FastLanguageModel.from_pretrained(
        str(work.model), max_seq_length=MAX_LENGTH, dtype=getattr(torch, work.dtype), load_in_4bit=False
    )
    model = FastLanguageModel.get_peft_model(
        model,
        r=LORA_R,
        lora_alpha=LORA_ALPHA,
        target_modules=list(TARGETS),
        lora_dropout=0,
        use_gradient_checkpointing=False,
    )
    arguments = SFTConfig(
        output_dir=str(work.output), max_steps=work.steps, report_to="none", train_sampling_strategy="sequential",
        max_length=MAX_LENGTH, dataset_kwargs={"skip_prepare_dataset": True}, **common(work),
    )  # fmt: skip
    SFTTrainer(
        model, arguments, train_dataset=Dataset.from_list(work.encoded(tokenizer.encode)), processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer),
    ).train()  # fmt: skip


def llamafactory(work: Work) -> None:
    from llamafactory.train.tuner import run_exp

    work.output.mkdir(parents=True, exist_ok=True)
    rows = [{"instruction": row["question"], "input": "", "output": row["answer"]} for row in work.rows()]
    (work.output / "rows.json").write_text(json.dumps(rows))
    (work.output / "dataset_info.json").write_text(json.dumps({"rows": {"file_name": "rows.json"}}))
    run_exp({
        "stage": "sft", "do_train": True, "model_name_or_path": str(work.model), "finetuning_type": "lora",
        "lora_rank": LORA_R, "lora_alpha": LORA_ALPHA, "lora_target": ",".join(TARGETS), "lora_dropout": 0.0,
        "dataset": "rows", "dataset_dir": str(work.output), "template": "smollm2", "default_system": SYSTEM,
        "cutoff_len": MAX_LENGTH, "disable_shuffling": True, "disable_gradient_checkpointing": True,
        "output_dir": str(work.output / "run"), "max_steps": work.steps, "report_to": "none", **common(work),
    })  # fmt: skip


def swift(work: Work) -> None:
    from swift import sft_main
    from swift.trainers import Seq2SeqTrainer  # noqa: F401  its import sets the callbacks anew

    watch()
    work.output.mkdir(parents=True, exist_ok=True)
    rows = work.output / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"messages": row["prompt"] + row["completion"]}) + "\n" for row in work.messages())
    )
    settings = common(work) | {
        "model": work.model, "model_type": "llama", "template": "chatml", "system": SYSTEM, "dataset": rows,
        "torch_dtype": work.dtype, "tuner_type": "lora", "lora_rank": LORA_R, "lora_alpha": LORA_ALPHA, "lora_dropout": 0,
        "max_length": MAX_LENGTH, "max_steps": work.steps, "split_dataset_ratio": 0, "dataset_shuffle": False,
        "train_dataloader_shuffle": False, "output_dir": work.output / "run", "dataloader_num_workers": 0,
        "report_to": "none",
    }  # fmt: skip
    flags = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    sft_main([*flags, "--target_modules", *TARGETS])


RUN = {"trainer": trainer, "trl": trl, "unsloth": unsloth, "llamafactory": llamafactory, "ms-swift": swift}

if __name__ == "__main__":
    the_work = Work.from_argv()
    if the_work.peer not in ("unsloth", "ms-swift"):
        watch()
    RUN[the_work.peer](the_work)
    METER.print(the_work.peer, "torch", "transformers", "peft", "trl", "accelerate")
