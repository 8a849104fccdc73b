"""The search for a system's best batch, on made-up rates."""

from __future__ import annotations

from pathlib import Path

import pytest

from comparisons.runner import Outcome, Request
from comparisons.search import LARGEST_BATCH, best_batch


def search(rates: dict[int, float]) -> list[tuple[int, bool]]:
    """Batches tried and whether they ran; a batch without a rate does not fit."""
    tried = []

    def attempt(batch: int) -> Outcome:
        assert batch not in tried, "measured twice"
        tried.append(batch)
        fits = batch in rates
        record = {"status": "ok", "tokens_per_s": rates[batch]} if fits else {"status": "out of memory"}
        return Outcome(Request("x", Path("m.json"), batch), {**record, "batch": batch})

    return [(outcome.record["batch"], outcome.ok) for outcome in best_batch(attempt)]


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        # Rises to what fits: between the best and the one that does not fit, one more.
        ({1: 10, 2: 18, 4: 30, 3: 25, 6: 33}, [(1, True), (2, True), (3, True), (4, True), (6, True), (8, False)]),
        # Falls after 2.
        ({1: 10, 2: 18, 4: 12, 3: 19}, [(1, True), (2, True), (3, True), (4, True)]),
        # Nothing fits.
        ({}, [(1, False)]),
    ],
)
def test_batches_tried(rates, expected):
    assert search(rates) == expected


def test_it_ends_where_everything_fits():
    tried = search({batch: float(batch) for batch in range(1, 4 * LARGEST_BATCH)})
    assert max(batch for batch, _ in tried) <= LARGEST_BATCH * 3 // 2
