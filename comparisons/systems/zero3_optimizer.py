"""DeepSpeed ZeRO-3 with the optimizer on the host and parameters on the device."""

from __future__ import annotations

from typing import Any

from comparisons.systems import Settings
from comparisons.systems.deepspeed_common import OFFLOAD, TUNED, DeepSpeedSystem, configuration


def build(model: Any, settings: Settings) -> DeepSpeedSystem:
    """The engine."""
    zero = {"offload_optimizer": dict(OFFLOAD), **TUNED, **settings.options}
    return DeepSpeedSystem(model, configuration(settings, zero))
