"""DeepSpeed ZeRO-3 with super_offload: optimizer steps speculated on the host and rolled back."""

from __future__ import annotations

from typing import Any

from comparisons.systems import Settings
from comparisons.systems.deepspeed_common import OFFLOAD, TUNED, DeepSpeedSystem, build_zero3


def build(model: Any, settings: Settings) -> DeepSpeedSystem:
    """The engine."""
    optimizer = {**OFFLOAD, "ratio": 0.9, "super_offload": True, "cpuadam_cores_perc": 0.9}
    zero = {"offload_optimizer": optimizer, **TUNED}
    return build_zero3(model, settings, zero)
