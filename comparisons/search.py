"""Finds the batch at which a system is fastest."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from comparisons.runner import Outcome

LARGEST_BATCH = 1024


def best_batch(attempt: Callable[[int], Outcome], first: int = 1) -> list[Outcome]:
    """Double the batch until it fails or tokens/s fall, then try between the best and its neighbours.

    Args:
        attempt: measures one batch.
        first: the batch to begin with.

    Returns:
        Every outcome, the failures included; the best is the one with the most tokens/s.
    """
    outcomes: dict[int, Outcome] = {}

    def rate(batch: int) -> float:
        if batch not in outcomes:
            outcomes[batch] = attempt(batch)
        return outcomes[batch].record["tokens_per_s"] if outcomes[batch].ok else 0.0

    batch = first
    while batch <= LARGEST_BATCH and rate(batch) > 0.0:
        if batch > first and rate(batch) < rate(batch // 2):
            break
        batch *= 2
    best = max(outcomes, key=rate)
    for neighbour in (best * 3 // 4, best * 3 // 2):
        if neighbour not in (0, best):
            rate(neighbour)
    return [outcomes[size] for size in sorted(outcomes)]
