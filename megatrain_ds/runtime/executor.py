"""Runs the life of every unit's forward and backward: weights in, gradients out, buffers back.

Knows the streamer, the drain and the schedule; does not know the modules whose forward it serves.
"""

from __future__ import annotations

import contextlib
import enum
import warnings
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from megatrain_ds.memory.host_store import HostUnit
    from megatrain_ds.memory.streams import Streams
    from megatrain_ds.runtime.gradients import GradientBuffer, GradientDrain
    from megatrain_ds.runtime.schedule import Schedule
    from megatrain_ds.runtime.slot import Slot
    from megatrain_ds.runtime.streamer import WeightStreamer
    from megatrain_ds.telemetry.trace import NullTracer


class Phase(enum.Enum):
    """When we are. IDLE -> FORWARD -> IDLE; IDLE -> BACKWARD -> IDLE; any -> IDLE through `reset_iteration`."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"


class UnitCall:
    """One run of a unit's forward whose backward is to come.

    Attributes:
        unit: unit index.
        slot: the slot bound for its backward, from its first unpack to its last backward node.
        buffer: the device buffer its gradients gather in.
        arrived: parameter indices whose gradients are in the buffer.
        mark: start of its backward in a trace.
    """

    __slots__ = ("__weakref__", "arrived", "buffer", "mark", "slot", "unit")

    def __init__(self, unit: int) -> None:
        self.unit = unit
        self.slot: Slot | None = None
        self.buffer: GradientBuffer | None = None
        self.arrived: list[int] = []
        self.mark: Any = None


class Executor:
    """Serves unit forwards and backwards.

    Args:
        host_units: host memory per unit.
        names: name per unit.
        streamer: fetches weights.
        drain: takes gradients.
        schedule: says which units come next.
        streams: the flows.
        tracer: receives compute spans.
        on_unit_done: called with a unit index when a backward call of it ended and its gradients are on their way.
    """

    def __init__(
        self,
        *,
        host_units: Sequence[HostUnit],
        names: Sequence[str],
        streamer: WeightStreamer,
        drain: GradientDrain,
        schedule: Schedule,
        streams: Streams,
        tracer: NullTracer,
        on_unit_done: Callable[[int], None],
    ) -> None:
        self._host_units, self._names = host_units, names
        self._streamer, self._drain, self._schedule = streamer, drain, schedule
        self._streams, self._tracer = streams, tracer
        self._on_unit_done = on_unit_done
        self._open: list[UnitCall] = []
        self.phase = Phase.IDLE
        self._callback_queued = False

    @property
    def schedule(self) -> Schedule:
        """The recorded order of units."""
        return self._schedule

    @property
    def device(self) -> torch.device:
        """Where units compute."""
        return self._streams.device

    def device_in_use(self) -> torch.device | None:
        """Where the forward or backward under way computes; None where none is."""
        return None if self.phase is Phase.IDLE else self.device

    @property
    def backward_position(self) -> str:
        """Where a backward pass is, for messages: the units under way, or the one whose turn is next."""
        if self._open:
            return "in " + ", ".join(self._names[call.unit] for call in self._open)
        return " ".join(f"at the output of {self._names[unit]}" for unit in self._schedule.next_backward(1))

    def begin_forward(self) -> None:
        """A forward of the whole model begins; recovers first if the last backward never ended."""
        if self.phase is Phase.BACKWARD or self._open:
            self.reset_iteration("the last backward pass did not end")
        self.phase = Phase.FORWARD
        # The last step's root gradients must not stand beside this step's activations.
        self._drain.reap()
        self._schedule.begin_forward()
        self._streamer.prefetch(self._schedule.first_forward(self._streamer.depth))

    def end_forward(self) -> None:
        """The forward of the whole model is over."""
        self._drain.reap()
        if self.phase is Phase.FORWARD:
            self.phase = Phase.IDLE

    @contextlib.contextmanager
    def forward_weights(self, unit: int, call: UnitCall | None) -> Iterator[list[torch.Tensor]]:
        """The weights of `unit` on the device, for the length of one forward; the next units are fetched behind it."""
        if self.phase is not Phase.FORWARD and unit in self._schedule.under_way:
            # A part of the model is called by itself, again: that is a forward of its own.
            self._schedule.begin_forward()
        self._schedule.observe_forward(unit, call)
        depth = self._streamer.depth
        slot = self._streamer.acquire(unit, keep=self._schedule.next_forward(depth))
        self._streamer.prefetch(self._schedule.next_forward(depth))
        start = self._streams.mark() if self._tracer.active else None
        try:
            with torch.profiler.record_function(f"megatrain::forward ({self._names[unit]})"):
                yield slot.views(unit, self._host_units[unit].layout)
        finally:
            self._streamer.release(slot)
            if start is not None:
                self._tracer.device_span("compute", f"forward {self._names[unit]}", start, self._streams.mark())
        self._streamer.prefetch(self._schedule.next_forward(depth))

    def enter_backward(self) -> None:
        """A backward pass runs: its end will be noticed; idempotent within one.

        The end is that of the pass in which this is first called. A reentrant checkpoint runs a pass within a pass, at
        whose end units of the outer one may still be bound, so the outer one calls this at its start.
        """
        if not self._callback_queued:
            self._callback_queued = True
            self.phase = Phase.BACKWARD
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)  # type: ignore[attr-defined]

    def backward_weights(self, call: UnitCall) -> list[torch.Tensor]:
        """The weights of a call's unit, bound until `finish`."""
        self.enter_backward()
        if call.slot is None:
            self._schedule.observe_backward(call)
            ahead = self._schedule.next_backward(self._streamer.depth)
            call.slot = self._streamer.acquire(call.unit, keep=ahead)
            call.mark = self._streams.mark() if self._tracer.active else None
            self._open.append(call)
            self._streamer.prefetch(ahead)
        return call.slot.views(call.unit, self._host_units[call.unit].layout)

    def gradient(self, call: UnitCall, index: int, grad: torch.Tensor) -> None:
        """The gradient of parameter `index` of a call's unit is ready on the compute flow."""
        self.enter_backward()
        if call.buffer is None:
            call.buffer = self._drain.buffers.take()
            if call not in self._open:
                self._open.append(call)
        self._drain.put(call.buffer, call.unit, index, grad)
        call.arrived.append(index)

    def parameter_gradient(self, unit: int, index: int, grad: torch.Tensor) -> None:
        """The gradient of a streamed parameter that was used outside its block's forward; on any device."""
        self.enter_backward()
        self._drain.put_root(unit, index, grad.to(self.device))

    def root_gradient(self, unit: int, index: int, grad: torch.Tensor) -> None:
        """The gradient of a root parameter is ready on the compute flow."""
        self.enter_backward()
        self._drain.put_root(unit, index, grad)

    def finish(self, call: UnitCall) -> None:
        """The last backward node of a call has run; idempotent."""
        if call in self._open:
            self._open.remove(call)
            if call.mark is not None and self._tracer.active:
                self._tracer.device_span(
                    "compute", f"backward {self._names[call.unit]}", call.mark, self._streams.mark()
                )
            if call.buffer is not None:
                buffer, arrived = call.buffer, call.arrived
                call.buffer, call.arrived = None, []
                self._drain.flush(buffer, call.unit, arrived)
            if call.slot is not None:
                slot, call.slot = call.slot, None
                self._streamer.release(slot)
                self._streamer.prefetch(self._schedule.next_backward(self._streamer.depth + 1))
            self._on_unit_done(call.unit)

    def end_backward(self) -> None:
        """A backward pass is over: finish the calls whose boundary autograd skipped; idempotent."""
        self._callback_queued = False
        for call in list(self._open):
            self.finish(call)
        if self.phase is Phase.BACKWARD:
            self.phase = Phase.IDLE

    def reset_iteration(self, reason: str) -> None:
        """Recover after an exception: every slot and buffer is free again.

        Gradients that arrived since the last step are lost, those of earlier micro-batches included; a warning says so.
        """
        lost = any(any(host.received) for host in self._host_units) or bool(self._open)
        for call in self._open:
            call.slot, call.buffer, call.arrived = None, None, []
        self._open.clear()
        self._callback_queued = False
        self._streamer.reset()
        self._drain.reset()
        self.phase = Phase.IDLE
        if lost:
            warnings.warn(
                f"megatrain: {reason}; the gradients gathered since the last optimizer step are dropped. "
                "Run the whole step again (all of its micro-batches).",
                RuntimeWarning,
                stacklevel=2,
            )
