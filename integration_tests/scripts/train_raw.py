"""A plain `deepspeed.initialize` loop over every combination of the given precisions, accumulations and clippings.

Run it directly (`python train_raw.py ...`) or through the `deepspeed` launcher.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
from pathlib import Path

import deepspeed
import torch
from common import Record, add_common_arguments, build_model, collate, text_for, write_json
from torch.utils.data import DataLoader


def parse_arguments() -> argparse.Namespace:
    """Options with several values are swept: one run for each combination."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_common_arguments(parser)
    parser.add_argument("--precision", nargs="+", choices=["fp32", "bf16", "fp16"], default=["bf16"])
    parser.add_argument("--grad-accum", nargs="+", type=int, default=[1], help="micro-batches in one step")
    parser.add_argument("--clip", nargs="+", type=float, default=[1.0], help="largest gradient norm, 0 for none")
    parser.add_argument("--attention", nargs="+", choices=["sdpa", "eager"], default=["sdpa"])
    parser.add_argument("--local_rank", type=int, default=-1, help="given by the deepspeed launcher")
    return parser.parse_args()


def fill_config(base: dict, args: argparse.Namespace, precision: str, grad_accum: int, clip: float) -> dict:
    """The user's ds_config with this run's numbers in place of "auto"."""
    config = copy.deepcopy(base)
    config["train_micro_batch_size_per_gpu"] = args.micro_batch
    config["gradient_accumulation_steps"] = grad_accum
    config["gradient_clipping"] = clip
    config.pop("train_batch_size", None)
    for name in ("bf16", "fp16"):
        config[name] = {**config.get(name, {}), "enabled": precision == name}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": args.learning_rate, "weight_decay": 0.01}}
    config["scheduler"] = {
        "type": "WarmupLR",
        "params": {"warmup_max_lr": args.learning_rate, "warmup_num_steps": 10, "warmup_type": "linear"},
    }
    return config


def train(args: argparse.Namespace, config: dict, attention: str, record: Record) -> dict:
    """Trains one model from its seed to the last step."""
    grad_accum = config["gradient_accumulation_steps"]
    model = build_model(args, attention)
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    loader = DataLoader(
        text_for(args, grad_accum),
        batch_size=args.micro_batch,
        collate_fn=lambda items: collate(items, args.reverse_rows),
    )
    batches = iter(loader)
    for _ in range(args.steps):
        record.start_step()
        learning_rate = engine.get_lr()[0]
        total = 0.0
        for _ in range(grad_accum):
            batch = {key: value.to(engine.device) for key, value in next(batches).items()}
            loss = engine(**batch).loss
            engine.backward(loss)
            engine.step()
            total += loss.item() / grad_accum
        record.add(total, engine.get_global_grad_norm(), learning_rate)
    result = record.finish(engine)
    engine.destroy()
    return result


def main() -> None:
    """Sweeps the combinations in one process and writes a list of records."""
    args = parse_arguments()
    base = json.loads(Path(args.ds_config).read_text())
    runs = []
    for precision, grad_accum, clip, attention in itertools.product(
        args.precision, args.grad_accum, args.clip, args.attention
    ):
        labels = {"precision": precision, "grad_accum": grad_accum, "clip": clip, "attention": attention}
        config = fill_config(base, args, precision, grad_accum, clip)
        runs.append(train(args, config, attention, Record(route="raw", **labels)))
        gc.collect()
    write_json(args.out, runs)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
