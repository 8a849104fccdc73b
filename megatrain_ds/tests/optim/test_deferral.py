"""How many units' moments are deferred: as many as the worker had time for, where a forward waited."""

from __future__ import annotations

import pytest

from megatrain_ds.optim.deferral import MOMENTS_BYTES, WEIGHTS_BYTES, WHOLE_BYTES, MomentDeferral

# One second of the worker updates this many elements in one pass.
RATE = 1000


class Steps:
    """Steps of four units in made-up time."""

    def __init__(self, elements: tuple[int, ...] = (500, 100, 100, 100)) -> None:
        self.elements, self.now = elements, 0.0
        self.deferral = MomentDeferral(elements, clock=lambda: self.now)

    def step(self, *, left_s: float, waited_s: float) -> frozenset[int]:
        """One step: choose, update everything, then `left_s` until the next one."""
        chosen = self.deferral.choose(range(len(self.elements)))
        passes = [(n, WEIGHTS_BYTES if unit in chosen else WHOLE_BYTES) for unit, n in enumerate(self.elements)]
        for elements, size in passes:
            seconds = elements * size / WHOLE_BYTES / RATE
            self.now += seconds
            self.deferral.ran(elements, size, seconds)
        self.deferral.waited(waited_s)
        self.deferral.weights_done()
        self.now += left_s
        return chosen


def test_the_first_step_defers_nothing():
    assert Steps().step(left_s=10.0, waited_s=1.0) == frozenset()


def test_what_fits_into_the_time_that_was_left_is_deferred_needed_first():
    steps = Steps()
    steps.step(left_s=10.0, waited_s=0.5)
    assert steps.step(left_s=10.0, waited_s=0.5) == {0, 1, 2, 3}
    # 0.8 of 0.2 s at 28 bytes x 1000 elements: 248 elements' moments; the first unit has 500.
    steps.step(left_s=0.2, waited_s=0.5)
    assert steps.step(left_s=0.2, waited_s=0.5) == {1, 2}
    assert pytest.approx(248.9, abs=0.1) == 0.2 * 0.8 * RATE * WHOLE_BYTES / MOMENTS_BYTES


def test_nothing_is_deferred_where_no_forward_waits():
    steps = Steps()
    for _ in range(4):
        assert steps.step(left_s=10.0, waited_s=0.0) == frozenset()


def test_what_ended_the_waiting_stays():
    steps = Steps()
    steps.step(left_s=10.0, waited_s=0.5)
    first = steps.step(left_s=10.0, waited_s=0.0)
    assert first == {0, 1, 2, 3}
    assert steps.step(left_s=10.0, waited_s=0.0) == first
    # Less time is left: less is deferred, waiting or not.
    steps.step(left_s=0.2, waited_s=0.0)
    assert len(steps.step(left_s=0.2, waited_s=0.0)) < 4


def test_a_worker_that_is_not_done_defers_nothing():
    steps = Steps()
    steps.step(left_s=10.0, waited_s=0.5)
    steps.deferral.choose(range(4))
    steps.deferral.ran(100, WHOLE_BYTES, 0.1)
    steps.deferral.waited(1.0)
    steps.now += 5.0
    assert steps.deferral.choose(range(4)) == frozenset()
