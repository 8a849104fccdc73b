"""A Trainer program that saves as it trains, keeps the best model, resumes, and saves the final one as safetensors."""

from __future__ import annotations

import argparse

import torch
from checkpoint_weights import hash_weights
from common import StandardLibraryText, build_model, collate, write_json
from train_trainer import DeepSpeedOnCpuArguments
from transformers import Trainer, TrainingArguments


def main() -> None:
    """Trains four steps, or what is left of them after `--resume`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ds-config", required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--resume", help="folder of a Trainer checkpoint")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    on_cpu = not torch.cuda.is_available()
    training = (DeepSpeedOnCpuArguments if on_cpu else TrainingArguments)(
        output_dir=args.folder,
        deepspeed=args.ds_config,
        per_device_train_batch_size=2,
        use_cpu=on_cpu,
        bf16=True,
        learning_rate=1e-2,
        warmup_steps=1,
        max_steps=4,
        logging_steps=1,
        save_strategy="steps",
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    text = StandardLibraryText(10, 32)
    trainer = Trainer(
        model=build_model(argparse.Namespace(model="qwen2", hidden=32, layers=2, seed=0), "sdpa"),
        args=training,
        train_dataset=torch.utils.data.Subset(text, range(8)),
        eval_dataset=torch.utils.data.Subset(text, range(8, 10)),
        data_collator=collate,
    )
    trainer.train(resume_from_checkpoint=args.resume)
    trainer.save_model(f"{args.folder}/final")
    record = {
        "engine": type(trainer.model_wrapped).__name__,
        "weights": hash_weights(trainer.model.state_dict()),
        "best": trainer.state.best_model_checkpoint,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    }
    write_json(args.out, record)


if __name__ == "__main__":
    main()
