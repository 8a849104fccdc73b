"""A plain DeepSpeed loop that saves, resumes and reports: groups, warm-up and cosine, dropout, a frozen layer.

As DeepSpeed leaves the random generators alone, the program keeps torch's in its client state, as users do.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from pathlib import Path

import deepspeed
import torch
from common import build_model, write_json
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state


def parse_arguments() -> argparse.Namespace:
    """One run for each call; with `--load` it goes on from there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ds-config", required=True)
    parser.add_argument("--model", default="gpt2")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=10, help="number of the last step")
    parser.add_argument("--save", help="folder that receives a checkpoint")
    parser.add_argument("--save-at", type=int, default=5)
    parser.add_argument("--load", help="folder of a checkpoint")
    parser.add_argument("--out", required=True)
    return parser.parse_args()


def parameter_groups(model: torch.nn.Module) -> list[dict]:
    """Decay for matrices, none and ten times the learning rate for vectors."""
    params = [param for param in model.parameters() if param.requires_grad]
    return [
        {"params": [param for param in params if param.ndim > 1], "weight_decay": 0.1},
        {"params": [param for param in params if param.ndim == 1], "weight_decay": 0.0, "lr": 1e-2},
    ]


def cosine_with_warmup(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """Three steps of warm-up, then half a cosine over twenty."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (step + 1) / 3 if step < 3 else 0.5 * (1 + math.cos(math.pi * (step - 3) / 20))
    )


def digest(model: torch.nn.Module) -> dict[str, str]:
    """A hash of every master weight and moment, by DeepSpeed's own functions, and of every frozen weight."""
    found = {}
    for name, param in model.named_parameters():
        values = {"weight": param.detach()}
        if param.requires_grad:
            values = {kind: safe_get_full_optimizer_state(param, kind) for kind in ("exp_avg", "exp_avg_sq")}
            values["master"] = safe_get_full_fp32_param(param)
        for kind, value in values.items():
            data = value.detach().cpu().float().contiguous().numpy().tobytes()
            found[f"{name}:{kind}"] = hashlib.sha256(data).hexdigest()
    return found


def main() -> None:
    """Trains and writes one record."""
    args = parse_arguments()
    model = build_model(args, "eager")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = args.dropout
    next(child for child in model.modules() if isinstance(child, torch.nn.ModuleList))[0].requires_grad_(False)
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=model,
        model_parameters=parameter_groups(model),
        config=json.loads(Path(args.ds_config).read_text()),
        lr_scheduler=cosine_with_warmup,
    )
    record: dict = {"engine": type(engine).__name__, "losses": [], "learning_rates": []}
    if args.load:
        path, client_state = engine.load_checkpoint(args.load)
        if path is None:
            raise SystemExit(f"nothing to load in {args.load}")
        torch.set_rng_state(client_state["generator"])
    while engine.global_steps < args.steps:
        generator = torch.Generator().manual_seed(engine.global_steps)
        ids = torch.randint(0, 256, (2, 16), generator=generator).to(engine.device)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        record["losses"].append(loss.item())
        record["learning_rates"].append([group["lr"] for group in optimizer.param_groups])
        if args.save and engine.global_steps == args.save_at:
            engine.save_checkpoint(args.save, client_state={"generator": torch.get_rng_state()})
    record["global_steps"] = engine.global_steps
    record["generator"] = hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
    if record["engine"] != "DeepSpeedEngine":
        record["state"] = digest(model)
    write_json(args.out, record)


if __name__ == "__main__":
    main()
