"""Carries gradients from the device to the host.

Knows device gradient buffers, the d2h flow and the host blocks. A gradient is copied into a flat device buffer on the
compute flow, so its own memory is free again at once, and one large copy takes the buffer to the host. A gradient
that did not come is simply not part of the copy: nothing shifts, and nothing of an earlier step is left to be read.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

from megatrain_ds.memory.layout import ELEMENT_ALIGNMENT, align
from megatrain_ds.memory.streams import D2H
from megatrain_ds.optim.pipeline import GradientPiece
from megatrain_ds.runtime.staging import StagingRing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from megatrain_ds.memory.host_store import HostStore, HostUnit
    from megatrain_ds.memory.streams import Event, Streams
    from megatrain_ds.optim.pipeline import HostPipeline
    from megatrain_ds.runtime.gradient_buffers import GradientBuffer, GradientBuffers
    from megatrain_ds.telemetry.trace import NullTracer


class GradientDrain:
    """Takes gradients as autograd produces them.

    Args:
        store: host memory of all units.
        names: name per unit.
        buffers: device gradient buffers.
        staging_bytes: size of a staging block.
        measure_norm: keep each gradient's norm for clipping and the finite check.
        streams: the flows.
        pipeline: accumulates on the host.
        tracer: receives the named waits.
        pin: page-lock staging memory.
    """

    def __init__(
        self,
        *,
        store: HostStore,
        names: Sequence[str],
        buffers: GradientBuffers,
        staging_bytes: int,
        measure_norm: bool,
        streams: Streams,
        pipeline: HostPipeline,
        tracer: NullTracer,
        pin: bool,
    ) -> None:
        self._store, self._names, self._streams, self._pipeline = store, names, streams, pipeline
        self._staging_bytes, self._pin, self._tracer = staging_bytes, pin, tracer
        self.buffers = buffers
        self._staging: StagingRing | None = None
        if any(unit.accumulator is not None for unit in store.units):
            self._make_staging()
        self._arrivals: list[list[Event]] = [[] for _ in store.units]
        self._in_flight: list[tuple[torch.Tensor, Event]] = []
        self._first_norm = [0]
        for unit in store.units:
            self._first_norm.append(self._first_norm[-1] + len(unit.layout.placements))
        self._norms = torch.zeros(
            self._first_norm[-1] if measure_norm else 0, dtype=torch.float64, device=streams.device
        )

    @property
    def staging(self) -> StagingRing | None:
        """The staging ring, if gradients are accumulated."""
        return self._staging

    def put(self, buffer: GradientBuffer, unit: int, index: int, grad: torch.Tensor) -> None:
        """Copy the gradient of parameter `index` into the buffer, on the compute flow."""
        target = buffer.views(unit, self._store.units[unit].layout)[index]
        assert target is not None
        target.copy_(grad)
        self._measure(unit, index, grad)

    def flush(self, buffer: GradientBuffer, unit: int, indices: Sequence[int]) -> None:
        """Send the gradients of parameters `indices` to the host; the buffer is free again when they have left."""
        host = self._store.units[unit]
        after = [self._streams.record_compute()]
        label = f"gradients {self._names[unit]}"
        if self._goes_direct(unit, indices):
            assert host.gradient_block is not None
            spans = list(_byte_spans(host, indices))
            pairs = [(host.gradient_block[a:b], buffer.block[a:b]) for a, b in spans]
            buffer.left = self._streams.copy(D2H, pairs, after=after, label=label)
            self._arrivals[unit].append(buffer.left)
        else:
            assert self._staging is not None
            slot, staged = self._take_staging()
            pairs = [(staged[a:b], buffer.block[a:b]) for a, b in _byte_spans(host, indices)]
            buffer.left = self._streams.copy(D2H, pairs, after=after, label=label)
            pieces = [self._piece(host, index, staged) for index in indices]
            self._staging.give_back(slot, self._pipeline.accumulate(unit, pieces, buffer.left))
        self._mark_received(host, indices)
        buffer.taken = False

    def put_root(self, unit: int, index: int, grad: torch.Tensor) -> None:
        """Send the gradient of a root parameter to the host straight from autograd's tensor."""
        host = self._store.units[unit]
        grad = grad.to_dense() if grad.is_sparse else grad.contiguous()
        self._measure(unit, index, grad)
        self.reap()
        after = [self._streams.record_compute()]
        label = f"gradient {host.layout.placements[index].spec.name}"
        if self._goes_direct(unit, [index]):
            event = self._streams.copy(D2H, [(host.parameter_view("gradient", index), grad)], after=after, label=label)
            self._arrivals[unit].append(event)
            self._in_flight.append((grad, event))
        else:
            self._put_root_in_pieces(unit, index, grad, after, label)
        self._mark_received(host, [index])

    def reap(self, *, wait: bool = False) -> None:
        """Let go of gradients whose copies have ended; `wait` for those that have not."""
        # A copy reads the gradient until its event: the pair is dropped only then.
        if wait:
            for _, event in self._in_flight:
                event.synchronize()
        self._in_flight = [(grad, event) for grad, event in self._in_flight if not event.query()]

    def arrivals(self, unit: int) -> list[Event]:
        """Events after which the directly sent gradients of `unit` are on the host; each is handed out once."""
        events, self._arrivals[unit] = self._arrivals[unit], []
        return events

    def peek_arrivals(self, unit: int) -> list[Event]:
        """As `arrivals`, without taking them."""
        return list(self._arrivals[unit])

    def norms(self) -> list[list[float]]:
        """The 2-norm of each gradient of this step, per unit and parameter; 0 where there is none.

        Gradients that went direct were measured on the device when they came (this is the step's one device
        synchronisation); accumulated ones are measured on the host now.
        """
        measured = self._norms.tolist()
        result = []
        for unit, host in enumerate(self._store.units):
            first = self._first_norm[unit]
            if host.accumulator is not None and any(host.received):
                self._pipeline.wait_gradient(unit)
                result.append([self._host_norm(host, index) for index in range(len(host.received))])
            else:
                result.append([measured[first + i] if got else 0.0 for i, got in enumerate(host.received)])
        return result

    def remeasure(self, unit: int, index: int) -> None:
        """The host gradient of a parameter was replaced by other hands: measure it again."""
        host = self._store.units[unit]
        if host.accumulator is None:
            self._measure(unit, index, host.parameter_view("gradient", index).to(self._streams.device))

    def reset(self) -> None:
        """Drop this step's gradients and every buffer's contents (after a failure)."""
        for unit, host in enumerate(self._store.units):
            self._arrivals[unit] = []
            host.clear_gradient()
        self.buffers.release_all()

    def close(self) -> None:
        """Free pinned memory; idempotent."""
        self.reap(wait=True)
        if self._staging is not None:
            self._staging.arena.close()

    def _goes_direct(self, unit: int, indices: Sequence[int]) -> bool:
        host = self._store.units[unit]
        if host.accumulator is None and any(host.received[index] for index in indices):
            self._start_accumulating(unit)
        if host.accumulator is not None:
            return False
        # The update of the last step may still read this unit's gradient block.
        self._pipeline.wait(unit)
        return True

    def _start_accumulating(self, unit: int) -> None:
        host = self._store.units[unit]
        if self._staging is None:
            warnings.warn(
                f"megatrain: a second gradient of {self._names[unit]} arrived before step(), though "
                "gradient_accumulation_steps is 1; accumulators are allocated for the units this happens to. Set "
                "gradient_accumulation_steps to the true count to have them planned.",
                RuntimeWarning,
                stacklevel=2,
            )
            self._make_staging()
        arrived = [index for index, got in enumerate(host.received) if got]
        direct = {index: host.parameter_view("gradient", index).reshape(-1) for index in arrived}
        events = self.arrivals(unit)
        self._store.add_accumulator(unit)
        for event in events:
            event.synchronize()
        places = host.layout.placements
        self._pipeline.accumulate(
            unit, [GradientPiece(places[i].run, places[i].offset, direct[i], overwrite=True) for i in arrived], None
        )

    def _make_staging(self) -> None:
        self._staging = StagingRing(self._staging_bytes, pin=self._pin, pipeline=self._pipeline)

    def _take_staging(self) -> tuple[int, torch.Tensor]:
        assert self._staging is not None
        with self._tracer.host_span("wait", "a staging block"):
            return self._staging.take()

    def _put_root_in_pieces(self, unit: int, index: int, grad: torch.Tensor, after: list[Event], label: str) -> None:
        assert self._staging is not None
        host = self._store.units[unit]
        placement = host.layout.placements[index]
        flat = grad.reshape(-1)
        elements = self._staging.block_bytes // flat.element_size()
        for start in range(0, flat.numel(), elements):
            part = flat[start : start + elements]
            slot, staged = self._take_staging()
            target = staged[: part.numel() * part.element_size()].view(part.dtype)
            event = self._streams.copy(D2H, [(target, part)], after=after, label=label)
            piece = GradientPiece(placement.run, placement.offset + start, target, overwrite=not host.received[index])
            self._staging.give_back(slot, self._pipeline.accumulate(unit, [piece], event))
            self._in_flight.append((grad, event))

    @staticmethod
    def _piece(host: HostUnit, index: int, staged: torch.Tensor) -> GradientPiece:
        placement = host.layout.placements[index]
        view = staged[placement.byte_offset : placement.byte_offset + placement.num_bytes].view(placement.spec.dtype)
        return GradientPiece(placement.run, placement.offset, view, overwrite=not host.received[index])

    @staticmethod
    def _mark_received(host: HostUnit, indices: Sequence[int]) -> None:
        for index in indices:
            host.received[index] = True

    def _measure(self, unit: int, index: int, grad: torch.Tensor) -> None:
        if self._norms.numel() and self._store.units[unit].accumulator is None:
            # fp64, as ZeRO-3 measures: neither the clip factor nor the finite check depends on a 16-bit sum.
            norm = self._norms[self._first_norm[unit] + index]
            torch.linalg.vector_norm(grad, dtype=torch.float64, out=norm)

    def _host_norm(self, host: HostUnit, index: int) -> float:
        if not host.received[index]:
            return 0.0
        return self._pipeline.kernel.sum_of_squares(host.parameter_view("gradient", index).reshape(-1)) ** 0.5


def _byte_spans(host: HostUnit, indices: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Byte ranges of the gradient block that hold the parameters, neighbours merged."""
    placements = sorted((host.layout.placements[index] for index in indices), key=lambda place: place.byte_offset)
    start = stop = None
    for place in placements:
        size = align(place.spec.numel, ELEMENT_ALIGNMENT) * place.spec.dtype.itemsize
        if start is None or place.byte_offset != stop:
            if start is not None:
                yield start, stop  # type: ignore[misc]
            start = place.byte_offset
        stop = place.byte_offset + size
    if start is not None:
        yield start, stop  # type: ignore[misc]
