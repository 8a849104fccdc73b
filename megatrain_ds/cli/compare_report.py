"""What the two runs of `megatrain-ds compare` add up to: figures, problems, table and plot.

Pure functions over the outcomes; starts nothing.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from megatrain_ds.cli import loss_plot
from megatrain_ds.cli.compare_losses import compare_losses, tolerance_for
from megatrain_ds.cli.compare_runs import Outcome
from megatrain_ds.cli.demo_report import MIB, PACKAGES, distances, version_of

OURS, STOCK = "megatrain", "stock"
TITLES = {OURS: "with the flag", STOCK: "without the flag"}
NUM_SHOWN = 8


def make_report(outcomes: dict[str, Outcome], program: Sequence[str], tolerance: float | None) -> dict[str, Any]:
    """Return the figures as plain data.

    Args:
        outcomes: Both runs, by `OURS` and `STOCK`.
        program: The command line that ran.
        tolerance: Relative distance of losses allowed at the first step; None: by precision.

    Returns:
        "command", "date", "versions", "runs" (each: problem, notes, output tail, seconds, and the record's figures),
        "losses" (a `LossComparison`; None unless both runs count), "speedup" (stock's mean step time over ours; None
        where a time is missing), "problems" (in words; empty when the comparison succeeded).
    """
    ours, stock = outcomes[OURS].record, outcomes[STOCK].record
    problems = [f"{TITLES[name]}: {run.problem}" for name, run in outcomes.items() if run.problem]
    losses, speedup = None, None
    if ours is not None and stock is not None and not problems:
        allowed = tolerance_for([ours, stock]) if tolerance is None else tolerance
        losses = compare_losses(ours["losses"], stock["losses"], allowed)
        if ours["mean_step_s"] and stock["mean_step_s"]:
            speedup = stock["mean_step_s"] / ours["mean_step_s"]
        if not losses.agree:
            problems.append(f"losses: {losses.verdict}")
        if len(ours["losses"]) != len(stock["losses"]):
            problems.append(_say_uneven(len(ours["losses"]), len(stock["losses"])))
    return {
        "command": list(program),
        "date": date.today().isoformat(),
        "versions": {"python": platform.python_version(), **{name: version_of(name) for name in PACKAGES}},
        "runs": {name: _run_figures(run) for name, run in outcomes.items()},
        "losses": None if losses is None else asdict(losses),
        "speedup": speedup,
        "problems": problems,
    }


def _say_uneven(num_ours: int, num_stock: int) -> str:
    return (
        f"steps: the script ended by itself after {num_ours} with the flag and {num_stock} without, so it did not do "
        "the same in both. Look for a state that one run left to the other (checkpoints, an early stop)."
    )


def _run_figures(run: Outcome) -> dict[str, Any]:
    return {
        "problem": run.problem,
        "notes": list(run.notes),
        "output_tail": run.tail,
        "command_s": run.seconds,
        "record": run.record,
    }


def format_report(report: dict[str, Any]) -> str:
    """Return the report as text: losses side by side, figures, and what a reader should know."""
    runs = {name: figures["record"] for name, figures in report["runs"].items()}
    if not any(runs.values()):
        return "No figures: neither run took an optimizer step."
    lines = [*_loss_lines(runs), "", *_figure_lines(report, runs), *_memory_notes(runs), ""]
    for name, figures in report["runs"].items():
        lines += [f"note, {TITLES[name]}: {note}" for note in figures["notes"]]
    if report["losses"] is not None and report["losses"]["agree"]:
        lines.append(f"losses {report['losses']['verdict']}")
    return "\n".join(lines)


def format_problems(report: dict[str, Any]) -> str:
    """Return what went wrong, each run's last output lines below its own."""
    lines = [f"FAILED: {problem}" for problem in report["problems"]]
    for name, figures in report["runs"].items():
        if figures["output_tail"]:
            lines.append(f"End of the output {TITLES[name]}:")
            lines += [f"  | {line}" for line in figures["output_tail"].splitlines()]
    return "\n".join(lines)


def plot(report: dict[str, Any], path: Path) -> bool:
    """Draw both loss curves over the common steps as a PNG; False where a curve is missing."""
    curves = {name: (figures["record"] or {}).get("losses") for name, figures in report["runs"].items()}
    ours, stock = curves[OURS] or [], curves[STOCK] or []
    num_common = min(len(ours), len(stock))
    ours, stock = ours[:num_common], stock[:num_common]
    if not num_common or None in (*ours, *stock):
        return False
    loss_plot.draw(
        path,
        reference=(TITLES[STOCK], stock),
        curve=(TITLES[OURS], ours),
        gaps={"distance": distances(ours, stock)},
        ylabel="loss",
        gap_label="distance",
    )
    return True


def _loss_lines(runs: dict[str, dict[str, Any] | None]) -> list[str]:
    """A few steps of both curves, the first and the last common one among them; as far as either goes alone."""
    ours, stock = ((runs[name] or {}).get("losses", []) for name in (OURS, STOCK))
    length = min(len(ours), len(stock)) or max(len(ours), len(stock))
    if not length:
        return []
    shown = sorted({*range(0, length, max(1, length // NUM_SHOWN)), length - 1})
    lines = [f"{'step':>5}  {TITLES[OURS]:>16}  {TITLES[STOCK]:>16}  {'difference':>12}"]
    for index in shown:
        a, b = (losses[index] if index < len(losses) else None for losses in (ours, stock))
        gap = f"{a - b:>+12.1e}" if a is not None and b is not None else f"{'-':>12}"
        lines.append(f"{index + 1:>5}  {_number(a, '.6f'):>16}  {_number(b, '.6f'):>16}  {gap}")
    return lines


def _figure_lines(report: dict[str, Any], runs: dict[str, dict[str, Any] | None]) -> list[str]:
    rows: list[tuple[str, str, float, str]] = [
        ("mean step, ms", "mean_step_s", 1e-3, ".1f"),
        ("median step, ms", "median_step_s", 1e-3, ".1f"),
        ("tokens/s", "tokens_per_s", 1.0, ".0f"),
        ("peak resident host, MiB", "peak_host_bytes", MIB, ".1f"),
        ("resident host, last step, MiB", "resident_bytes", MIB, ".1f"),
        ("peak device, MiB", "peak_device_bytes", MIB, ".1f"),
    ]
    lines = [_row("", *TITLES.values()), _row("engine", *((runs[name] or {}).get("engine", "-") for name in TITLES))]
    for title, index in (("first loss", 0), ("last loss", -1)):
        ends = [(runs[name] or {}).get("losses") or [None] for name in TITLES]
        lines.append(_row(title, *(_number(losses[index], ".6f") for losses in ends)))
    for title, key, scale, style in rows:
        values = [(runs[name] or {}).get(key) for name in TITLES]
        if values != [None, None]:
            lines.append(_row(title, *(_number(value, style, scale) for value in values)))
    losses = report["losses"]
    if losses is not None and losses["max_abs_diff"] is not None:
        lines.append(f"{'largest difference of losses':32}{losses['max_abs_diff']:.2e}, relative ")
        lines[-1] += f"{losses['max_rel_diff']:.2e}, over {losses['num_compared']} steps"
    if report["speedup"] is not None:
        lines.append(f"{'speedup by the mean step':32}{report['speedup']:.2f}")
    return lines


def _memory_notes(runs: dict[str, dict[str, Any] | None]) -> list[str]:
    account = (runs[OURS] or {}).get("memory_report")
    if not account:
        return []
    return [f"{'engine host bytes/param':32}{account['host_bytes_per_param']:.2f}"]


def _row(title: str, *cells: str) -> str:
    return f"{title:32}" + "".join(f"{cell:>18}" for cell in cells)


def _number(value: float | None, style: str, scale: float = 1.0) -> str:
    return "-" if value is None else format(value / scale, style)
