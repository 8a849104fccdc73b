"""`python -m comparisons run`: every system on the same model, tokens and optimizer, and a report."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from comparisons.losses import check, choose_reference
from comparisons.report import markdown, plots
from comparisons.runner import Outcome, Request, run
from comparisons.search import best_batch
from comparisons.systems import SYSTEMS


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m comparisons", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="measure, then report")
    runs.add_argument("--model", type=Path, required=True, help="configs/models/NAME.json")
    runs.add_argument("--systems", default="megatrain,zero3", help="comma-separated: " + ", ".join(SYSTEMS))
    runs.add_argument("--batches", default="8,32", help="comma-separated sequences a step, or 'best' to search")
    runs.add_argument("--sequence", type=int, default=1024)
    runs.add_argument("--steps", type=int, default=5, help="timed steps, at least 5 for a claim")
    runs.add_argument("--warmup", type=int, default=2)
    runs.add_argument("--clip", type=float, default=1.0, help="gradient clipping; 0 for none")
    runs.add_argument("--learning-rate", type=float, default=1e-5)
    runs.add_argument("--options", type=json.loads, default={}, help='{"SYSTEM": {options}} (JSON)')
    runs.add_argument("--reference", help="path of the paper authors' code")
    runs.add_argument("--timeout", type=float, default=900.0, help="seconds for one child")
    runs.add_argument("--out", type=Path, default=Path("comparisons/results/local"), help="folder for records")
    reports = commands.add_parser("report", help="tables and plots of records that exist")
    reports.add_argument("folder", type=Path)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run or report.

    Returns:
        0 when every system ran and all losses agree; 1 otherwise; 2 for a bad command line.
    """
    options = parse_arguments(arguments)
    if options.command == "report":
        records = read_records(options.folder)
        if not records:
            _say(f"folder = {str(options.folder)!r}: holds no records. Run `python -m comparisons run` first.")
            return 2
        return finish(records, options.folder)
    problem = _problem(options)
    if problem:
        _say(problem)
        return 2
    records = [outcome.record for outcome in measure(options)]
    return finish(records, options.out)


def measure(options: argparse.Namespace) -> list[Outcome]:
    """Run every system at every batch, one child after the other."""
    outcomes = []
    for system in options.systems.split(","):
        extra = ["--options", json.dumps(options.options.get(system, {}))]
        for name in ("sequence", "steps", "warmup", "clip", "learning_rate"):
            extra += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
        if options.reference:
            extra += ["--reference", options.reference]

        def attempt(batch: int, system: str = system, extra: list[str] = extra) -> Outcome:
            _say(f"{system}, batch {batch} ...")
            outcome = run(Request(system, options.model, batch, tuple(extra)), options.out, timeout_s=options.timeout)
            _say(f"{system}, batch {batch}: {_summary(outcome)}")
            return outcome

        if options.batches == "best":
            outcomes += best_batch(attempt)
        else:
            outcomes += [attempt(int(batch)) for batch in options.batches.split(",")]
    return outcomes


def finish(records: list[dict[str, Any]], folder: Path) -> int:
    """Write the table and the plots; returns the exit status."""
    table = markdown(records)
    (folder / "report.md").write_text(table)
    plots(records, folder)
    _say(table)
    good = True
    for record in records:
        same = [r for r in records if r["batch"] == record["batch"]]
        void = check(record, choose_reference(same))
        good &= record["status"] == "ok" and not void.endswith("void")
    return 0 if good else 1


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Every record in a folder, in the order of their names."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return [record for record in found if isinstance(record, dict) and "status" in record]


def _problem(options: argparse.Namespace) -> str:
    if not options.model.is_file():
        return f"--model = {str(options.model)!r}: no such file. Choose one of configs/models/."
    unknown = [name for name in options.systems.split(",") if name not in SYSTEMS]
    if unknown:
        return f"--systems = {unknown[0]!r}: no such system. Choose from {', '.join(SYSTEMS)}."
    if options.batches != "best" and not all(part.isdigit() and int(part) > 0 for part in options.batches.split(",")):
        return f"--batches = {options.batches!r}: give counts of sequences such as 8,32, or 'best'."
    others = {str(record["device"]) for record in read_records(options.out) if record["status"] == "ok"}
    from comparisons.machine import describe_machine

    here = describe_machine()["device"]
    if others - {here}:
        return (
            f"--out = {str(options.out)!r}: holds records of {', '.join(sorted(others - {here}))}, and this machine "
            f"has {here}. Ratios across machines mean nothing: give another folder."
        )
    return ""


def _summary(outcome: Outcome) -> str:
    record = outcome.record
    if not outcome.ok:
        return f"{record['status']} ({record.get('reason', '')})"
    return f"{record['step_s']:.3f} s/step, {record['model_tflops']:.0f} TFLOP/s, first loss {record['losses'][0]:.4f}"


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
