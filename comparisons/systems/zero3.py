"""DeepSpeed ZeRO-3 with parameters and optimizer offloaded to the host, buckets tuned."""

from __future__ import annotations

from typing import Any

from comparisons.systems import Settings
from comparisons.systems.deepspeed_common import OFFLOAD, TUNED, DeepSpeedSystem, configuration


def build(model: Any, settings: Settings) -> DeepSpeedSystem:
    """The engine."""
    zero = {"offload_optimizer": dict(OFFLOAD), "offload_param": dict(OFFLOAD), **TUNED, **settings.options}
    return DeepSpeedSystem(model, configuration(settings, zero))
