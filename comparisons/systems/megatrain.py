"""This engine, pure streaming: ZeRO-3's tuned configuration with the flag."""

from __future__ import annotations

from typing import Any

from comparisons.systems import Settings
from comparisons.systems.deepspeed_common import OFFLOAD, TUNED, DeepSpeedSystem, configuration


class MegaTrainSystem(DeepSpeedSystem):
    """The engine, with updates that outlive a step."""

    def drain(self) -> None:
        """Wait for every update under way."""
        self.engine.runtime.pipeline.wait_all()

    def report(self) -> dict[str, Any]:
        """The engine's own count of bytes."""
        return self.engine.memory_report()


def build(model: Any, settings: Settings) -> MegaTrainSystem:
    """The engine; `settings.options` is its megatrain block."""
    zero = {"offload_optimizer": dict(OFFLOAD), "offload_param": dict(OFFLOAD), **TUNED}
    config = configuration(settings, zero, offload_engine="megatrain", megatrain=settings.options)
    return MegaTrainSystem(model, config, expected="MegaTrainEngine")
