"""Speed of the host update kernels against DeepSpeedCPUAdam, on the same flat buffers with the same threads.

    python comparisons/update_kernel.py [--numel N] [--threads T] [--rounds R] [--json FILE]

Every candidate runs once per round, in an order that rotates from round to round, and ratios are medians of per-round
ratios: a machine whose memory speed drifts, as a virtual one's does, slows both sides of a ratio alike.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

# Bytes read and written per parameter, as the algorithm needs them: 24 for the state, the rest gradient and copy.
BYTES_PER_PARAM = {
    "native, fp32 gradient": 28,
    "DeepSpeedCPUAdam, fp32 gradient": 28,
    "native, bf16 gradient and bf16 copy in one pass": 28,
    "DeepSpeedCPUAdam on an fp32 copy of the gradient + cast": 40,
    "torch copy, fp32": 8,
}
NATIVE, DEEPSPEED, NATIVE_BF16, DEEPSPEED_BF16, COPY = BYTES_PER_PARAM
WARM_UP_ROUNDS = 2
GOALS = ((NATIVE, DEEPSPEED, 1.0), (NATIVE_BF16, DEEPSPEED_BF16, 1.25))


def main() -> None:
    """Measure, print a Markdown report, and write it as JSON when asked to."""
    arguments = parse_arguments()
    # Read once, when the OpenMP runtimes are loaded: it must be set before torch is.
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    import torch

    torch.set_num_threads(arguments.threads)
    candidates = build_candidates(arguments.numel, arguments.threads)
    seconds = measure(candidates, arguments.rounds)
    report = summarize(seconds, arguments)
    print(render(report))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--numel", type=int, default=64 << 20, help="parameters (default 64 Mi: 1.9 GB of buffers)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="threads of every candidate")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds, 5 or more (default 15)")
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    arguments = parser.parse_args()
    if arguments.rounds < 5:
        parser.error(f"--rounds = {arguments.rounds}: a median needs 5 or more")
    return arguments


def build_candidates(numel: int, threads: int) -> dict[str, Callable[[], Any]]:
    """Allocate one set of flat buffers and return what to time on it."""
    import torch
    from deepspeed.ops import op_builder

    from megatrain_ds.optim.kernel import AdamStep, load_kernel

    native = load_kernel("native", threads)
    if native.name != "native":
        raise SystemExit("The native kernel was not built; the warning above says why.")
    operator = getattr(op_builder, "CPUAdamBuilder")().load()  # noqa: B009 - made at import time
    operator.create_adam(-1_000_000, 1e-3, 0.9, 0.999, 1e-8, 0.1, True, False)

    generator = torch.Generator().manual_seed(0)
    master, grad32 = torch.randn(numel, generator=generator), torch.randn(numel, generator=generator).mul_(0.01)
    exp_avg, exp_avg_sq = torch.zeros(numel), torch.zeros(numel)
    grad16, compute, grad_copy = grad32.bfloat16(), master.bfloat16(), torch.zeros(numel)
    hyper = AdamStep(1e-3, 0.9, 0.999, 1e-8, 0.1, decoupled=True, bias_correction=True, step=1, grad_scale=1.0)
    state = {"master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}

    def deepspeed(grad: torch.Tensor) -> None:
        operator.adam_update(-1_000_000, 1, 1e-3, 0.9, 0.999, 1e-8, 0.1, True, master, grad, exp_avg, exp_avg_sq)

    def deepspeed_bf16() -> None:
        grad_copy.copy_(grad16)
        deepspeed(grad_copy)
        compute.copy_(master)

    return {
        NATIVE: lambda: native.update(**state, grad=grad32, compute=None, hyper=hyper),
        DEEPSPEED: lambda: deepspeed(grad32),
        NATIVE_BF16: lambda: native.update(**state, grad=grad16, compute=compute, hyper=hyper),
        DEEPSPEED_BF16: deepspeed_bf16,
        COPY: lambda: grad_copy.copy_(grad32),
    }


def measure(candidates: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Time every candidate once per round and drop the rounds that warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    for index in range(WARM_UP_ROUNDS + rounds):
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            start = time.perf_counter()
            candidates[name]()
            seconds[name].append(time.perf_counter() - start)
    return {name: times[WARM_UP_ROUNDS:] for name, times in seconds.items()}


def summarize(seconds: dict[str, list[float]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Turn seconds into rates, bandwidth relative to the copy, and ratios against the goals."""
    rows = []
    for name, times in seconds.items():
        of_copy = [
            (BYTES_PER_PARAM[name] / mine) / (BYTES_PER_PARAM[COPY] / copy)
            for mine, copy in zip(times, seconds[COPY], strict=True)
        ]
        median = statistics.median(times)
        rows.append(
            {
                "candidate": name,
                "median_s": median,
                "min_s": min(times),
                "params_per_s": arguments.numel / median,
                "bytes_per_s": BYTES_PER_PARAM[name] * arguments.numel / median,
                "fraction_of_copy_bandwidth": statistics.median(of_copy),
            }
        )
    ratios = []
    for ours, theirs, goal in GOALS:
        per_round = [b / a for a, b in zip(seconds[ours], seconds[theirs], strict=True)]
        ratios.append({"ours": ours, "theirs": theirs, "speedup": statistics.median(per_round), "goal": goal})
    return {"environment": environment(arguments), "rows": rows, "ratios": ratios}


def environment(arguments: argparse.Namespace) -> dict[str, Any]:
    """Say what the figures depend on."""
    import deepspeed
    import torch

    from megatrain_ds.optim.native import native_status

    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cpus_available": len(os.sched_getaffinity(0)),
        "threads": arguments.threads,
        "numel": arguments.numel,
        "rounds": arguments.rounds,
        "native": native_status().detail,
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def render(report: dict[str, Any]) -> str:
    """Format the report as Markdown."""
    facts = report["environment"]
    lines = [
        f"{facts['cpu']}, {facts['threads']} threads of {facts['cpus_available']} CPUs; native kernel: "
        f"{facts['native']}; torch {facts['torch']}, deepspeed {facts['deepspeed']}; {facts['date']}.",
        f"{facts['numel']:,} parameters, medians of {facts['rounds']} interleaved rounds. Bytes are what the "
        "algorithm reads and writes; a plain copy also reads the lines it is about to overwrite.",
        "",
        "| candidate | ms | G parameters/s | GB/s | of the copy's bandwidth |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row['candidate']} | {row['median_s'] * 1e3:.1f} | {row['params_per_s'] / 1e9:.3f} | "
        f"{row['bytes_per_s'] / 1e9:.1f} | {row['fraction_of_copy_bandwidth']:.2f} |"
        for row in report["rows"]
    ]
    lines += ["", "| ours | against | speedup | goal |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {ratio['ours']} | {ratio['theirs']} | {ratio['speedup']:.3f} | {ratio['goal']:.2f} |"
        for ratio in report["ratios"]
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
