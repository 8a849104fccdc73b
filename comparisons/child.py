"""One system, one batch, one process: builds, warms up, times, and writes a record.

The runner starts one child per measurement, so that running out of memory or crashing is a result and nobody inherits
another's memory. Weights, tokens, clipping and optimizer are the same for every system by seed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from comparisons.machine import describe_machine
from comparisons.models import build_model
from comparisons.systems import SYSTEMS, Settings, System, load
from megatrain_ds.cli.single_process import free_port, rank_variables
from megatrain_ds.planning.probe import peak_resident_bytes


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line of a child."""
    parser = argparse.ArgumentParser(prog="comparisons.child", description="One system, one batch, one process.")
    parser.add_argument("--system", choices=list(SYSTEMS), required=True)
    parser.add_argument("--model", type=Path, required=True, help="transformers configuration (JSON with model_type)")
    parser.add_argument("--batch", type=int, default=8, help="sequences a step")
    parser.add_argument("--sequence", type=int, default=1024, help="tokens a sequence")
    parser.add_argument("--steps", type=int, default=5, help="timed steps after the warm-up")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the clock starts")
    parser.add_argument("--loss-steps", type=int, default=20, help="losses recorded; those beyond the clock untimed")
    parser.add_argument("--clip", type=float, default=1.0, help="gradient clipping; 0 for none")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--options", type=json.loads, default={}, help="options of the system (JSON)")
    parser.add_argument("--reference", help="path of the paper authors' code, for the system 'reference'")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args(arguments)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Build, warm up, time; returns the record."""
    # What a launcher, or the runner, would have set for one process.
    for name, value in rank_variables(free_port()).items():
        os.environ.setdefault(name, value)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    module = load(arguments.system)
    baseline_bytes = peak_resident_bytes()
    started = time.perf_counter()
    model = build_model(arguments.model, device)
    num_parameters, vocabulary = sum(param.numel() for param in model.parameters()), model.config.vocab_size
    settings = Settings(
        batch=arguments.batch,
        sequence=arguments.sequence,
        clip=arguments.clip,
        learning_rate=arguments.learning_rate,
        weight_decay=0.1,
        betas=(0.9, 0.95),
        options=arguments.options,
        reference_path=arguments.reference,
        steps_before_breakdown=arguments.warmup + arguments.steps,
    )
    system: System = module.build(model, settings)
    build_s = time.perf_counter() - started
    losses, marks, total_s, device_peak = run_steps(system, arguments, vocabulary, device)
    step_s = total_s / arguments.steps
    tokens = arguments.batch * arguments.sequence
    return {
        "system": arguments.system,
        "engine": system.name,
        "status": "ok",
        "model": arguments.model.stem,
        "num_parameters": num_parameters,
        "batch": arguments.batch,
        "sequence": arguments.sequence,
        "clip": arguments.clip,
        "learning_rate": arguments.learning_rate,
        "options": arguments.options,
        "steps": arguments.steps,
        "warmup": arguments.warmup,
        "step_s": step_s,
        "step_s_median": statistics.median(b - a for a, b in zip(marks, marks[1:], strict=False)),
        "tokens_per_s": tokens / step_s,
        "model_tflops": 6 * num_parameters * tokens / step_s / 1e12,
        "losses": losses,
        "breakdown": system.breakdown(),
        "device_peak_bytes": device_peak,
        "host_peak_bytes": peak_resident_bytes(),
        # Python and the packages, before there is a model: part of the peak.
        "host_baseline_bytes": baseline_bytes,
        "memory_report": system.report(),
        "build_s": build_s,
        **describe_machine(),
    }


def run_steps(
    system: System, arguments: argparse.Namespace, vocabulary: int, device: torch.device
) -> tuple[list[float], list[float], float, int]:
    """Warm up, time, and go on untimed until there are enough losses to compare and the system has its breakdown.

    Returns:
        Losses of every step, host times in seconds at the ends of the timed steps (the start first), the seconds
        from the start until nothing is left to do, and the device peak in bytes up to there.
    """
    generator = torch.Generator().manual_seed(1)

    def step() -> torch.Tensor:
        tokens = torch.randint(0, vocabulary, (arguments.batch, arguments.sequence), generator=generator)
        return system.step(tokens.to(device))

    losses = [step() for _ in range(arguments.warmup)]
    drain(system, device)
    marks = [time.perf_counter()]
    for _ in range(arguments.steps):
        losses.append(step())
        marks.append(time.perf_counter())
    drain(system, device)
    total_s = time.perf_counter() - marks[0]
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    wanted = max(arguments.loss_steps - len(losses), system.breakdown_steps)
    losses += [step() for _ in range(wanted)]
    drain(system, device)
    return [float(loss) for loss in losses], marks, total_s, peak


def drain(system: System, device: torch.device) -> None:
    """Leave no work outside the clock."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    system.drain()


def main() -> None:
    """Measure and write the record."""
    arguments = parse_arguments()
    record = measure(arguments)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
