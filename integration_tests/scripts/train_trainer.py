"""A Hugging Face Trainer program: `TrainingArguments(deepspeed=path)`, with "auto" values in the ds_config."""

from __future__ import annotations

import argparse
from functools import cached_property

import torch
from common import Record, add_common_arguments, build_model, collate, text_for, write_json
from transformers import Trainer, TrainerCallback, TrainingArguments


def parse_arguments() -> argparse.Namespace:
    """One run for each call."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_common_arguments(parser)
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="bf16")
    parser.add_argument("--grad-accum", type=int, default=1, help="micro-batches in one step")
    parser.add_argument("--clip", type=float, default=1.0, help="largest gradient norm, 0 for none")
    parser.add_argument("--attention", choices=["sdpa", "eager"], default="sdpa")
    parser.add_argument("--local_rank", type=int, default=-1, help="given by the deepspeed launcher")
    return parser.parse_args()


class DeepSpeedOnCpuArguments(TrainingArguments):
    """TrainingArguments for bf16 on a machine without a GPU.

    TrainingArguments refuses bf16 there unless `use_cpu` is set, and `use_cpu` replaces DeepSpeed by DDP. So it is set
    for the check and taken back before the devices are set up.
    """

    @cached_property
    def _setup_devices(self) -> torch.device:
        self.use_cpu = False
        return super()._setup_devices


class RecordCallback(TrainerCallback):
    """Copies what Trainer logs at every step into a record."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def on_step_begin(self, args, state, control, **kwargs):  # noqa: ANN001, ANN003
        """Starts the step's clock."""
        self.record.start_step()

    def on_log(self, args, state, control, logs=None, **kwargs):  # noqa: ANN001, ANN003
        """Takes the figures of a training step, not those of the summary at the end."""
        if logs and "loss" in logs:
            self.record.add(logs["loss"], logs.get("grad_norm"), logs["learning_rate"])


def main() -> None:
    """Trains and writes a list with one record."""
    args = parse_arguments()
    bf16_on_cpu = args.precision == "bf16" and not torch.cuda.is_available()
    training = (DeepSpeedOnCpuArguments if bf16_on_cpu else TrainingArguments)(
        output_dir=f"{args.out}.trainer",
        deepspeed=args.ds_config,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=args.grad_accum,
        max_grad_norm=args.clip,
        use_cpu=bf16_on_cpu,
        bf16=args.precision == "bf16",
        fp16=args.precision == "fp16",
        learning_rate=args.learning_rate,
        weight_decay=0.01,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=10,
        max_steps=args.steps,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=args.seed,
        dataloader_pin_memory=False,
    )
    labels = {key: getattr(args, key) for key in ("precision", "grad_accum", "clip", "attention")}
    record = Record(route="trainer", **labels)
    trainer = Trainer(
        model=build_model(args, args.attention),
        args=training,
        train_dataset=text_for(args, args.grad_accum),
        data_collator=lambda items: collate(items, args.reverse_rows),
        callbacks=[RecordCallback(record)],
    )
    trainer.train()
    write_json(args.out, [record.finish(trainer.model_wrapped)])


if __name__ == "__main__":
    main()
