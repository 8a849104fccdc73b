"""What `megatrain-ds compare` asks of the processes that it starts, and where they leave their answers.

Carried by an environment variable, so that it passes through any launcher. Standard library only.
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from megatrain_ds.plugin.selection import COMPARE_VARIABLE

PARTIAL_SUFFIX = ".partial"
"""Ends the name of a record that is being written."""


@dataclass(frozen=True)
class CompareSpec:
    """One of the two runs.

    Attributes:
        name: Stem of the run's files.
        flag: True: every DeepSpeed configuration counts as carrying the line that chooses this package's engine.
            False: none does.
        num_steps: Optimizer steps after which the program is ended.
        num_warmup: Optimizer steps before the clock starts.
        folder: Absolute path of the folder that receives the files.
    """

    name: str
    flag: bool
    num_steps: int
    num_warmup: int
    folder: str

    @property
    def path(self) -> Path:
        """The file that holds this specification."""
        return Path(self.folder) / f"{self.name}.spec.json"

    @property
    def events(self) -> Path:
        """One JSON object a line, appended as things happen by whichever process they happen in."""
        return Path(self.folder) / f"{self.name}.events.jsonl"

    @property
    def record(self) -> Path:
        """The figures of the run, one JSON object; appears whole or not at all."""
        return Path(self.folder) / f"{self.name}.record.json"

    def publish(self) -> dict[str, str]:
        """Write the specification, remove an earlier run's answers, and return the variable that leads to it."""
        for stale in (self.events, self.record):
            stale.unlink(missing_ok=True)
        self.path.write_text(json.dumps(asdict(self)) + "\n")
        return {COMPARE_VARIABLE: str(self.path)}

    def withdraw(self) -> None:
        """Remove what only the run's own processes read or wrote halfway; they have ended."""
        for leftover in (self.path, *self.record.parent.glob(f"{self.record.stem}.*{PARTIAL_SUFFIX}")):
            leftover.unlink(missing_ok=True)


def current_spec() -> CompareSpec:
    """Return what the variable of this process leads to; the variable must be set.

    Raises:
        ConfigError: The file is missing or holds something else.
    """
    return _read(os.environ[COMPARE_VARIABLE])


@functools.lru_cache(maxsize=1)
def _read(path: str) -> CompareSpec:
    try:
        return CompareSpec(**json.loads(Path(path).read_text()))
    except (OSError, ValueError, TypeError) as error:
        from megatrain_ds.errors import ConfigError, explain

        rule = f"is set by `megatrain-ds compare` for the programs it starts, but cannot be read ({error})"
        raise ConfigError(explain(COMPARE_VARIABLE, path, rule, "Unset it")) from None
