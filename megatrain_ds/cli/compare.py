"""`megatrain-ds compare`: the user's own command with the flag, then without it; losses, step times and memory of both.

No file of the user's is edited: the plugin inside the started programs reads an environment variable and treats every
DeepSpeed configuration as carrying the flag's line, or as not carrying it. Runs through `compare_runs`, judges and
reports through `compare_losses` and `compare_report`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from megatrain_ds.cli import compare_report
from megatrain_ds.cli.compare_report import OURS, STOCK, TITLES
from megatrain_ds.cli.compare_runs import Outcome, run_once
from megatrain_ds.errors import ConfigError, explain
from megatrain_ds.plugin.compare_spec import CompareSpec

MIN_TIMED_STEPS = 2
USAGE_STATUS = 2
INTERRUPTED_STATUS = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this subcommand; the command after "--" is no business of the parser."""
    parser.usage = "megatrain-ds compare [options] -- command [arguments]"
    parser.epilog = (
        "The command is what starts your training: python train.py ..., accelerate launch ..., deepspeed ..., torchrun "
        "... Exit status: 0 both ran and their losses agree, 1 otherwise, 2 for a wrong command line, 130 interrupted."
    )
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps of each run (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=3, help="of these, steps before the clock (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=3600.0, metavar="S", help="limit of a run (default: 3600 s)")
    parser.add_argument("--tolerance", type=float, help="relative distance of losses that counts as agreement")
    parser.add_argument("--out-dir", default="megatrain_compare", help="folder for logs, records and plot")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    # Takes a command without "--" before it, so that what is missing can be named.
    parser.add_argument("misplaced", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Run the command twice and report; 0 when both ran and agree, 1 otherwise, 2 for a wrong command line."""
    try:
        check_arguments(arguments)
    except ConfigError as error:
        print(f"megatrain-ds compare: {error}", file=sys.stderr)
        return USAGE_STATUS
    folder = Path(arguments.out_dir).resolve()
    try:
        with _interrupts():
            outcomes = {name: _run(name, arguments, folder) for name in (OURS, STOCK)}
    except KeyboardInterrupt:
        print(f"megatrain-ds compare: interrupted, and what it started is ended; see {folder}", file=sys.stderr)
        return INTERRUPTED_STATUS
    report = compare_report.make_report(outcomes, arguments.program, arguments.tolerance)
    print(f"\n{compare_report.format_report(report)}")
    content = json.dumps(report, indent=1) + "\n"
    for path in (folder / "report.json", *([Path(arguments.json)] if arguments.json else [])):
        path.write_text(content)
    print(f"{_plot(report, folder)}Logs and records are in {folder}")
    if report["problems"]:
        print(compare_report.format_problems(report), file=sys.stderr)
    return 1 if report["problems"] else 0


def check_arguments(arguments: argparse.Namespace) -> None:
    """Refuse what could only fail later, and make the folder.

    Args:
        arguments: What the parser made, and `program`, the list of words after "--".

    Raises:
        ConfigError: No command, one that is not there, figures out of range, or a file that cannot be written.
    """
    _check_command(arguments)
    if arguments.warmup < 1:
        raise ConfigError(explain("--warmup", arguments.warmup, "is at least 1", "The first step is never timed"))
    least = arguments.warmup + MIN_TIMED_STEPS
    if arguments.steps < least:
        rule = f"is at least {least}: {arguments.warmup} to warm up and {MIN_TIMED_STEPS} to time"
        raise ConfigError(explain("--steps", arguments.steps, rule, "Ask for more steps or a shorter --warmup"))
    for name, value in (("--timeout", arguments.timeout), ("--tolerance", arguments.tolerance)):
        if value is not None and not (0 < value < math.inf):
            raise ConfigError(explain(name, value, "is a positive number", "Correct it or leave it out"))
    _check_files(arguments)


def _check_command(arguments: argparse.Namespace) -> None:
    action = "Write `megatrain-ds compare [options] -- python train.py ...`"
    if arguments.misplaced or not arguments.program:
        value = shlex.join([*arguments.misplaced, *arguments.program])
        raise ConfigError(explain("command", value, 'stands wholly after "--" and starts your training', action))
    first = arguments.program[0]
    if shutil.which(first) is None:
        rule = "is neither a program on the PATH nor a file that may be executed"
        raise ConfigError(explain("command", first, rule, "Correct it, or name python first"))


def _check_files(arguments: argparse.Namespace) -> None:
    """Try what will be written hours from now. Root may write where the permissions say no, so only trying tells."""
    folder = Path(arguments.out_dir).resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        rule = f"cannot be written ({error.strerror})"
        raise ConfigError(explain("--out-dir", arguments.out_dir, rule, "Name another folder")) from None
    try:
        if arguments.json:
            Path(arguments.json).open("a").close()
    except OSError as error:
        rule = f"cannot be written ({error.strerror})"
        raise ConfigError(explain("--json", arguments.json, rule, "Name a file in a folder that exists")) from None


def _run(name: str, arguments: argparse.Namespace, folder: Path) -> Outcome:
    spec = CompareSpec(
        name=name, flag=name == OURS, num_steps=arguments.steps, num_warmup=arguments.warmup, folder=str(folder)
    )
    return run_once(spec, arguments.program, title=TITLES[name], timeout_s=arguments.timeout)


@contextlib.contextmanager
def _interrupts() -> Iterator[None]:
    """Make the signals that would end this process act like Ctrl-C, so that it ends what it started first."""
    # What nohup ignores stays ignored.
    kinds = [kind for kind in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(kind) is signal.SIG_DFL]
    for kind in kinds:
        signal.signal(kind, signal.default_int_handler)
    try:
        yield
    finally:
        for kind in kinds:
            signal.signal(kind, signal.SIG_DFL)


def _plot(report: dict, folder: Path) -> str:
    """Draw the curves where that is possible, and say where they are."""
    path = folder / "losses.png"
    path.unlink(missing_ok=True)
    if importlib.util.find_spec("matplotlib") is None:
        return "No plot: matplotlib is not installed (`pip install matplotlib`). "
    return f"Curves are in {path}. " if compare_report.plot(report, path) else ""
