"""In which order units run, as recorded, and so which come next. Pure: knows unit indices and opaque calls only.

The forward order is the order of the last forward, with multiplicity: a unit may run twice. The backward order is the
reverse of the calls that still wait for one. A wrong guess costs a fetch that nobody uses, never a result.
"""

from __future__ import annotations

import weakref
from typing import Any


class Schedule:
    """Records forward and backward calls and names the next units."""

    def __init__(self) -> None:
        self._previous: list[int] = []
        self._current: list[int] = []
        self._cursor = 0
        # Calls whose backward has not run; weak, since a graph that the caller drops never runs.
        self._waiting: list[weakref.ref[Any]] = []
        self._waiting_units: list[int] = []

    @property
    def order(self) -> list[int]:
        """Unit indices of the last complete forward, or of the one under way if it is the first."""
        return self._previous or self._current

    @property
    def under_way(self) -> list[int]:
        """Unit indices that ran since the last `begin_forward`."""
        return self._current

    def begin_forward(self) -> None:
        """A forward of the whole model begins."""
        if self._current:
            self._previous = self._current
        self._current, self._cursor = [], 0
        alive = [(ref, unit) for ref, unit in zip(self._waiting, self._waiting_units, strict=True) if ref() is not None]
        self._waiting = [ref for ref, _ in alive]
        self._waiting_units = [unit for _, unit in alive]

    def observe_forward(self, unit: int, call: Any | None) -> None:
        """`unit` runs its forward now; `call` (weakly kept) will run backward, or is None."""
        self._current.append(unit)
        if call is not None:
            self._waiting.append(weakref.ref(call))
            self._waiting_units.append(unit)
        try:
            self._cursor = self._previous.index(unit, self._cursor) + 1
        except ValueError:
            # Not where the record says: look from the start, else keep the place.
            if unit in self._previous:
                self._cursor = self._previous.index(unit) + 1

    def observe_backward(self, call: Any) -> None:
        """`call` starts its backward."""
        for position in range(len(self._waiting) - 1, -1, -1):
            if self._waiting[position]() is call:
                del self._waiting[position], self._waiting_units[position]
                return

    def next_forward(self, count: int) -> list[int]:
        """The next `count` units if a forward is under way; at its end, the first units of the coming backward."""
        ahead = self._previous[self._cursor : self._cursor + count]
        if len(ahead) < count and self._waiting:
            ahead = ahead + self.next_backward(count - len(ahead))
        return ahead

    def next_backward(self, count: int) -> list[int]:
        """The units of the last `count` calls that wait for their backward; then the first of the coming forward."""
        ahead = self._waiting_units[: -count - 1 : -1]
        return ahead + (self._current or self._previous)[: count - len(ahead)]

    def first_forward(self, count: int) -> list[int]:
        """The first `count` units of the coming forward."""
        return self.order[:count]

    def pending(self, unit: int) -> bool:
        """Whether a live call of `unit` still waits for its backward."""
        return any(
            index == unit and ref() is not None for ref, index in zip(self._waiting, self._waiting_units, strict=True)
        )
