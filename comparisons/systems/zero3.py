"""DeepSpeed ZeRO-3 with parameters and optimizer offloaded to the host, buckets tuned."""

from __future__ import annotations

from typing import Any

from comparisons.systems import Settings
from comparisons.systems.deepspeed_common import OFFLOAD, TUNED, DeepSpeedSystem, build_zero3


def build(model: Any, settings: Settings) -> DeepSpeedSystem:
    """The engine."""
    zero = {"offload_optimizer": dict(OFFLOAD), "offload_param": dict(OFFLOAD), **TUNED}
    return build_zero3(model, settings, zero)
