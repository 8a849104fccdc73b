"""An Accelerate program, started by `accelerate launch --config_file FILE`; the file names the ds_config.

`--ds-config` is accepted for the sake of one command line for all routes; the launcher's file decides.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from common import Record, add_common_arguments, build_model, collate, text_for, write_json
from torch.utils.data import DataLoader
from transformers import get_constant_schedule_with_warmup


def parse_arguments() -> argparse.Namespace:
    """One run for each call."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_common_arguments(parser)
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="bf16")
    parser.add_argument("--grad-accum", type=int, default=1, help="micro-batches in one step")
    parser.add_argument("--clip", type=float, default=1.0, help="largest gradient norm, 0 for none")
    parser.add_argument("--attention", choices=["sdpa", "eager"], default="sdpa")
    return parser.parse_args()


def main() -> None:
    """Trains and writes a list with one record."""
    args = parse_arguments()
    mixed_precision = "no" if args.precision == "fp32" else args.precision
    accelerator = Accelerator(mixed_precision=mixed_precision, gradient_accumulation_steps=args.grad_accum)
    model = build_model(args, args.attention)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.01)
    schedule = get_constant_schedule_with_warmup(optimizer, num_warmup_steps=10)
    loader = DataLoader(
        text_for(args, args.grad_accum),
        batch_size=args.micro_batch,
        collate_fn=lambda items: collate(items, args.reverse_rows),
    )
    engine, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    labels = {key: getattr(args, key) for key in ("precision", "grad_accum", "clip", "attention")}
    record = Record(route="accelerate", **labels)
    engine.train()
    total, micro_steps = 0.0, 0
    for batch in loader:
        if micro_steps == 0:
            record.start_step()
        with accelerator.accumulate(engine):
            learning_rate = schedule.get_last_lr()[0]
            loss = engine(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients and args.clip:
                accelerator.clip_grad_norm_(engine.parameters(), args.clip)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        total, micro_steps = total + loss.item() / args.grad_accum, micro_steps + 1
        if accelerator.sync_gradients:
            record.add(total, engine.get_global_grad_norm(), learning_rate)
            total, micro_steps = 0.0, 0
    write_json(args.out, [record.finish(engine)])
    accelerator.end_training()


if __name__ == "__main__":
    main()
