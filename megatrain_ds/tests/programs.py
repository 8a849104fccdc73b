"""Runs small programs in fresh interpreters, where imports and environment are what a user's script would have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from megatrain_ds.tests.conftest import free_port, remove_shared_buffers


def run_program(source: str, *paths: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python source with these folders in front of its path, and nothing else on PYTHONPATH."""
    port = str(free_port())
    variables = {**os.environ, "MASTER_PORT": port, **environment, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    try:
        return subprocess.run(
            [sys.executable, "-c", source],
            env=variables,
            cwd="/",
            text=True,
            capture_output=True,
            timeout=280,
            check=False,
        )
    finally:
        remove_shared_buffers(port)


def read_result(finished: subprocess.CompletedProcess[str]) -> Any:
    """Return the JSON that a program printed after "RESULT "; fail with its output when there is none."""
    lines = [line for line in finished.stdout.splitlines() if line.startswith("RESULT ")]
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert lines, finished.stdout + finished.stderr
    return json.loads(lines[-1].removeprefix("RESULT "))
