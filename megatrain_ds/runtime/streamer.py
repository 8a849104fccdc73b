"""Brings a unit's weights to a slot: issue, wait, release.

Knows the host copies, the slots and the h2d flow; does not know what runs on the weights. A fetch waits on the host
for the update of its own unit alone, a prefetch never waits: it stops at the first unit that is not updated yet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from megatrain_ds.memory.streams import H2D
from megatrain_ds.runtime.slot import SlotPool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatrain_ds.memory.host_store import HostUnit
    from megatrain_ds.memory.streams import Streams
    from megatrain_ds.runtime.slot import Slot
    from megatrain_ds.telemetry.trace import NullTracer


class Publication(Protocol):
    """Whoever updates the host copies."""

    def version(self, unit: int) -> int:
        """Counts the updates of a unit; a slot with another version is stale."""
        ...

    def is_current(self, unit: int) -> bool:
        """Whether no update of the weights of `unit` is under way."""
        ...

    def wait_weights(self, unit: int) -> None:
        """Block until no update of the weights of `unit` is under way; raises what a worker raised."""


class WeightStreamer:
    """Fetches weights into slots.

    Args:
        host_units: host memory per unit.
        names: name per unit, for labels.
        pool: the weight slots.
        streams: the flows.
        publication: says whether a host copy is current.
        tracer: receives the named waits.
    """

    def __init__(
        self,
        *,
        host_units: Sequence[HostUnit],
        names: Sequence[str],
        pool: SlotPool,
        streams: Streams,
        publication: Publication,
        tracer: NullTracer,
    ) -> None:
        self._host_units = host_units
        self._names = names
        self._pool = pool
        self._streams = streams
        self._publication = publication
        self._tracer = tracer

    @property
    def depth(self) -> int:
        """How many units ahead a prefetch reaches."""
        return len(self._pool.slots) - 1

    def acquire(self, unit: int, keep: Sequence[int]) -> Slot:
        """Bind the slot that holds `unit`, fetching it if needed; compute waits for the copy.

        Args:
            unit: the unit about to run.
            keep: units whose prefetched copies should survive.
        """
        slot = self._pool.holding(unit, self._publication.version(unit))
        if slot is None:
            if not self._publication.is_current(unit):
                with self._tracer.host_span("wait", f"update of {self._names[unit]}"):
                    self._publication.wait_weights(unit)
            slot = self._pool.free_or_grow(self._at_version(keep))
            self._fill(slot, unit)
        slot.bind()
        assert slot.ready is not None
        self._streams.compute_wait(slot.ready)
        return slot

    def release(self, slot: Slot) -> None:
        """The caller enqueued its last use of the slot on the compute flow."""
        slot.unbind(self._streams.record_compute())

    def prefetch(self, upcoming: Sequence[int]) -> None:
        """Start fetching the coming units, in order, into slots nobody uses."""
        for unit in upcoming:
            if self._pool.holding(unit, self._publication.version(unit)) is not None:
                continue
            if not self._publication.is_current(unit):
                return
            slot = self._pool.free(keep=self._at_version(upcoming))
            if slot is None:
                return
            self._fill(slot, unit)

    def reset(self) -> None:
        """Forget every slot (after a failure)."""
        self._pool.drop_all()

    def _at_version(self, units: Sequence[int]) -> list[tuple[int, int]]:
        # A stale copy of a unit is worth nothing: its slot must not be kept for it.
        return [(unit, self._publication.version(unit)) for unit in units]

    def _fill(self, slot: Slot, unit: int) -> None:
        host = self._host_units[unit]
        size = host.layout.compute_bytes
        after = [event for event in (slot.freed, slot.ready) if event is not None]
        label = f"weights {self._names[unit]}"
        ready = self._streams.copy(H2D, [(slot.block[:size], host.compute_block)], after=after, label=label)
        slot.fill(unit, self._publication.version(unit), ready)
