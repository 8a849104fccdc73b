"""Runs the user's command once for `megatrain-ds compare`, and says in words how that ended.

Starts it with one more environment variable, follows what the recorder inside writes, and leaves no process behind.
Knows nothing about the script.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megatrain_ds.cli.following import POLL_S, follow
from megatrain_ds.cli.single_process import remove_shared_buffers
from megatrain_ds.plugin.compare_spec import CompareSpec
from megatrain_ds.plugin.selection import COMPARE_VARIABLE

GRACE_S = 10.0  # between asking a process to end and ending it; data loader workers notice a lost parent within 5
KILL_S = 10.0  # for which killed processes are waited for; one in the middle of a device call ends late
NUM_TAIL_LINES = 12
ERROR_LINE = re.compile(r"\b\w*(Error|Exception): \S")
LAUNCHERS_OWN = re.compile(r"\[(launch|runner)\.py:|\bCalledProcessError\b")
LAUNCHERS_END = re.compile(r"torch/distributed/elastic/|\bChildFailedError\b")  # a traceback and a table follow
ENGINES = {True: "MegaTrainEngine", False: "DeepSpeedEngine"}


@dataclass(frozen=True)
class Outcome:
    """How one run ended.

    Attributes:
        record: What the recorder left (see `EngineRecord.as_plain_data`); None when no optimizer step was taken.
        problem: Why the run does not count, with the next action; empty when it does.
        notes: What a reader of its figures should know.
        tail: The last lines of its output, when there is a problem.
        seconds: From the start of the command to its end.
    """

    record: dict[str, Any] | None
    problem: str
    notes: tuple[str, ...]
    tail: str
    seconds: float


@dataclass(frozen=True)
class Ending:
    """What a command that has ended left, apart from its record and its output.

    Attributes:
        status: Its exit status, negative for a signal.
        events: What the recorder told while it ran, in order.
        timeout_s: The limit in seconds if it was ended for reaching it, else None.
    """

    status: int
    events: tuple[dict[str, Any], ...]
    timeout_s: float | None


def run_once(spec: CompareSpec, program: Sequence[str], *, title: str, timeout_s: float) -> Outcome:
    """Run the command behind a progress bar.

    Args:
        spec: The run; its folder exists.
        program: The command line; its first word was found.
        title: What the bar shows.
        timeout_s: Seconds after which the command is ended.
    """
    from tqdm import tqdm

    log, started_s = Path(spec.folder) / f"{spec.name}.log", time.monotonic()
    with log.open("w") as stream, tqdm(total=spec.num_steps, desc=title, unit="step") as bar:
        try:
            ending = _follow_to_end(spec, program, stream, bar, timeout_s)
        except OSError as error:
            return Outcome(None, f"the command could not be started: {error}. Correct it.", (), "", 0.0)
        finally:
            spec.withdraw()
    seconds = time.monotonic() - started_s
    record = json.loads(spec.record.read_text()) if spec.record.exists() else None
    output = log.read_text(errors="replace").splitlines()
    problem = find_problem(spec, ending, record, output)
    tail = "\n".join(output[-NUM_TAIL_LINES:]) if problem else ""
    return Outcome(record, problem, tuple(find_notes(spec, record)), tail, seconds)


def _follow_to_end(spec: CompareSpec, program: Sequence[str], stream: IO[str], bar: Any, timeout_s: float) -> Ending:
    """Start the command, wait for its end, and leave neither a process nor shared memory of it behind.

    Raises:
        OSError: The command cannot be started.
    """
    environment, timed_out, events = {**os.environ, **spec.publish()}, threading.Event(), []
    command = subprocess.Popen(
        program, env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, start_new_session=True
    )
    timer = threading.Timer(timeout_s, _stop_late, (command, timed_out))
    timer.start()
    try:
        for line in follow(command, spec.events, bar):
            events.append(json.loads(line))
    finally:
        timer.cancel()
        end_all(command, spec)
        for port in {event["master_port"] or "" for event in events}:
            if port.isdigit():
                remove_shared_buffers(int(port))
    return Ending(command.returncode, tuple(events), timeout_s if timed_out.is_set() else None)


def find_problem(spec: CompareSpec, ending: Ending, record: dict[str, Any] | None, output: Sequence[str]) -> str:
    """Return why a run does not count, or an empty string.

    Args:
        spec: The run.
        ending: How its command ended.
        record: What the recorder left.
        output: The lines that the command printed.
    """
    events = ending.events
    done = max((event["step"] for event in events if "step" in event), default=0)
    where = f"after {done} of {spec.num_steps} optimizer steps"
    if ending.timeout_s is not None:
        cause = f" So far {_explain_silence(events)}" if not done else ""
        return f"no end within {ending.timeout_s:g} s, {where}. Raise --timeout, or ask for fewer --steps.{cause}"
    if ending.status != 0:
        cause = find_error_line(events, output) or "it printed nothing"
        return f"the command ended with status {ending.status}, {where}: {cause}"
    if record is None:
        return _explain_silence(events)
    if record["engine"] != ENGINES[spec.flag]:
        action = "Run `megatrain-ds doctor`" if spec.flag else "Train with deepspeed.initialize and a plain module"
        return f"ran on {record['engine']}, expected {ENGINES[spec.flag]}. {action}."
    return ""


def find_error_line(events: Sequence[dict[str, Any]], output: Sequence[str]) -> str:
    """Return the line that says why a command failed; empty if it printed nothing.

    Args:
        events: Those of the recorder, which hears an exception that nobody caught.
        output: What the command printed, searched where the recorder was not there yet.
    """
    told = [event["text"] for event in events if event["event"] == "error"]
    before = itertools.takewhile(lambda line: not LAUNCHERS_END.search(line), output)
    spoken = [line for line in before if any(map(str.isalnum, line)) and not LAUNCHERS_OWN.search(line)]
    raised = [line for line in spoken if ERROR_LINE.search(line)]
    return next(iter([*told[:1], *raised[-1:], *spoken[-1:]]), "").strip().partition("\n")[0]


def _explain_silence(events: Sequence[dict[str, Any]]) -> str:
    """Say what a command that ended well without one optimizer step did not do."""
    kinds = {event["event"] for event in events}
    if "deepspeed" not in kinds:
        return (
            "the script never imported DeepSpeed with this plugin active. "
            "Compare a script that trains with DeepSpeed, and run `megatrain-ds doctor` with the script's Python."
        )
    if "engine" not in kinds:
        return (
            "the script never called DeepSpeed's engine: none was built. "
            "Check that the launcher or TrainingArguments carries the DeepSpeed configuration."
        )
    if not any(event.get("trained") for event in events):
        return "the script built an engine without an optimizer: nothing is trained. Give it an optimizer."
    return (
        "the script built an engine and took no optimizer step with it: engine.step() was never called at the end of "
        "an accumulation. Check that it trains."
    )


def find_notes(spec: CompareSpec, record: dict[str, Any] | None) -> list[str]:
    """Return what a reader of this run's figures should know."""
    if record is None:
        return []
    notes = []
    done, world_size = len(record["losses"]), record["world_size"]
    if not record["complete"]:
        notes.append(
            f"the script ended by itself after {done} of {spec.num_steps} steps, before the clock could wait for the "
            f"last update: --steps {done} times it whole."
        )
    if record["num_trained_engines"] > 1:
        notes.append(f"{record['num_trained_engines']} engines trained: these are the figures of the furthest one.")
    if world_size > 1:
        notes.append(f"{world_size} ranks: these are the figures of rank 0.")
    if record["skipped_steps"]:
        notes.append(f"{record['skipped_steps']} steps were skipped for gradients that were not finite.")
    return notes


def end_all(command: subprocess.Popen, spec: CompareSpec) -> None:
    """End the command and whatever it started that is still there."""
    if command.poll() is None:
        _stop(command)
    deadline = time.monotonic() + GRACE_S
    while find_processes(spec) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    # Again until none is left: a killed one takes a moment, and one seen just now may have started another.
    deadline = time.monotonic() + KILL_S
    while (left := find_processes(spec)) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(POLL_S)
    command.wait()


def find_processes(spec: CompareSpec) -> list[int]:
    """Return the processes that inherited this run's variable; launchers put them into sessions of their own."""
    wanted = f"{COMPARE_VARIABLE}={spec.path}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def _stop_late(command: subprocess.Popen, timed_out: threading.Event) -> None:
    timed_out.set()
    _stop(command)


def _stop(command: subprocess.Popen) -> None:
    """Ask the whole session, so that a launcher ends its ranks; then insist."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(command.pid, kind)
        with contextlib.suppress(subprocess.TimeoutExpired):
            command.wait(GRACE_S)
            return
