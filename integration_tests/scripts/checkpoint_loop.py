"""Saves under one tag after every step for ever, each time with a checksum of what it saves; made to be killed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import deepspeed
import torch
from common import build_model
from deepspeed.utils import safe_get_full_fp32_param


def main() -> None:
    """Says "saved" after every save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ds-config", required=True)
    parser.add_argument("--folder", required=True)
    args = parser.parse_args()
    model = build_model(argparse.Namespace(model="llama", hidden=256, layers=4, seed=0), "sdpa")
    engine = deepspeed.initialize(model=model, config=json.loads(Path(args.ds_config).read_text()))[0]
    if Path(args.folder, "latest").exists():
        engine.load_checkpoint(args.folder)
    ids = torch.randint(0, 256, (1, 16)).to(engine.device)
    while True:
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        sums = {name: safe_get_full_fp32_param(p).double().sum().item() for name, p in model.named_parameters()}
        engine.save_checkpoint(args.folder, tag="same", client_state={"sums": sums})
        print("saved", engine.global_steps, flush=True)


if __name__ == "__main__":
    main()
