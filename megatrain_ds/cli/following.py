"""Follows what a program writes while it runs, and shows it as a progress bar.

Knows nothing about the program but that it writes one JSON object a line.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

POLL_S = 0.2


def follow(program: subprocess.Popen, path: Path, bar) -> Iterator[str]:  # noqa: ANN001  (tqdm has no types)
    """Yield the lines of `path` as `program` writes them, until it ends; the bar counts those of steps."""
    while not path.exists() and program.poll() is None:
        time.sleep(POLL_S)
    if not path.exists():
        return
    with path.open() as stream:
        ended = False
        while True:
            line = stream.readline()
            if line.endswith("\n"):
                yield line
                _show_step(json.loads(line), bar)
            elif ended:
                return
            else:
                stream.seek(stream.tell() - len(line))
                ended = program.poll() is not None
                time.sleep(POLL_S)


def _show_step(values: dict, bar) -> None:  # noqa: ANN001
    if "step" not in values:
        return
    if values.get("loss") is not None:
        bar.set_postfix(loss=f"{values['loss']:.3f}")
    bar.update()
