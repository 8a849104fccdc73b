"""Speed of the host update kernels against DeepSpeedCPUAdam, on the same flat buffers with the same threads.

    python comparisons/update_kernel.py [--numel N] [--threads T] [--rounds R] [--json FILE]

Every candidate runs once per round, in an order that rotates from round to round, and ratios are medians of per-round
ratios: a machine whose memory speed drifts, as a virtual one's does, slows both sides of a ratio alike.

How near the fused pass comes to the DRAM limit is told by a copy with the same threads in the same rounds; see
[Note: What a copy moves].
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

# [Note: What a copy moves]
# An ordinary store into a line that is in no cache reads that line first (write-allocate). A copy of fp32 therefore
# moves 12 bytes an element through DRAM, 4 of them never asked for: counted as 8 it looks slower than the memory is,
# and a kernel measured against it better than it is. The fused pass has no such bytes: it has read the lines of the
# state when it writes them, and its bf16 copy goes out in streaming stores, which skip the caches. So 28 against 12 is
# the yardstick. Some processors claim a line without reading it when the memory is busy; there the copy moves less
# than 12, and the yardstick asks more of the kernel than is due, never less.
COPY_BYTES = {"read_write": 8, "with_write_allocate": 12}
COUNTED = {"read_write": "read + write", "with_write_allocate": "with the write-allocate read"}
HONEST = "with_write_allocate"
WHY = (
    "ordinary stores read each line before they overwrite it, so the copy moves 12 bytes an element; counted as 8 it "
    "would flatter the kernel, which reads no line that it does not need"
)
# Of an element, by the fused pass: the bf16 gradient is read, fp32 state is read and written, the bf16 compute copy is
# written in streaming stores.
FUSED_BYTES = {"gradient": 2, "master": 4 + 4, "exp_avg": 4 + 4, "exp_avg_sq": 4 + 4, "compute copy": 2}
# Bytes read and written per parameter, as the algorithm needs them: 24 for the state, the rest gradient and copy.
BYTES_PER_PARAM = {
    "native, fp32 gradient": 28,
    "DeepSpeedCPUAdam, fp32 gradient": 28,
    "native, bf16 gradient and bf16 copy in one pass": sum(FUSED_BYTES.values()),
    "DeepSpeedCPUAdam on an fp32 copy of the gradient + cast": 40,
    "torch copy, fp32": COPY_BYTES["read_write"],
}
NATIVE, DEEPSPEED, NATIVE_BF16, DEEPSPEED_BF16, COPY = BYTES_PER_PARAM
WARM_UP_ROUNDS = 2
GOALS = ((NATIVE, DEEPSPEED, 1.0), (NATIVE_BF16, DEEPSPEED_BF16, 1.25))
GOAL_OF_COPY = 0.92
# Smaller buffers fit into the caches of large processors, and far smaller ones are written without streaming stores.
LEAST_NUMEL_IN_DRAM = 32 << 20


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
    state: dict[str, Any] = {"master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}

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
    """Turn seconds into rates, the yardstick, and ratios against the goals; the seconds of every round stay in it."""
    rows = []
    for name, times in seconds.items():
        median = statistics.median(times)
        rows.append(
            {
                "candidate": name,
                "bytes_per_param": BYTES_PER_PARAM[name],
                "median_s": median,
                "min_s": min(times),
                "params_per_s": arguments.numel / median,
                "bytes_per_s": BYTES_PER_PARAM[name] * arguments.numel / median,
                "of_copy": of_copy(times, seconds[COPY], BYTES_PER_PARAM[name]),
                "round_s": times,
            }
        )
    ratios = []
    for ours, theirs, goal in GOALS:
        per_round = [b / a for a, b in zip(seconds[ours], seconds[theirs], strict=True)]
        ratios.append({"ours": ours, "theirs": theirs, "speedup": statistics.median(per_round), "goal": goal})
    return {
        "environment": environment(arguments),
        "rows": rows,
        "ratios": ratios,
        "yardstick": yardstick(seconds[NATIVE_BF16], seconds[COPY], arguments.numel),
    }


def of_copy(times: list[float], copies: list[float], bytes_per_param: int) -> dict[str, float]:
    """Bandwidth relative to the copy's of the same round, median of the rounds, for both ways to count the copy.

    Args:
        times: seconds of a candidate, a value per round.
        copies: seconds of the copy in the same rounds.
        bytes_per_param: what the candidate reads and writes.
    """
    pairs = list(zip(times, copies, strict=True))
    return {
        counted: statistics.median((bytes_per_param / mine) / (copy_bytes / copy) for mine, copy in pairs)
        for counted, copy_bytes in COPY_BYTES.items()
    }


def yardstick(times: list[float], copies: list[float], numel: int) -> dict[str, Any]:
    """How near the fused pass comes to the bandwidth that a copy reaches; see [Note: What a copy moves]."""
    kernel_bytes, copy_s = sum(FUSED_BYTES.values()), statistics.median(copies)
    return {
        "kernel": NATIVE_BF16,
        "kernel_bytes_per_element": kernel_bytes,
        "kernel_bytes": FUSED_BYTES,
        "kernel_bytes_per_s": kernel_bytes * numel / statistics.median(times),
        "copy": COPY,
        "copy_bytes_per_element": COPY_BYTES,
        "copy_bytes_per_s": {counted: each * numel / copy_s for counted, each in COPY_BYTES.items()},
        "of_copy": of_copy(times, copies, kernel_bytes),
        "honest": HONEST,
        "why": WHY,
        "goal": GOAL_OF_COPY,
        "in_dram": numel >= LEAST_NUMEL_IN_DRAM,
    }


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
        "copy_threads": torch.get_num_threads(),
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
        "algorithm reads and writes.",
        "",
        "| candidate | bytes/param | ms | G parameters/s | GB/s | of the copy, 8 bytes | of the copy, 12 bytes |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row['candidate']} | {row['bytes_per_param']} | {row['median_s'] * 1e3:.1f} "
        f"| {row['params_per_s'] / 1e9:.3f} | {row['bytes_per_s'] / 1e9:.1f} "
        f"| {row['of_copy']['read_write']:.2f} | {row['of_copy']['with_write_allocate']:.2f} |"
        for row in report["rows"]
    ]
    lines += ["", "| ours | against | speedup | goal |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {ratio['ours']} | {ratio['theirs']} | {ratio['speedup']:.3f} | {ratio['goal']:.2f} |"
        for ratio in report["ratios"]
    ]
    return "\n".join([*lines, "", *render_yardstick(report["yardstick"])])


def render_yardstick(found: dict[str, Any]) -> list[str]:
    """The yardstick as lines of Markdown, a row for each way to count the copy's bytes."""
    each, rates, of = found["copy_bytes_per_element"], found["copy_bytes_per_s"], found["of_copy"]
    lines = [
        "| DRAM yardstick | bytes/element | GB/s | the fused pass reaches | goal |",
        "| --- | --- | --- | --- | --- |",
        f"| the fused pass: {', '.join(f'{name} {count}' for name, count in found['kernel_bytes'].items())} "
        f"| {found['kernel_bytes_per_element']} | {found['kernel_bytes_per_s'] / 1e9:.1f} | - | - |",
    ]
    for counted in each:
        goal = f"{found['goal']:.2f}" if counted == found["honest"] else "-"
        lines.append(
            f"| threaded copy of fp32, {COUNTED[counted]} | {each[counted]} | {rates[counted] / 1e9:.1f} "
            f"| {of[counted]:.2f} | {goal} |"
        )
    lines += ["", f"The yardstick is the copy {COUNTED[found['honest']]}: {found['why']}."]
    if not found["in_dram"]:
        lines.append("These buffers may fit into caches: nothing here is a figure of DRAM. Raise --numel.")
    return lines


if __name__ == "__main__":
    main()
