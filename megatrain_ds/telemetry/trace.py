"""A timeline of the engine in Chrome's trace format.

Knows tracks ("h2d", "compute", "d2h", "update", "wait") and spans on them. Knows nothing about units or steps beyond
the labels it is given. Spans on a device are timed by events on the stream they ran on, spans on the host by the
monotonic clock; one anchor event ties both clocks together.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatrain_ds.telemetry.summary import Span, StepSummary, summarize

if TYPE_CHECKING:
    from collections.abc import Iterator

logger = logging.getLogger("megatrain_ds")

TRACKS = ("compute", "h2d", "d2h", "update", "wait")


class NullTracer:
    """The absence of a trace: every call returns at once."""

    active = False

    @contextlib.contextmanager
    def host_span(self, track: str, name: str) -> Iterator[None]:
        """Time a block of host work (ignored)."""
        yield

    def device_span(self, track: str, name: str, start: Any, end: Any) -> None:
        """Record work between two timing events (ignored)."""

    def step_done(self) -> None:
        """Count one optimizer step (ignored)."""

    def close(self) -> None:
        """Write what was recorded (ignored)."""


class ChromeTracer(NullTracer):
    """Records spans for a window of optimizer steps and writes them as one Chrome trace file.

    Args:
        path: the file to write (JSON, "traceEvents"; open it in chrome://tracing or Perfetto). "otherData" holds a
            summary of every step, which is logged too.
        skip_steps: optimizer steps left out first (allocation and warm-up).
        num_steps: optimizer steps recorded; the file is written when they are done, or at `close`.
        use_cuda: whether device spans carry CUDA events (otherwise they are host clock times in seconds).
    """

    def __init__(self, path: str, *, skip_steps: int, num_steps: int, use_cuda: bool) -> None:
        # Whatever folder the process goes to later.
        self._path = Path(path).resolve()
        self._first, self._last = skip_steps, skip_steps + num_steps
        self._use_cuda = use_cuda
        self._step = 0
        self._lock = threading.Lock()
        self._host: list[tuple[str, str, float, float]] = []
        self._device: list[tuple[str, str, Any, Any]] = []
        self._anchor: tuple[float, Any] | None = None
        self._marks: list[float] = []
        self._written = False
        self._maybe_start()

    @property
    def active(self) -> bool:  # type: ignore[override]
        """Whether spans are being recorded now."""
        return self._first <= self._step < self._last and not self._written

    @contextlib.contextmanager
    def host_span(self, track: str, name: str) -> Iterator[None]:
        """Time a block of host work on `track`."""
        if not self.active:
            yield
            return
        start = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._host.append((track, name, start, time.perf_counter()))

    def device_span(self, track: str, name: str, start: Any, end: Any) -> None:
        """Record work between two timing events (CUDA), or two host times in seconds (CPU)."""
        if self.active:
            with self._lock:
                self._device.append((track, name, start, end))

    def step_done(self) -> None:
        """Count one optimizer step; starts and ends the recorded window."""
        self._step += 1
        if self.active or self._step == self._last:
            self._marks.append(time.perf_counter())
        self._maybe_start()
        if self._step == self._last:
            self.close()

    def close(self) -> None:
        """Write the file, once; waits for the device so that every event has a time.

        What goes wrong here is a warning: neither a training step nor the end of an engine fails for its trace.
        """
        if self._written:
            return
        self._written = True
        if self._anchor is None:
            self._warn(f"no trace, since training ended after {self._step} steps and it begins after {self._first}")
            return
        if self._use_cuda:
            torch.cuda.synchronize()
        try:
            self._write()
        except OSError as error:
            self._warn(f"the trace could not be written ({error.strerror})")

    def _warn(self, what: str) -> None:
        warnings.warn(f"megatrain.trace_file = {str(self._path)!r}: {what}.", RuntimeWarning, stacklevel=3)

    def _write(self) -> None:
        spans = sorted(self._spans(), key=lambda span: span[2])
        steps = self._summaries(spans)
        for step in steps:
            logger.info("megatrain: %s", step.line())
        trace = {
            "traceEvents": _events(spans),
            "displayTimeUnit": "ms",
            "otherData": {"steps": [step.as_dict() for step in steps]},
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(trace))

    def _summaries(self, spans: list[Span]) -> list[StepSummary]:
        assert self._anchor is not None
        marks = [mark - self._anchor[0] for mark in self._marks]
        return summarize(spans, [0.0, *[mark for mark in marks if mark > 0.0]], first_step=self._first)

    def _spans(self) -> list[Span]:
        # Track, name, start and end in seconds from the anchor.
        assert self._anchor is not None
        origin, event = self._anchor
        with self._lock:
            host, device = list(self._host), list(self._device)
        spans = [(track, name, start - origin, end - origin) for track, name, start, end in host]
        for track, name, start, end in device:
            if self._use_cuda:
                spans.append((track, name, event.elapsed_time(start) / 1e3, event.elapsed_time(end) / 1e3))
            else:
                spans.append((track, name, start - origin, end - origin))
        return spans

    def _maybe_start(self) -> None:
        if self._step != self._first or self._anchor is not None:
            return
        event = None
        if self._use_cuda:
            torch.cuda.synchronize()
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            event.synchronize()
        self._anchor = (time.perf_counter(), event)


def _events(spans: list[Span]) -> list[dict[str, Any]]:
    # As Chrome "X" events, in microseconds from the start of the window.
    named = [
        {"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": track}}
        for tid, track in enumerate(TRACKS)
    ]
    return named + [
        {
            "ph": "X",
            "pid": 0,
            "tid": TRACKS.index(track),
            "name": name,
            "ts": start * 1e6,
            "dur": (end - start) * 1e6,
        }
        for track, name, start, end in spans
    ]
