"""Runs children one after the other and keeps what became of each: a record, or the reason that there is none."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from comparisons.machine import describe_machine
from megatrain_ds.cli.single_process import free_port, rank_variables, remove_shared_buffers

OUT_OF_MEMORY_WORDS = ("out of memory", "OutOfMemoryError", "HostMemoryError", "Cannot allocate memory", "MemoryError")
# Exit status of a process that the kernel killed, as the shell and as subprocess see it.
KILLED = (137, -9)
_LOG_TAIL_LINES = 15


@dataclass(frozen=True)
class Request:
    """One measurement.

    Attributes:
        system: its name.
        model: configuration file of the model.
        batch: sequences a step.
        arguments: further options of the child, as on its command line.
        label: what the report calls it, where one system runs with several options.
        facts: what a record says of the measurement where there are no figures.
    """

    system: str
    model: Path
    batch: int
    arguments: tuple[str, ...] = ()
    label: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What tables call it."""
        return self.label or self.system

    @property
    def stem(self) -> str:
        """A name for files: what differs from the usual sequence of 1024 tokens and clipping at 1.0 is in it."""
        sequence, clip = self.facts.get("sequence", 1024), self.facts.get("clip", 1.0)
        parts = [self.model.stem, self.name]
        parts += [f"s{sequence}"] if sequence != 1024 else []
        parts += [f"clip{clip:g}" if clip else "noclip"] if clip != 1.0 else []
        return "_".join([*parts, f"b{self.batch}"])


@dataclass
class Outcome:
    """What became of a request; `record` holds at least "system", "label", "batch" and "status"."""

    request: Request
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether there are figures."""
        return self.record.get("status") == "ok"


def run(request: Request, folder: Path, *, timeout_s: float) -> Outcome:
    """Run one child.

    Args:
        request: what to measure.
        folder: receives NAME.json and NAME.log.
        timeout_s: seconds after which the child is stopped.

    Returns:
        The outcome. A child that fails is a result, never an exception.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stem = request.stem
    out, log = folder / f"{stem}.json", folder / f"{stem}.log"
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "comparisons.child", "--system", request.system, "--model", str(request.model)]
    command += ["--batch", str(request.batch), "--out", str(out), *request.arguments]
    port = free_port()
    environment = os.environ | rank_variables(port) | {"PYTHONUNBUFFERED": "1"}
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
        try:
            code: int | None = process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            # With it whatever it started.
            _end(process)
            remove_shared_buffers(port)
    record = json.loads(out.read_text()) if out.is_file() else _failure(request, code, log, timeout_s)
    record["label"] = request.name
    out.write_text(json.dumps(record, indent=2) + "\n")
    return Outcome(request, record)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Every record in a folder, in the order of their names."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return [record for record in found if isinstance(record, dict) and "status" in record]


def _failure(request: Request, code: int | None, log: Path, timeout_s: float) -> dict[str, Any]:
    text = log.read_text(errors="replace")
    if code is None:
        status, reason = "timeout", f"stopped after {timeout_s:.0f} s"
    elif code in KILLED or any(word in text for word in OUT_OF_MEMORY_WORDS):
        status, reason = "out of memory", last_line(text)
    elif "ModuleNotFoundError" in text or "ImportError" in text:
        status, reason = "missing package", last_line(text)
    else:
        status, reason = "failed", last_line(text)
    return {
        **request.facts,
        **describe_machine(),
        "system": request.system,
        "status": status,
        "reason": reason,
        "exit_status": code,
        "model": request.model.stem,
        "batch": request.batch,
        "log_tail": text.splitlines()[-_LOG_TAIL_LINES:],
    }


def last_line(text: str) -> str:
    """The last line that says something: of a traceback, the error."""
    errors = [line.strip() for line in text.splitlines() if "Error" in line and ":" in line]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (errors or lines or ["no output"])[-1][:300]
