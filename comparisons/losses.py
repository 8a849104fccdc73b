"""Whether the losses of two systems agree: without that a speed ratio says nothing.

Systems that keep fp32 masters follow the same trajectory until rounding parts them; a system with bf16 masters leaves
it within a few steps. The first steps are compared with a reference that keeps fp32 masters.
"""

from __future__ import annotations

import math
from typing import Any

NUM_COMPARED = 20
# bf16 rounds every activation to 8 bits and systems order the same sums differently. Over 7 steps of a 12-layer cut of
# a 14B model, two systems with fp32 masters were measured 4.0e-5 apart (one H200).
RELATIVE_TOLERANCE = 2.0**-11
# Systems whose masters are bf16: their losses leave the others' within a few steps, which is no fault of the harness.
BF16_MASTERS = frozenset({"reference"})
REFERENCE_ORDER = ("plain", "zero3", "zero3_default", "zero3_optimizer", "fsdp2")


def choose_reference(records: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The record to compare with: plain PyTorch if it ran, else the first system with fp32 masters that did."""
    done = [record for record in records if record.get("status") == "ok"]
    for system in REFERENCE_ORDER:
        for record in done:
            if record["system"] == system:
                return record
    return None


def check(record: dict[str, Any], reference: dict[str, Any] | None) -> str:
    """Compare a record's losses with the reference's.

    Returns:
        "" when they agree, else what is wrong, for the report's row.
    """
    if record.get("status") != "ok":
        return ""
    if record["system"] == "resident":
        return "no optimizer: first loss agrees" if _first_agrees(record, reference) else "first loss differs: void"
    if reference is None:
        return "no reference ran: unchecked"
    ours, theirs = record["losses"][:NUM_COMPARED], reference["losses"][:NUM_COMPARED]
    if not all(math.isfinite(loss) for loss in ours):
        return "losses are not finite: void"
    worst = max((abs(a - b) / max(abs(b), 1e-12) for a, b in zip(ours, theirs, strict=False)), default=0.0)
    if worst > RELATIVE_TOLERANCE:
        cause = " (bf16 masters drift)" if record["system"] in BF16_MASTERS else ""
        return f"differ from {reference['label']}'s by {worst:.1e}, allowed {RELATIVE_TOLERANCE:.1e}{cause}: void"
    return ""


def describe(record: dict[str, Any], reference: dict[str, Any] | None) -> str:
    """What a table says of a record's losses: how many agree, or what is wrong."""
    problem = check(record, reference)
    if problem or reference is None:
        return problem
    if record is reference:
        return "the reference"
    return f"{min(NUM_COMPARED, len(record['losses']), len(reference['losses']))} agree"


def _first_agrees(record: dict[str, Any], reference: dict[str, Any] | None) -> bool:
    if reference is None:
        return True
    first = reference["losses"][0]
    return abs(record["losses"][0] - first) <= RELATIVE_TOLERANCE * abs(first)
