"""The streams of the engine and the copies on them.

Three flows run beside each other: compute (whatever stream the caller runs on), h2d (weights to the device) and d2h
(gradients to the host). On CUDA they are streams and events. On the CPU the copy flows are threads with a queue each
and compute is the calling thread, so that the whole engine, its waits included, runs and is tested without a GPU.
This is the only module that creates streams.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from megatrain_ds.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from megatrain_ds.telemetry.trace import NullTracer

H2D = "h2d"
D2H = "d2h"


class Event(ABC):
    """A point in a flow that other flows, or the host, can wait for."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until the point is reached; re-raises what failed before it."""

    @abstractmethod
    def query(self) -> bool:
        """Whether the point is reached."""


class _CudaEvent(Event):
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def synchronize(self) -> None:
        self.event.synchronize()

    def query(self) -> bool:
        return self.event.query()


class _HostEvent(Event):
    def __init__(self, *, reached: bool = False) -> None:
        self._reached = threading.Event()
        self.error: BaseException | None = None
        if reached:
            self._reached.set()

    def set(self, error: BaseException | None = None) -> None:
        self.error = error
        self._reached.set()

    def synchronize(self) -> None:
        self._reached.wait()
        if self.error is not None:
            raise self.error

    def query(self) -> bool:
        return self._reached.is_set()


class Streams(ABC):
    """The three flows on one device.

    A copy waits for the events it is given, runs on its own flow and returns the event of its end. Source and target
    of a copy must stay alive until that event; callers keep them in a tuple with it.

    Args:
        device: where compute runs.
        synchronous: wait for every copy (and, before it, for compute): the debug mode.
        tracer: receives one span per copy.
        delays_s: seconds to sleep before each copy of a flow; for tests that look for races.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        synchronous: bool,
        tracer: NullTracer,
        delays_s: Mapping[str, float] | None = None,
    ) -> None:
        self.device = device
        self.synchronous = synchronous
        self.tracer = tracer
        self.delays_s = dict(delays_s or {})

    def copy(
        self, flow: str, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], *, after: Sequence[Event], label: str
    ) -> Event:
        """Enqueue copies on a flow.

        Args:
            flow: "h2d" or "d2h".
            pairs: (target, source) tensors of equal shape and dtype.
            after: events the copies wait for.
            label: name of the span in a trace.

        Returns:
            The event of their end.
        """
        event = self._enqueue(flow, pairs, after, label)
        if self.synchronous:
            event.synchronize()
        return event

    @abstractmethod
    def _enqueue(
        self, flow: str, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Sequence[Event], label: str
    ) -> Event: ...

    @abstractmethod
    def record_compute(self) -> Event:
        """The event of everything enqueued so far on the caller's current stream."""

    @abstractmethod
    def compute_wait(self, event: Event) -> None:
        """Make the caller's current stream wait for an event; the host goes on where the device can wait alone."""

    @abstractmethod
    def mark(self) -> Any:
        """A point on the compute flow for a trace span: a timing event, or a host time in seconds."""

    @abstractmethod
    def close(self) -> None:
        """Finish the queued copies and free streams and threads; idempotent."""


class CudaStreams(Streams):
    """Flows as CUDA streams. h2d overlaps compute and d2h, d2h overlaps compute and h2d."""

    def __init__(self, device: torch.device, **kwargs: Any) -> None:
        super().__init__(device, **kwargs)
        self._flows = {H2D: torch.cuda.Stream(device), D2H: torch.cuda.Stream(device)}

    def _enqueue(
        self, flow: str, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Sequence[Event], label: str
    ) -> Event:
        stream = self._flows[flow]
        timed = self.tracer.active
        with torch.cuda.stream(stream):
            for event in after:
                stream.wait_event(event.event)  # type: ignore[attr-defined]
            if flow in self.delays_s:
                torch.cuda._sleep(int(self.delays_s[flow] * 1.5e9))
            start = self._record(stream, timed=True) if timed else None
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            end = self._record(stream, timed=timed)
        if timed:
            self.tracer.device_span(flow, label, start, end)
        return _CudaEvent(end)

    def record_compute(self) -> Event:  # noqa: D102
        return _CudaEvent(self._record(torch.cuda.current_stream(self.device), timed=False))

    def compute_wait(self, event: Event) -> None:  # noqa: D102
        torch.cuda.current_stream(self.device).wait_event(event.event)  # type: ignore[attr-defined]

    def mark(self) -> Any:  # noqa: D102
        return self._record(torch.cuda.current_stream(self.device), timed=True)

    def close(self) -> None:  # noqa: D102
        for stream in self._flows.values():
            stream.synchronize()

    @staticmethod
    def _record(stream: torch.cuda.Stream, *, timed: bool) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=timed)
        event.record(stream)
        return event


class HostStreams(Streams):
    """Flows as threads, for devices that share the host's memory; compute is the calling thread."""

    def __init__(self, device: torch.device, **kwargs: Any) -> None:
        super().__init__(device, **kwargs)
        self._queues: dict[str, queue.SimpleQueue[Callable[[], None] | None]] = {}
        self._threads: list[threading.Thread] = []
        for flow in (H2D, D2H):
            tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
            thread = threading.Thread(target=_run_tasks, args=(tasks,), name=f"megatrain-{flow}", daemon=True)
            thread.start()
            self._queues[flow] = tasks
            self._threads.append(thread)

    def _enqueue(
        self, flow: str, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], after: Sequence[Event], label: str
    ) -> Event:
        done = _HostEvent()

        def task() -> None:
            try:
                for event in after:
                    event.synchronize()
                if flow in self.delays_s:
                    time.sleep(self.delays_s[flow])
                start = time.perf_counter()
                with torch.no_grad():
                    for target, source in pairs:
                        target.copy_(source)
                self.tracer.device_span(flow, label, start, time.perf_counter())
            except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the event
                done.set(error)
            else:
                done.set()

        if not self._threads:
            raise StateError(f"{flow} copy of {label}", ("open",), "closed", "Finish backward before destroy()")
        self._queues[flow].put(task)
        return done

    def record_compute(self) -> Event:  # noqa: D102
        return _HostEvent(reached=True)

    def compute_wait(self, event: Event) -> None:  # noqa: D102
        event.synchronize()

    def mark(self) -> Any:  # noqa: D102
        return time.perf_counter()

    def close(self) -> None:  # noqa: D102
        for tasks in self._queues.values():
            tasks.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()


def _run_tasks(tasks: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (task := tasks.get()) is not None:
        task()


def make_streams(device: torch.device, **kwargs: Any) -> Streams:
    """The streams for a device: CUDA streams on CUDA, threads elsewhere. Arguments as for `Streams`."""
    if device.type == "cuda":
        return CudaStreams(device, **kwargs)
    return HostStreams(device, **kwargs)
