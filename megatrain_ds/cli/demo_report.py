"""What the demo's runs add up to: figures, verdict, table and plot.

Pure functions over the records that `demo_script.py` writes; starts nothing and knows nothing about engines.
"""

from __future__ import annotations

import platform
import statistics
from importlib import metadata
from pathlib import Path

from megatrain_ds.cli import loss_plot
from megatrain_ds.cli.curves import worst_excess

MIN_STEPS = 20
MIN_FALL = 0.2  # of the first loss
NUM_WARM_STEPS = 2  # left out of the step time: first allocations
ENGINE, STOCK_ENGINE = "MegaTrainEngine", "DeepSpeedEngine"
PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "megatrain_ds")
TABLE_ROWS = 12
MIB = 2**20


def make_report(records: dict[str, dict]) -> dict:
    """Return the demo's figures as plain data.

    Args:
        records: totals and steps of the runs `megatrain`, `zero3` and one or more named `zero3_...`, which add in other
            orders.

    Returns:
        Losses (lists), largest difference and what the measured floor allows, engine classes, host bytes a parameter as
        the engine reports them (None if it reports none), peak bytes, median step times in seconds, device, versions.
    """
    losses = {name: [step["loss"] for step in record["steps"]] for name, record in records.items()}
    flag, stock = records["megatrain"], records["zero3"]
    draws = {name: curve for name, curve in losses.items() if name.startswith("zero3_")}
    excess = worst_excess(losses["megatrain"], losses["zero3"], list(draws.values()))
    account = flag["memory_report"] or {}
    return {
        "loss_megatrain": losses["megatrain"],
        "loss_zero3": losses["zero3"],
        "loss_floor": draws,
        "max_abs_diff": max(distances(losses["megatrain"], losses["zero3"])),
        "max_abs_diff_floor": max(max(distances(curve, losses["zero3"])) for curve in draws.values()),
        "worst_step": {"step": excess.step, "difference": excess.difference, "allowed": excess.allowed},
        "engine": flag["engine"],
        "engine_zero3": stock["engine"],
        "num_parameters": flag["num_parameters"],
        "host_bytes_per_param": account.get("host_bytes_per_param"),
        "memory_report": flag["memory_report"],
        "peak_host_bytes": {name: records[name]["peak_host_bytes"] for name in ("megatrain", "zero3")},
        "peak_device_bytes": {name: records[name]["peak_device_bytes"] for name in ("megatrain", "zero3")},
        "step_time_s": {name: median_step_s(records[name]) for name in ("megatrain", "zero3")},
        "device": describe_device(),
        "versions": {"python": platform.python_version(), **{name: version_of(name) for name in PACKAGES}},
    }


def distances(curve: list[float], other: list[float]) -> list[float]:
    """Return how far the curves lie apart at each step."""
    return [abs(a - b) for a, b in zip(curve, other, strict=True)]


def median_step_s(record: dict) -> float:
    """Return the median seconds of a step, warm-up left out."""
    return statistics.median(step["seconds"] for step in record["steps"][NUM_WARM_STEPS:])


def version_of(package: str) -> str:
    """Return the installed version, or "not installed" for a package run from its source tree."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def describe_device() -> str:
    """Return the name of the CUDA device that trained, or of the CPU and its threads."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    return f"CPU {platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def find_problems(report: dict) -> list[str]:
    """Return what is wrong with the runs, in words; an empty list means that the demo succeeded."""
    problems = []
    for key, expected in (("engine", ENGINE), ("engine_zero3", STOCK_ENGINE)):
        if report[key] != expected:
            problems.append(f"{key} is {report[key]}, expected {expected}: run `megatrain-ds doctor` to see why.")
    worst = report["worst_step"]
    # Written so that a loss that is not a number fails too.
    if not worst["difference"] <= worst["allowed"]:
        problems.append(
            f"losses differ by {worst['difference']:.3g} at step {worst['step']}, but twice the measured floor is "
            f"{worst['allowed']:.3g}."
        )
    first, last = report["loss_megatrain"][0], report["loss_megatrain"][-1]
    if not last <= (1 - MIN_FALL) * first:
        problems.append(f"the last loss {last:.3f} is not {MIN_FALL:.0%} under the first, {first:.3f}: train longer.")
    return problems


def show(report: dict) -> None:
    """Print curves side by side, then the figures."""
    pairs = list(zip(report["loss_megatrain"], report["loss_zero3"], strict=True))
    stride = max(1, len(pairs) // TABLE_ROWS)
    shown = sorted({*range(0, len(pairs), stride), len(pairs) - 1})
    print(f"\n{'step':>5}  {'megatrain':>10}  {'ZeRO-3':>10}  {'difference':>10}")
    for index in shown:
        ours, theirs = pairs[index]
        print(f"{index + 1:>5}  {ours:>10.5f}  {theirs:>10.5f}  {ours - theirs:>+10.1e}")
    print(f"\nlargest difference {report['max_abs_diff']:.2e}; ZeRO-3 against itself with other orders of additions")
    print(f"(the floor) {report['max_abs_diff_floor']:.2e}; twice the floor up to there is allowed at each step.\n")
    print(f"{'':26}{'megatrain':>18}{'ZeRO-3':>18}")
    print(f"{'engine':26}{report['engine']:>18}{report['engine_zero3']:>18}")
    for title, key, scale in (
        ("median step, ms", "step_time_s", 1e-3),
        ("peak resident host, MiB", "peak_host_bytes", MIB),
        ("peak device, MiB", "peak_device_bytes", MIB),
    ):
        figures = report[key]
        print(f"{title:26}{figures['megatrain'] / scale:>18.1f}{figures['zero3'] / scale:>18.1f}")
    if report["host_bytes_per_param"] is not None:
        print(f"{'engine host bytes/param':26}{report['host_bytes_per_param']:>18.2f}")
    print(f"\n{report['num_parameters']:,} parameters on {report['device']}")


def plot(report: dict, path: Path) -> None:
    """Draw both curves and, below, their difference on a logarithmic scale; write a PNG to `path`."""
    draws = {**report["loss_floor"], "megatrain": report["loss_megatrain"]}
    loss_plot.draw(
        path,
        reference=("stock ZeRO-3 offload", report["loss_zero3"]),
        curve=("megatrain", report["loss_megatrain"]),
        gaps={label: distances(curve, report["loss_zero3"]) for label, curve in draws.items()},
        ylabel="loss, nats per byte",
        gap_label="distance to ZeRO-3",
    )
