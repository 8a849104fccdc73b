"""Marks of tests whose statement holds from a release of another package on, because that package changed."""

from __future__ import annotations

from importlib.metadata import version

import pytest
from packaging.version import Version


def before(package: str, release: str) -> bool:
    """Whether the installed version of a package is older than `release`."""
    return Version(version(package)) < Version(release)


COLLECTABLE_ENGINES = pytest.mark.skipif(
    before("deepspeed", "0.19.7"), reason="this DeepSpeed keeps every engine alive, its own included, until destroy()"
)
BETA_POWERS_OF_A_STEP = pytest.mark.skipif(
    before("deepspeed", "0.19"),
    reason="this DeepSpeedCPUAdam rounds the powers of its betas by how many calls make a step: bits differ from stock",
)
PACKED_EXPERTS = pytest.mark.skipif(before("transformers", "5"), reason="experts are modules of their own there")
LOSS_SCALED_BY_BACKWARD = not before("deepspeed", "0.19.6")
"""Whether engine.backward divides the loss by the accumulation steps; before, hooks on the outputs divide gradients."""

INITIALIZED_IN_ZERO_INIT = not before("transformers", "5")
"""Whether stock ZeRO-3 initializes a fresh model of Transformers'; before, layers keep PyTorch's own initialization."""
