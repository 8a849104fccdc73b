"""Chooses the units whose moments are written after all weights of a step.

Behind the clipping barrier the next forward waits for weights, not for moments, and backward leaves the worker idle. A
deferred unit's update is two passes: one that writes its weights (20 of 28 bytes a parameter), and after all weights
one that writes its moments (18 bytes, the gradient and the old moments being read twice). The bits are those of one
pass. The units that the next forward needs first are deferred: their gradients, which the second pass must precede,
are the last to come. How many is measured: as much as the worker can do in the time it had left in the last step.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Bytes read and written per parameter in bf16, by what a pass writes.
WHOLE_BYTES, WEIGHTS_BYTES, MOMENTS_BYTES = 28, 20, 18
# Of the time that was left, part stays free: the next step's may be shorter.
_SHARE = 0.8
# A forward that waits for less than this share of a step gains nothing.
_WAIT_SHARE = 0.01


class MomentDeferral:
    """Watches a host pipeline's steps.

    Args:
        elements: updated elements per unit.
        clock: seconds, monotonic.
    """

    def __init__(self, elements: Sequence[int], *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._elements = elements
        self._clock = clock
        self._bytes, self._busy_s = 0.0, 0.0
        self._waited_s = 0.0
        self._weights_done: float | None = None
        self._chosen_at: float | None = None
        self._deferred_bytes = 0.0

    def ran(self, elements: int, bytes_per_element: int, seconds: float) -> None:
        """A pass over `elements` parameters took `seconds` on the worker."""
        self._bytes += elements * bytes_per_element
        self._busy_s += seconds

    def waited(self, seconds: float) -> None:
        """A forward waited for weights."""
        self._waited_s += seconds

    def weights_done(self) -> None:
        """The worker has written every weight of a step."""
        self._weights_done = self._clock()

    def choose(self, order: Sequence[int]) -> frozenset[int]:
        """The units of the step that begins now whose moments are deferred.

        Args:
            order: units in the order in which their weights are needed.
        """
        now, last = self._clock(), self._chosen_at
        chosen: set[int] = set()
        if last is not None and self._weights_done is not None and self._busy_s > 0.0:
            limit = _SHARE * (now - self._weights_done) * self._bytes / self._busy_s
            if self._waited_s <= _WAIT_SHARE * (now - last):
                limit = min(limit, self._deferred_bytes)
            left = limit
            for unit in order:
                cost = MOMENTS_BYTES * self._elements[unit]
                if cost <= left:
                    left -= cost
                    chosen.add(unit)
            self._deferred_bytes = limit - left
        self._chosen_at, self._weights_done = now, None
        self._bytes = self._busy_s = self._waited_s = 0.0
        return frozenset(chosen)
