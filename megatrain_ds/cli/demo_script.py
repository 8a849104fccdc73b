"""Trains a small Llama on Python's own sources with Hugging Face Trainer: an ordinary user program.

`megatrain-ds demo` copies this file into its output folder and runs it there. It knows nothing about offload engines;
its ds_config decides. Run it by hand with `python train.py --ds-config FILE --out FILE`.
"""

from __future__ import annotations

import argparse
import json
import resource
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


def parse_arguments() -> argparse.Namespace:
    """Read the sizes of the model and of the run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ds-config", required=True, help="DeepSpeed configuration (JSON)")
    parser.add_argument("--out", required=True, help="receives one JSON line for each step, then one of totals")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--length", type=int, default=128, help="bytes in a block of text")
    parser.add_argument("--batch", type=int, default=8, help="blocks in a batch")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--attention", choices=["sdpa", "eager"], default="sdpa")
    parser.add_argument("--reverse-rows", action="store_true", help="same batches, rows in reverse order")
    return parser.parse_args()


class SourceText(Dataset):
    """Python's standard library as blocks of `length` bytes; a token is a byte."""

    def __init__(self, num_blocks: int, length: int) -> None:
        """Read sources in sorted order until they fill the blocks; more than there are, and they start over."""
        needed, text = num_blocks * length, bytearray()
        library = Path(sysconfig.get_path("stdlib"))
        sources = sorted(library.glob("*.py"))
        if not sources:
            raise RuntimeError(f"{library} holds no .py sources to train on: use a Python that ships its library.")
        while len(text) < needed:
            for source in sources:
                text += source.read_bytes()
        self.blocks = torch.frombuffer(text, dtype=torch.uint8)[:needed].view(num_blocks, length).long()

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return one block as `{"input_ids": int64[length], "labels": int64[length]}`."""
        return {"input_ids": self.blocks[index], "labels": self.blocks[index]}


class StepWriter(TrainerCallback):
    """Writes one JSON line for each step as it happens."""

    def __init__(self, path: str) -> None:
        """Open `path` for writing."""
        self.stream = Path(path).open("w")  # noqa: SIM115  (lives as long as the training)
        self.started_s = 0.0

    def write(self, **values: object) -> None:
        """Write one line and hand it to the system at once, for whoever follows the file."""
        self.stream.write(json.dumps(values) + "\n")
        self.stream.flush()

    def on_step_begin(self, args, state, control, **kwargs):  # noqa: ANN001, ANN003
        """Start the step's clock."""
        self.started_s = time.perf_counter()

    def on_log(self, args, state, control, logs=None, **kwargs):  # noqa: ANN001, ANN003
        """Write the figures of a step."""
        if logs and "loss" in logs:
            seconds = time.perf_counter() - self.started_s
            self.write(step=state.global_step, loss=logs["loss"], grad_norm=logs.get("grad_norm"), seconds=seconds)


def totals(engine: Any) -> dict[str, object]:
    """Return the engine's class, the process's peak memory in bytes and, where the engine keeps one, its account."""
    account = getattr(engine, "memory_report", None)
    return {
        "engine": type(engine).__name__,
        "num_parameters": sum(getattr(p, "ds_numel", p.numel()) for p in engine.parameters()),
        "peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "peak_device_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
        "memory_report": account() if callable(account) else None,
    }


def main() -> None:
    """Train and write the record."""
    args = parse_arguments()
    training = TrainingArguments(
        output_dir=f"{args.out}.trainer",
        deepspeed=args.ds_config,
        per_device_train_batch_size=args.batch,
        bf16=args.precision == "bf16",
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        warmup_steps=args.steps // 10,
        max_steps=args.steps,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    set_seed(training.seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=args.attention)
    writer = StepWriter(args.out)
    text = SourceText(args.steps * args.batch, args.length)

    def collate(items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return default_data_collator(items[::-1] if args.reverse_rows else items)

    trainer = Trainer(model=model, args=training, train_dataset=text, data_collator=collate, callbacks=[writer])
    trainer.train()
    writer.write(**totals(trainer.model_wrapped))


if __name__ == "__main__":
    main()
