"""Trains one model under one system in this process and records seconds a step, memory and losses.

Run it once per system with the same arguments: weights, tokens, clipping and optimizer are the same by seed, so the
losses are comparable, and a ratio of two records from one call on one machine is a speed claim with its equal-loss
check beside it. Tokens are random; every position counts as a real token.

    python -m comparisons.throughput --system megatrain --model configs/models/tiny.json --batch 8 --out a.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

SYSTEMS = ("megatrain", "zero3", "zero3-default", "resident")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--system", choices=SYSTEMS, required=True)
    parser.add_argument("--model", type=Path, required=True, help="transformers configuration (JSON with model_type)")
    parser.add_argument("--batch", type=int, default=8, help="sequences a step")
    parser.add_argument("--sequence", type=int, default=1024, help="tokens a sequence")
    parser.add_argument("--steps", type=int, default=5, help="timed steps after the warm-up")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the clock starts")
    parser.add_argument("--clip", type=float, default=1.0, help="gradient clipping; 0 for none")
    parser.add_argument("--no-finite-check", action="store_true", help="megatrain: updates start as gradients arrive")
    parser.add_argument("--megatrain", type=json.loads, default={}, help="fields of the megatrain block (JSON)")
    parser.add_argument("--trace", help="megatrain: write a Chrome trace here")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def build_model(path: Path, device: torch.device, seed: int = 0) -> Any:
    """A bf16 model on the host with weights that depend on the seed alone.

    Weights are drawn on the device (billions of normals take minutes on a host) and copied parameter by parameter.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = json.loads(path.read_text())
    config = AutoConfig.for_model(**fields)
    config.use_cache = False
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model.to_empty(device="cpu")
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.dim() < 2:
                param.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                values = torch.empty(param.shape, dtype=param.dtype, device=device)
                param.copy_(values.normal_(0.0, 0.02, generator=generator))
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name == "rotary_emb":
                setattr(module, name, type(child)(config=config))
    return model.train()


def deepspeed_config(arguments: argparse.Namespace) -> dict[str, Any]:
    """The configuration of a DeepSpeed system; the flag is the only line that differs between the first two."""
    offload = {"device": "cpu", "pin_memory": True}
    zero: dict[str, Any] = {"stage": 3, "offload_optimizer": dict(offload), "offload_param": dict(offload)}
    if arguments.system != "zero3-default":
        zero |= {
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": int(5e8),
            "stage3_prefetch_bucket_size": int(5e8),
            "stage3_max_live_parameters": int(2e9),
            "stage3_max_reuse_distance": int(2e9),
            "stage3_param_persistence_threshold": int(1e5),
            "sub_group_size": int(1e9),
        }
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": arguments.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": arguments.clip,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    }
    if arguments.system == "megatrain":
        config["offload_engine"] = "megatrain"
        block = {"finite_check": not arguments.no_finite_check, **arguments.megatrain}
        if arguments.trace:
            block |= {"trace_file": arguments.trace, "trace_steps": 2}
        config["megatrain"] = block
    return config


class DeepSpeedSystem:
    """Any system behind `deepspeed.initialize`."""

    def __init__(self, model: Any, arguments: argparse.Namespace) -> None:
        """Build the engine."""
        import deepspeed

        self.engine: Any
        self.engine, *_ = deepspeed.initialize(model=model, config=deepspeed_config(arguments))
        self.name = type(self.engine).__name__
        expected = "MegaTrainEngine" if arguments.system == "megatrain" else "DeepSpeedEngine"
        if self.name != expected:
            raise RuntimeError(
                f"{arguments.system} runs on {self.name}, expected {expected}: install the package (pip install .) so "
                "that the flag is seen; `megatrain-ds doctor` says what is missing."
            )

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """One optimizer step; returns the loss."""
        loss = self.engine(input_ids=tokens, labels=tokens).loss
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def drain(self) -> None:
        """Wait for every update that is still under way."""
        runtime = getattr(self.engine, "_runtime", None)
        if runtime is not None:
            runtime.pipeline.wait_all()

    def report(self) -> dict[str, Any]:
        """What the engine says of its memory."""
        return self.engine.memory_report() if hasattr(self.engine, "memory_report") else {}


class ResidentSystem:
    """No offload and no optimizer: forward and backward with recompute, the ceiling."""

    name = "resident"

    def __init__(self, model: Any, arguments: argparse.Namespace) -> None:
        """Move the model to the device."""
        self.model = model.cuda() if torch.cuda.is_available() else model
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Forward and backward; gradients are dropped."""
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self.model.zero_grad(set_to_none=True)
        return loss.detach()

    def drain(self) -> None:
        """Nothing is under way."""

    def report(self) -> dict[str, Any]:
        """Nothing to say."""
        return {}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Build, warm up, time; returns the record."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29650")
    for name in ("RANK", "LOCAL_RANK"):
        os.environ.setdefault(name, "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda:0" if use_cuda else "cpu")
    started = time.perf_counter()
    model = build_model(arguments.model, device)
    num_parameters = sum(param.numel() for param in model.parameters())
    vocabulary = model.config.vocab_size
    system = (ResidentSystem if arguments.system == "resident" else DeepSpeedSystem)(model, arguments)
    built = time.perf_counter()
    generator = torch.Generator().manual_seed(1)
    losses, marks = [], []
    for index in range(arguments.warmup + arguments.steps):
        tokens = torch.randint(0, vocabulary, (arguments.batch, arguments.sequence), generator=generator).to(device)
        if index == arguments.warmup:
            drain(system, use_cuda)
            marks.append(time.perf_counter())
            if use_cuda:
                torch.cuda.reset_peak_memory_stats()
        losses.append(system.step(tokens))
        if index >= arguments.warmup:
            marks.append(time.perf_counter())
    drain(system, use_cuda)
    total_s = time.perf_counter() - marks[0]
    step_s = total_s / arguments.steps
    tokens_per_step = arguments.batch * arguments.sequence
    return {
        "system": arguments.system,
        "engine": system.name,
        "model": arguments.model.name,
        "num_parameters": num_parameters,
        "batch": arguments.batch,
        "sequence": arguments.sequence,
        "clip": arguments.clip,
        "megatrain": arguments.megatrain | {"finite_check": not arguments.no_finite_check},
        "step_s": step_s,
        "step_s_median": statistics.median(b - a for a, b in zip(marks, marks[1:], strict=False)),
        "tokens_per_s": tokens_per_step / step_s,
        "model_tflops": 6 * num_parameters * tokens_per_step / step_s / 1e12,
        "losses": [round(float(loss), 6) for loss in losses],
        "device_peak_bytes": torch.cuda.max_memory_allocated() if use_cuda else 0,
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "memory_report": system.report(),
        "build_s": built - started,
        **describe_machine(use_cuda),
    }


def drain(system: DeepSpeedSystem | ResidentSystem, use_cuda: bool) -> None:
    """Nothing is left outside the clock."""
    if use_cuda:
        torch.cuda.synchronize()
    system.drain()


def describe_machine(use_cuda: bool) -> dict[str, Any]:
    """Hardware, versions, commit and date of a record."""
    import deepspeed
    import transformers

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "device": torch.cuda.get_device_name() if use_cuda else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": {
            "torch": torch.__version__,
            "deepspeed": deepspeed.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "commit": commit.stdout.strip() or None,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def main() -> None:
    """Measure and write the record."""
    arguments = parse_arguments()
    record = measure(arguments)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=2) + "\n")
    shown = ("system", "batch", "clip", "step_s", "step_s_median", "model_tflops", "build_s")
    print({key: round(record[key], 3) if isinstance(record[key], float) else record[key] for key in shown})
    print(
        f"device peak {record['device_peak_bytes'] / 2**30:.1f} GiB, host peak {record['host_peak_bytes'] / 2**30:.1f}"
    )
    print("losses", record["losses"])


if __name__ == "__main__":
    main()
