"""Whether the losses of two runs of one script agree: arithmetic over two lists, no files.

[Note: When losses agree] Both engines keep fp32 masters and do the same mathematics with other orders of additions, so
their losses part by rounding, and training amplifies that. Allowed is a distance relative to the stock run's loss, by
the type that most arithmetic is done in (`TOLERANCES`), but at least two units in the last place of the type that the
losses themselves have. From step 20 on it grows with the number of steps. A loss that nears nought is measured against
a hundredth of the largest one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

TOLERANCES = {"fp32": 2.0**-15, "fp16": 2.0**-11, "bf16": 2.0**-11}
ULPS = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7, "float64": 2.0**-52}
NUM_ULPS = 2
NUM_EQUAL_STEPS = 20
SMALLEST_SCALE = 0.01
POSSIBLE_REASONS = (
    "Possible reasons besides a fault in the engine: the script differs from run to run (weights, data order or "
    "dropout without a seed; a run that continues from what the other saved), or a case under Limits in the README. "
    "Run the command twice without the flag to tell."
)


@dataclass(frozen=True)
class LossComparison:
    """How far the losses lie apart.

    Attributes:
        num_compared: Steps that both runs have.
        max_abs_diff: Largest distance; None without a common step.
        max_rel_diff: Largest relative distance, by the note's measure; None without a common step.
        worst_step: Step (from 1) where the relative distance is largest in units of what is allowed there; 0 if none.
        allowed: What is allowed at that step, relative.
        tolerance: What is allowed at the first step, relative.
        agree: Whether no step exceeds what is allowed; None where nothing can be said.
        verdict: The same in words; with the next action unless they agree.
    """

    num_compared: int
    max_abs_diff: float | None
    max_rel_diff: float | None
    worst_step: int
    allowed: float
    tolerance: float
    agree: bool | None
    verdict: str


def tolerance_for(records: Sequence[dict[str, Any]]) -> float:
    """Return the relative distance that is allowed at the first step.

    Args:
        records: Both runs' records: "precision" ("fp32", "fp16", "bf16") and "loss_dtype" (a torch type's name, or
            None) are read.
    """
    by_compute = max(TOLERANCES[record["precision"]] for record in records)
    return max(by_compute, *(NUM_ULPS * ULPS.get(record["loss_dtype"] or "", 0.0) for record in records))


def compare_losses(ours: Sequence[float | None], theirs: Sequence[float | None], tolerance: float) -> LossComparison:
    """Compare step by step, as far as both go.

    Args:
        ours: One loss an optimizer step; None where the recorder saw none.
        theirs: The stock run's.
        tolerance: Relative distance allowed at the first step.
    """
    pairs = list(zip(ours, theirs, strict=False))
    known = [(step, a, b) for step, (a, b) in enumerate(pairs, 1) if a is not None and b is not None]
    if not known or len(known) < len(pairs):
        unseen = f"{len(pairs) - len(known)} of {len(pairs)} common steps have no loss"
        action = "Call engine.backward(loss) or loss.backward() on a scalar"
        return LossComparison(len(pairs), None, None, 0, tolerance, tolerance, None, f"unknown: {unseen}. {action}.")
    smallest = max(SMALLEST_SCALE * max(abs(b) for _, _, b in known), 1e-12)
    apart = [(step, abs(a - b), abs(a - b) / max(abs(b), smallest)) for step, a, b in known]
    step, _, relative = max(apart, key=lambda each: _order(each[2] / _allowed(tolerance, each[0])))
    # Written so that a loss that is not a number never agrees.
    agree = relative <= _allowed(tolerance, step)
    return LossComparison(
        num_compared=len(pairs),
        max_abs_diff=max((distance for _, distance, _ in apart), key=_order),
        max_rel_diff=max((distance for _, _, distance in apart), key=_order),
        worst_step=step,
        allowed=_allowed(tolerance, step),
        tolerance=tolerance,
        agree=agree,
        verdict=_say(agree, step, relative, _allowed(tolerance, step)),
    )


def _allowed(tolerance: float, step: int) -> float:
    return tolerance * max(1.0, step / NUM_EQUAL_STEPS)


def _order(value: float) -> float:
    """What is not a number counts as largest; `max` would pass over it."""
    return math.inf if math.isnan(value) else value


def _say(agree: bool, step: int, relative: float, allowed: float) -> str:
    apart = f"at step {step} they lie {relative:.1e} apart, relative, and {allowed:.1e} is allowed there"
    return f"agree: {apart}." if agree else f"DIFFER: {apart}. {POSSIBLE_REASONS}"
