"""`python -m comparisons run`: every system on the same model, tokens and optimizer, and a report."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comparisons.losses import check, choose_reference
from comparisons.machine import describe_machine
from comparisons.plots import plots
from comparisons.report import group, markdown
from comparisons.runner import Outcome, Request, read_records, run
from comparisons.search import best_batch
from comparisons.systems import SYSTEMS

if TYPE_CHECKING:
    from collections.abc import Callable

SYSTEMS_HELP = "comma-separated, each SYSTEM or LABEL=SYSTEM (to run one with several options): " + "; ".join(
    f"{name}: {text}" for name, text in SYSTEMS.items()
)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m comparisons", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="measure, then report")
    runs.add_argument("--model", type=Path, required=True, help="configs/models/NAME.json")
    runs.add_argument("--systems", default="megatrain,zero3", help=SYSTEMS_HELP)
    runs.add_argument("--batches", default="8,32", help="comma-separated sequences a step, or 'best' to search")
    runs.add_argument("--sequence", type=int, default=1024)
    runs.add_argument("--steps", type=int, default=5, help="timed steps, at least 5 for a claim")
    runs.add_argument("--warmup", type=int, default=2)
    runs.add_argument("--loss-steps", type=int, default=20, help="losses compared; those beyond the clock untimed")
    runs.add_argument("--clip", default="1.0", help="comma-separated gradient clipping; 0 for none")
    runs.add_argument("--learning-rate", type=float, default=1e-5)
    runs.add_argument("--options", type=json.loads, default={}, help='{"LABEL": {options}} (JSON)')
    runs.add_argument("--reference", help="path of the paper authors' code")
    runs.add_argument("--timeout", type=float, default=900.0, help="seconds for one child")
    runs.add_argument("--out", type=Path, default=Path("comparisons/results/local"), help="folder for records")
    runs.add_argument("--base", default="zero3", help="label that ratios are taken against")
    reports = commands.add_parser("report", help="tables and plots of records that exist")
    reports.add_argument("folder", type=Path)
    reports.add_argument("--base", default="zero3", help="label that ratios are taken against")
    tables = commands.add_parser("readme", help="write the results table of README.md from records that exist")
    tables.add_argument("--readme", type=Path, default=Path("README.md"))
    tables.add_argument("--results", type=Path, default=Path("comparisons/results"))
    tables.add_argument("--check", action="store_true", help="change nothing; exit 1 when the table is stale")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run or report.

    Returns:
        0 when every system ran and all losses agree; 1 otherwise; 2 for a bad command line.
    """
    options = parse_arguments(arguments)
    if options.command == "readme":
        return write_readme(options)
    if options.command == "report":
        records = read_records(options.folder)
        if not records:
            _say(f"folder = {str(options.folder)!r}: holds no records. Run `python -m comparisons run` first.")
            return 2
        return finish(records, options.folder, options.base)
    problem = _problem(options)
    if problem:
        _say(problem)
        return 2
    records = [outcome.record for outcome in measure(options)]
    return finish(records, options.out, options.base)


def write_readme(options: argparse.Namespace) -> int:
    """Bring README's tables up to date, or say whether they are; returns the exit status."""
    from comparisons.readme import ReadmeError, update

    try:
        stale = update(options.readme, options.results, check=options.check)
    except (ReadmeError, OSError) as error:
        _say(str(error))
        return 2
    if stale and options.check:
        _say(f"{options.readme}: older than the records. Run `python -m comparisons readme`.")
        return 1
    _say(f"{options.readme}: {'written' if stale else 'up to date'}")
    return 0


def labelled_systems(text: str) -> dict[str, str]:
    """System per label, of "megatrain,compiled=megatrain,zero3"."""
    pairs = [part.split("=", 1) for part in text.split(",")]
    return {pair[0]: pair[-1] for pair in pairs}


def measure(options: argparse.Namespace) -> list[Outcome]:
    """Run every system at every clipping and batch, one child after the other."""
    outcomes = []
    systems = labelled_systems(options.systems)
    runs = [(label, float(clip)) for clip in options.clip.split(",") for label in systems]
    for position, (label, clip) in enumerate(runs, 1):
        attempt = _attempt(options, systems[label], label, clip, f"[{position}/{len(runs)}] {label}")
        if options.batches == "best":
            outcomes += best_batch(attempt)
        else:
            outcomes += [attempt(int(batch)) for batch in options.batches.split(",")]
    return outcomes


def _attempt(options: argparse.Namespace, system: str, label: str, clip: float, place: str) -> Callable[[int], Outcome]:
    """What measures one batch of one system, and says so."""
    arguments = _child_arguments(options, label, clip)
    facts = {"sequence": options.sequence, "clip": clip, "options": options.options.get(label, {})}

    def attempt(batch: int) -> Outcome:
        at = f"{place}, clipping {clip or 'off'}, batch {batch}"
        _say(f"{at} ...")
        outcome = run(
            Request(system, options.model, batch, arguments, label, facts), options.out, timeout_s=options.timeout
        )
        _say(f"{at}: {_summary(outcome)}")
        return outcome

    return attempt


def _child_arguments(options: argparse.Namespace, label: str, clip: float) -> tuple[str, ...]:
    arguments = ["--options", json.dumps(options.options.get(label, {})), "--clip", str(clip)]
    for name in ("sequence", "steps", "warmup", "loss_steps", "learning_rate"):
        arguments += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    if options.reference:
        arguments += ["--reference", options.reference]
    return tuple(arguments)


def finish(records: list[dict[str, Any]], folder: Path, base: str) -> int:
    """Write report.md and the plots of everything in the folder; returns the exit status, which `records` decide."""
    everything = read_records(folder)
    table = markdown(everything, base)
    (folder / "report.md").write_text(table)
    plots(everything, folder)
    _say(table)
    good = True
    for record in records:
        same = [r for r in everything if r["batch"] == record["batch"] and group(r) == group(record)]
        void = check(record, choose_reference(same))
        good &= record["status"] == "ok" and not void.endswith("void")
    return 0 if good else 1


def _problem(options: argparse.Namespace) -> str:
    """What is wrong with the command line, before anything is started; "" if nothing."""
    if not options.model.is_file():
        return f"--model = {str(options.model)!r}: no such file. Choose one of configs/models/."
    systems = labelled_systems(options.systems)
    unknown = [name for name in systems.values() if name not in SYSTEMS]
    if unknown:
        return f"--systems = {unknown[0]!r}: no such system. Choose from {', '.join(SYSTEMS)}."
    if len(systems) < len(options.systems.split(",")):
        return f"--systems = {options.systems!r}: a label appears twice. Tell them apart: LABEL=SYSTEM."
    strangers = set(options.options) - set(systems) if isinstance(options.options, dict) else {"?"}
    if strangers:
        return (
            f"--options = {options.options!r}: give {{LABEL: {{...}}}} with labels of --systems: {', '.join(systems)}."
        )
    if "reference" in systems.values() and not (options.reference and Path(options.reference).is_dir()):
        return f"--reference = {options.reference!r}: the system 'reference' needs the folder of a checkout. Name one."
    if options.batches != "best" and not all(part.isdigit() and int(part) > 0 for part in options.batches.split(",")):
        return f"--batches = {options.batches!r}: give counts of sequences such as 8,32, or 'best'."
    if not all(_is_clipping(part) for part in options.clip.split(",")):
        return f"--clip = {options.clip!r}: give one or more of 0 (none) and positive numbers, such as 1.0,0."
    for name, least in (("steps", 1), ("warmup", 0), ("loss_steps", 1), ("sequence", 2)):
        if getattr(options, name) < least:
            return f"--{name.replace('_', '-')} = {getattr(options, name)}: must be at least {least}. Give more."
    return _other_hardware(options.out)


def _is_clipping(text: str) -> bool:
    try:
        return 0.0 <= float(text) < float("inf")
    except ValueError:
        return False


def _other_hardware(folder: Path) -> str:
    here = _hardware(describe_machine())
    others = {_hardware(record) for record in read_records(folder) if record["status"] == "ok"} - {here}
    if not others:
        return ""
    return (
        f"--out = {str(folder)!r}: holds records of {', '.join(sorted(others))}, and this machine has {here}. Ratios "
        "across machines mean nothing: give another folder."
    )


def _hardware(record: dict[str, Any]) -> str:
    return f"{record['device']} with {record.get('cores', '?')} cores"


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
