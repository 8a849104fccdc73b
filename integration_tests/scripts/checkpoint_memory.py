"""A plain DeepSpeed loop that reports how much memory a save and a load need beyond training."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import deepspeed
import torch
from common import build_model, write_json


def resident_bytes(field: str) -> int:
    """A field of this process's status: VmRSS now, or VmHWM at most since `reset_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def reset_peak() -> None:
    """Let VmHWM start from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def main() -> None:
    """Trains three steps, saves twice and loads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ds-config", required=True)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    shape = argparse.Namespace(model="llama", hidden=384, layers=12, seed=0)
    engine = deepspeed.initialize(
        model=build_model(shape, "sdpa"), config=json.loads(Path(args.ds_config).read_text())
    )[0]
    ids = torch.randint(0, 256, (1, 16)).to(engine.device)
    reset_peak()
    for _ in range(3):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in engine.module.model.layers]
    record = {"engine": type(engine).__name__, "train": resident_bytes("VmHWM"), "unit": 18 * max(sizes), "save": []}
    for _ in range(2):
        reset_peak()
        engine.save_checkpoint(args.folder, tag="same")
        record["save"].append(resident_bytes("VmHWM"))
    record["state"] = sum(path.stat().st_size for path in Path(args.folder, "same").iterdir())
    reset_peak()
    engine.load_checkpoint(args.folder)
    record["after_load"] = resident_bytes("VmRSS")
    write_json(args.out, record)


if __name__ == "__main__":
    main()
