"""Compares loss curves against a measured floor: pure arithmetic, no engine, no files."""

from __future__ import annotations

import math
from dataclasses import dataclass

FLOOR_FACTOR = 2.0
FLOOR_WINDOW = 10  # steps: the floor of a curve's start is that of its first steps together
LOSS_ULPS = 4
FP32_ULP = 2.0**-23


@dataclass(frozen=True)
class Excess:
    """The step at which two curves part furthest, in units of what is allowed there."""

    step: int
    difference: float
    allowed: float

    @property
    def ratio(self) -> float:
        """Above 1 when the curves disagree; infinite where a value is not a number, which `max` would pass over."""
        ratio = self.difference / self.allowed
        return math.inf if math.isnan(ratio) else ratio


def allowed_differences(reference: list[float], reordered: list[float]) -> list[float]:
    """Return, for each step, how far a curve may lie from `reference`.

    Twice the largest difference seen so far between `reference` and `reordered`, the same training with an equivalent
    order of additions, plus four units in the last place of an fp32 loss.
    """
    floor = [abs(a - b) for a, b in zip(reference, reordered, strict=True)]
    return [
        FLOOR_FACTOR * max(floor[: max(step + 1, FLOOR_WINDOW)]) + LOSS_ULPS * FP32_ULP * abs(value)
        for step, value in enumerate(reference)
    ]


def worst_excess(curve: list[float], reference: list[float], reordered: list[float]) -> Excess:
    """Return where `curve` leaves `reference` furthest, measured in what `reordered` allows."""
    allowed = allowed_differences(reference, reordered)
    steps = (
        Excess(step, abs(a - b), limit)
        for step, (a, b, limit) in enumerate(zip(curve, reference, allowed, strict=True))
    )
    return max(steps, key=lambda excess: excess.ratio)
