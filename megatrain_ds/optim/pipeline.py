"""Host work on units, in order, on a worker: accumulation of gradients and updates of weights.

[Note: When a step may start]
`step()` decides, then updates run behind whatever comes next. With clipping or the finite check on, every gradient
is needed first, so updates begin when backward has ended. With both off a unit's update is queued as soon as its last
gradient has been issued. Either way the version of a unit is raised when its update is *queued*: from then on no slot
that holds the old weights counts as current, and a fetch waits for that unit's ticket alone. The moments of some units
are written after all weights (see `deferral`): until then their gradients must stay, and so must whoever reads them.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from megatrain_ds.memory.layout import ELEMENT_ALIGNMENT, align
from megatrain_ds.optim.adam import UpdatePart
from megatrain_ds.optim.deferral import MOMENTS_BYTES, WEIGHTS_BYTES, WHOLE_BYTES
from megatrain_ds.optim.worker import Worker

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from megatrain_ds.memory.host_store import HostUnit
    from megatrain_ds.memory.streams import Event
    from megatrain_ds.optim.deferral import MomentDeferral
    from megatrain_ds.optim.kernel import AdamStep, UpdateKernel
    from megatrain_ds.telemetry.trace import NullTracer


_PASS_BYTES = {
    UpdatePart.ALL: WHOLE_BYTES,
    UpdatePart.WEIGHTS: WEIGHTS_BYTES,
    UpdatePart.MOMENTS: MOMENTS_BYTES,
}


@dataclass(frozen=True)
class GradientPiece:
    """A stretch of one parameter's gradient that arrived in a staging block.

    Attributes:
        run: run index in the unit's layout.
        offset: first element within the run.
        gradient: the arrived elements, flat, on the host.
        overwrite: the first contribution of the step (the accumulator holds nothing yet).
    """

    run: int
    offset: int
    gradient: torch.Tensor
    overwrite: bool


class HostPipeline:
    """Runs accumulations and updates of units on one worker.

    Args:
        host_units: host memory per unit.
        names: name per unit, for labels and errors.
        kernel: does the arithmetic.
        tracer: receives a span per update.
        deferral: watches what updates cost and who waits for them.
        synchronous: wait for every task at once (debug mode).
    """

    def __init__(
        self,
        host_units: Sequence[HostUnit],
        *,
        names: Sequence[str],
        kernel: UpdateKernel,
        tracer: NullTracer,
        deferral: MomentDeferral,
        synchronous: bool,
    ) -> None:
        self.kernel = kernel
        self.deferral = deferral
        self._host_units = host_units
        self._names = names
        self._tracer = tracer
        self._synchronous = synchronous
        self._worker = Worker("megatrain-host")
        self._versions = [0] * len(host_units)
        self._weight_tickets = [0] * len(host_units)
        self._update_tickets = [0] * len(host_units)
        self._deferred: list[tuple[int, list[_UpdateRange], Mapping[int, AdamStep]]] = []
        self._gradient_tickets = [0] * len(host_units)

    def version(self, unit: int) -> int:
        """Counts what changed the compute copy of `unit`."""
        return self._versions[unit]

    def bump(self, unit: int) -> None:
        """The compute copy of `unit` was changed by other hands: slots that hold it are stale."""
        self._versions[unit] += 1

    def is_current(self, unit: int) -> bool:
        """Whether no update of the weights of `unit` is queued or running."""
        return self._worker.done(self._weight_tickets[unit])

    def wait_weights(self, unit: int) -> None:
        """Block until no update of the weights of `unit` is queued or running; raises what the worker raised."""
        start = time.perf_counter()
        self._worker.wait(self._weight_tickets[unit])
        self.deferral.waited(time.perf_counter() - start)

    def wait(self, unit: int) -> None:
        """Block until no update of `unit`, moments included, is queued or running; raises what the worker raised."""
        self._wait(self._update_tickets[unit], "the last update of ", unit)

    def wait_gradient(self, unit: int) -> None:
        """Block until every queued accumulation of `unit` is done."""
        self._wait(self._gradient_tickets[unit], "accumulation of ", unit)

    def wait_ticket(self, ticket: int) -> None:
        """Block until the task with this ticket has run."""
        self._worker.wait(ticket)

    def wait_all(self) -> None:
        """Block until the worker is idle; raises what it raised."""
        self._worker.wait_all()

    def accumulate(self, unit: int, pieces: Sequence[GradientPiece], arrived: Event | None) -> int:
        """Queue the accumulation of pieces once `arrived` is reached.

        Returns:
            The ticket after which the pieces' memory may be overwritten.
        """
        host = self._host_units[unit]

        def task() -> None:
            if arrived is not None:
                arrived.synchronize()
            assert host.accumulator is not None
            with self._tracer.host_span("update", f"accumulation of {self._names[unit]}"):
                for piece in pieces:
                    target = host.accumulator[piece.run]
                    assert target is not None
                    part = target[piece.offset : piece.offset + piece.gradient.numel()]
                    self.kernel.accumulate(accumulator=part, grad=piece.gradient, overwrite=piece.overwrite)

        ticket = self._submit(task, f"gradient accumulation of {self._names[unit]}")
        self._gradient_tickets[unit] = ticket
        return ticket

    def update(
        self, unit: int, hyper: Mapping[int, AdamStep], arrived: Sequence[Event], *, defer_moments: bool = False
    ) -> None:
        """Queue the optimizer step of a unit on the gradients it has received.

        Parameters that received none are left alone, as PyTorch leaves a parameter whose grad is None: neither
        moments nor weight nor step count change.

        Args:
            unit: unit index.
            hyper: hyper-parameters per optimizer group; the step count of each parameter is filled in here.
            arrived: events after which the gradients are on the host.
            defer_moments: leave the moments to `write_moments`, where the kernel and the decay allow it.
        """
        host = self._host_units[unit]
        ranges = _update_ranges(host)
        host.clear_gradient()
        if not ranges:
            return
        for found in ranges:
            for index in found.parameters:
                host.steps[index] += 1

        may_split = defer_moments and self.kernel.splits
        parts = [
            UpdatePart.WEIGHTS if may_split and hyper[found.group].divisible else UpdatePart.ALL for found in ranges
        ]
        later = [found for found, part in zip(ranges, parts, strict=True) if part is UpdatePart.WEIGHTS]

        def task() -> None:
            for event in arrived:
                event.synchronize()
            with self._tracer.host_span("update", self._names[unit]):
                for found, part in zip(ranges, parts, strict=True):
                    self._update_range(host, found, hyper[found.group], part)

        self.bump(unit)
        ticket = self._submit(task, f"the optimizer step of {self._names[unit]}")
        self._weight_tickets[unit] = self._update_tickets[unit] = ticket
        if later:
            self._deferred.append((unit, later, hyper))

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """One step's calls of `update`; at the end, whatever happened, the moments that were left are queued."""
        try:
            yield
        finally:
            self.write_moments()

    def write_moments(self) -> None:
        """Every weight of the step is queued: queue the moments that were left, in the order gradients come in."""
        self._submit(self.deferral.weights_done, "the end of a step's weights")
        deferred, self._deferred = self._deferred, []
        for unit, ranges, hyper in reversed(deferred):
            self._update_tickets[unit] = self._submit(
                partial(self._write_moments_of, unit, ranges, hyper), f"the moments of {self._names[unit]}"
            )

    def _write_moments_of(self, unit: int, ranges: list[_UpdateRange], hyper: Mapping[int, AdamStep]) -> None:
        with self._tracer.host_span("update", f"moments of {self._names[unit]}"):
            for found in ranges:
                self._update_range(self._host_units[unit], found, hyper[found.group], UpdatePart.MOMENTS)

    def close(self) -> None:
        """Finish what is queued and stop the worker; idempotent. Warns of an error that nobody has been told of."""
        error = self._worker.stop()
        if error is not None:
            warnings.warn(
                f"megatrain: the last updates failed, and nothing waited for them: {type(error).__name__}: {error}. "
                "Weights and optimizer state are those of different steps: go back to the last checkpoint.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _wait(self, ticket: int, what: str, unit: int) -> None:
        waits = not self._worker.done(ticket)
        with self._tracer.host_span("wait", what + self._names[unit]) if waits else contextlib.nullcontext():
            # Done or not: it raises the error of any task.
            self._worker.wait(ticket)

    def _submit(self, task, label: str) -> int:  # noqa: ANN001
        ticket = self._worker.submit(task, label)
        if self._synchronous:
            self._worker.wait(ticket)
        return ticket

    def _update_range(self, host: HostUnit, found: _UpdateRange, hyper: AdamStep, part: UpdatePart) -> None:
        state = host.states[found.run]
        assert state is not None
        stretch = slice(found.start, found.stop)
        start = time.perf_counter()
        self.kernel.update(
            master=state.master[stretch],
            exp_avg=state.exp_avg[stretch],
            exp_avg_sq=state.exp_avg_sq[stretch],
            grad=host.gradient_run(found.run)[stretch],
            compute=None if state.compute.dtype == state.master.dtype else state.compute[stretch],
            hyper=replace(hyper, step=found.step + 1),
            part=part,
        )
        self.deferral.ran(found.stop - found.start, _PASS_BYTES[part], time.perf_counter() - start)


@dataclass
class _UpdateRange:
    """Neighbouring parameters of one run, group and step count: one kernel call."""

    run: int
    group: int
    step: int
    start: int
    stop: int
    parameters: list[int]


def _update_ranges(host: HostUnit) -> list[_UpdateRange]:
    order = sorted(
        (index for index, received in enumerate(host.received) if received),
        key=lambda index: (host.layout.placements[index].run, host.layout.placements[index].offset),
    )
    ranges: list[_UpdateRange] = []
    for index in order:
        placement = host.layout.placements[index]
        group, step = placement.spec.group, host.steps[index]
        assert group is not None
        # Padding belongs to the parameter before it: the kernel then sees whole vectors and no gaps.
        # Its gradient is whatever the buffer held; elementwise updates keep that to the padding, and nothing reads it.
        stop = placement.offset + align(placement.spec.numel, ELEMENT_ALIGNMENT)
        last = ranges[-1] if ranges else None
        if last and (last.run, last.group, last.step, last.stop) == (placement.run, group, step, placement.offset):
            last.stop = stop
            last.parameters.append(index)
        else:
            ranges.append(_UpdateRange(placement.run, group, step, placement.offset, stop, [index]))
    return ranges
