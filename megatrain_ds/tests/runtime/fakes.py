"""Small stand-ins for our own protocols: a publication whose updates the test decides, and a recorder of events."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from megatrain_ds.memory.host_store import HostStore
from megatrain_ds.memory.layout import ParameterSpec, plan_unit
from megatrain_ds.memory.streams import HostStreams
from megatrain_ds.telemetry.trace import NullTracer

CPU = torch.device("cpu")
NUMEL = 64


class Recorder(NullTracer):
    """Keeps what happens, in order: named waits here, and whatever a test appends."""

    def __init__(self) -> None:
        self.events: list[str] = []

    @contextlib.contextmanager
    def host_span(self, track: str, name: str) -> Iterator[None]:
        self.events.append(f"{track} {name}")
        yield

    def take(self) -> list[str]:
        taken, self.events = self.events, []
        return taken


class RecordingStreams(HostStreams):
    """Real flows on threads that also record each copy's label when it is issued."""

    def __init__(self, recorder: Recorder, **kwargs) -> None:
        super().__init__(CPU, **{"synchronous": False, "tracer": NullTracer(), **kwargs})
        self._recorder = recorder

    def copy(self, flow, pairs, *, after, label):
        self._recorder.events.append(f"{flow} {label}")
        return super().copy(flow, pairs, after=after, label=label)


class FakePublication:
    """Versions of units, and which of them have an update under way."""

    def __init__(self, num_units: int) -> None:
        self.versions = [0] * num_units
        self.under_way: set[int] = set()
        self.waited: list[int] = []

    def version(self, unit: int) -> int:
        return self.versions[unit]

    def is_current(self, unit: int) -> bool:
        return unit not in self.under_way

    def wait_weights(self, unit: int) -> None:
        self.waited.append(unit)
        self.under_way.discard(unit)


def make_store(
    num_units: int, *, shapes: Sequence[tuple[int, ...]] = ((NUMEL,),), direct: bool = True, dtype=torch.float32
) -> HostStore:
    """Units of fp32 parameters "0.0", "0.1", ...; the compute copy of unit `i` is filled with `i`."""
    layouts = [
        plan_unit([ParameterSpec(f"{unit}.{i}", shape, torch.float32, 0) for i, shape in enumerate(shapes)])
        for unit in range(num_units)
    ]
    store = HostStore(layouts, pin=False, direct_gradients=direct, accumulation_dtype=dtype)
    for index, unit in enumerate(store.units):
        for view in unit.compute:
            view.fill_(float(index))
    return store
