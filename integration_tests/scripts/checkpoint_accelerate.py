"""An Accelerate program that saves its state twice under one name, trains on, goes back, and exports the model."""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin
from checkpoint_weights import hash_weights
from common import build_model, write_json


def main() -> None:
    """Writes the losses before and after going back."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ds-config", required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=args.ds_config))
    model = build_model(argparse.Namespace(model="qwen2", hidden=32, layers=2, seed=0), "sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    ids = torch.arange(32, device=accelerator.device).view(2, 16)

    def step() -> tuple[float, float]:
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss.item(), optimizer.param_groups[0]["lr"]

    record: dict = {"engine": type(model).__name__}
    for _ in range(2):
        step()
        accelerator.save_state(args.folder)
    record["first"] = [step() for _ in range(3)]
    accelerator.load_state(args.folder)
    record["again"] = [step() for _ in range(3)]
    state = accelerator.get_state_dict(model)
    record["weights"] = hash_weights(state)
    accelerator.unwrap_model(model).save_pretrained(f"{args.folder}/final", state_dict=state)
    write_json(args.out, record)


if __name__ == "__main__":
    main()
