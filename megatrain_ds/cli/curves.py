"""Compares loss curves against a measured floor: pure arithmetic, no engine, no files."""

from __future__ import annotations

import math
from dataclasses import dataclass

FLOOR_FACTOR = 2.0
FLOOR_WINDOW = 10  # steps that share one floor: a single step's difference may be nought by chance
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


def allowed_differences(reference: list[float], reordered: list[list[float]]) -> list[float]:
    """Return, for each step, how far a curve may lie from `reference`.

    Twice the largest difference seen up to the end of the step's window of ten, between `reference` and any curve of
    `reordered`, plus four units in the last place of an fp32 loss.

    Args:
        reference: one loss a step.
        reordered: the same training with other, equivalent orders of additions; each curve is a draw of the floor.
    """
    draws = [[abs(a - b) for a, b in zip(reference, curve, strict=True)] for curve in reordered]
    floor = [max(differences) for differences in zip(*draws, strict=True)]
    ends = [(step // FLOOR_WINDOW + 1) * FLOOR_WINDOW for step in range(len(reference))]
    ulps = [LOSS_ULPS * FP32_ULP * abs(value) for value in reference]
    return [FLOOR_FACTOR * max(floor[:end]) + ulp for end, ulp in zip(ends, ulps, strict=True)]


def worst_excess(curve: list[float], reference: list[float], reordered: list[list[float]]) -> Excess:
    """Return where `curve` leaves `reference` furthest, measured in what the draws of `reordered` allow."""
    allowed = allowed_differences(reference, reordered)
    steps = (
        Excess(step, abs(a - b), limit)
        for step, (a, b, limit) in enumerate(zip(curve, reference, allowed, strict=True))
    )
    return max(steps, key=lambda excess: excess.ratio)
