"""This engine, pure streaming: ZeRO-3's tuned configuration with the flag."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from comparisons.systems import Settings
from comparisons.systems.deepspeed_common import OFFLOAD, TUNED, DeepSpeedSystem, configuration

BREAKDOWN_STEPS = 2


class MegaTrainSystem(DeepSpeedSystem):
    """The engine, with updates that outlive a step.

    Args:
        model: the model, on the host.
        config: the ds_config.
        trace_file: where the engine writes its trace.
    """

    breakdown_steps = BREAKDOWN_STEPS

    def __init__(self, model: Any, config: dict[str, Any], trace_file: Path) -> None:
        super().__init__(model, config, expected="MegaTrainEngine")
        self._trace_file = trace_file

    def drain(self) -> None:
        """Wait for every update under way."""
        self.engine.runtime.pipeline.wait_all()

    def report(self) -> dict[str, Any]:
        """The engine's own count of bytes."""
        return self.engine.memory_report()

    def breakdown(self) -> list[dict[str, Any]]:
        """The steps of the engine's trace."""
        return json.loads(self._trace_file.read_text())["otherData"]["steps"]


def build(model: Any, settings: Settings) -> MegaTrainSystem:
    """The engine; `settings.options` is its megatrain block."""
    zero = {"offload_optimizer": dict(OFFLOAD), "offload_param": dict(OFFLOAD), **TUNED}
    trace_file = Path(settings.options.get("trace_file") or Path(tempfile.mkdtemp()) / "trace.json")
    trace = {
        "trace_file": str(trace_file),
        "trace_after": settings.steps_before_breakdown,
        "trace_steps": BREAKDOWN_STEPS,
    }
    config = configuration(settings, zero, offload_engine="megatrain", megatrain={**settings.options, **trace})
    return MegaTrainSystem(model, config, trace_file)
