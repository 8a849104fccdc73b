"""The CPU flows: order, waits, delays, errors, the synchronous mode, and closing."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from megatrain_ds.errors import StateError
from megatrain_ds.memory.streams import D2H, H2D, HostStreams, make_streams
from megatrain_ds.telemetry.trace import NullTracer

CPU = torch.device("cpu")


class SpanTracer(NullTracer):
    """Keeps the tracks and names of device spans."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, str]] = []

    def device_span(self, track, name, start, end):
        assert end >= start
        self.spans.append((track, name))


@pytest.fixture
def open_streams():
    opened = []

    def make(**kwargs):
        opened.append(make_streams(CPU, **{"synchronous": False, "tracer": NullTracer(), **kwargs}))
        return opened[-1]

    yield make
    for streams in opened:
        streams.close()


def test_a_copy_arrives_with_its_event_and_one_span(open_streams):
    tracer = SpanTracer()
    streams = open_streams(tracer=tracer)
    assert isinstance(streams, HostStreams)
    targets = [torch.zeros(3), torch.zeros(2)]
    event = streams.copy(H2D, [(targets[0], torch.ones(3)), (targets[1], torch.ones(2))], after=[], label="both")
    event.synchronize()
    assert event.query()
    assert [target.tolist() for target in targets] == [[1.0] * 3, [1.0] * 2]
    assert tracer.spans == [(H2D, "both")]


def test_a_flow_keeps_its_order_and_waits_for_events_of_the_other(open_streams):
    streams = open_streams(delays_s={H2D: 0.02})
    device, backs = torch.full((1,), -1.0), [torch.full((1,), -2.0) for _ in range(3)]
    events = []
    for value, back in enumerate(backs):
        # One host value after another through one device buffer: right only if every wait is kept.
        up = streams.copy(H2D, [(device, torch.full((1,), float(value)))], after=events[-1:], label="up")
        events.append(streams.copy(D2H, [(back, device)], after=[up], label="down"))
    assert not events[0].query()
    for event in events:
        event.synchronize()
    assert [back.item() for back in backs] == [0.0, 1.0, 2.0]


def test_flows_run_beside_each_other(open_streams):
    def seconds(**kwargs):
        streams = open_streams(delays_s={H2D: 0.1, D2H: 0.1}, **kwargs)
        start = time.perf_counter()
        pairs = [(torch.zeros(1), torch.ones(1))]
        events = [streams.copy(flow, pairs, after=[], label=flow) for flow in (H2D, D2H)]
        for event in events:
            event.synchronize()
        return time.perf_counter() - start

    assert seconds() < 0.8 * seconds(synchronous=True)


def test_synchronous_copies_have_ended_when_the_call_returns(open_streams):
    streams = open_streams(synchronous=True, delays_s={D2H: 0.02})
    target = torch.zeros(2)
    assert streams.copy(D2H, [(target, torch.ones(2))], after=[], label="x").query()
    assert target.tolist() == [1.0, 1.0]


def test_a_failed_copy_reaches_whoever_waits_and_what_depends_on_it(open_streams):
    streams = open_streams()
    failed = streams.copy(H2D, [(torch.zeros(2), torch.zeros(3))], after=[], label="bad")
    untouched = torch.zeros(1)
    dependent = streams.copy(D2H, [(untouched, torch.ones(1))], after=[failed], label="after bad")
    fine = streams.copy(H2D, [(torch.zeros(1), torch.ones(1))], after=[], label="fine")
    for event in (failed, dependent):
        with pytest.raises(RuntimeError, match="size of tensor"):
            event.synchronize()
    with pytest.raises(RuntimeError, match="size of tensor"):
        streams.compute_wait(failed)
    fine.synchronize()
    assert untouched.item() == 0.0


def test_copies_do_not_disturb_autograd(open_streams):
    streams = open_streams()
    source = torch.ones(2, requires_grad=True)
    target = torch.zeros(2)
    streams.copy(D2H, [(target, source)], after=[], label="x").synchronize()
    assert not target.requires_grad


def test_compute_events_are_reached_and_marks_are_times(open_streams):
    streams = open_streams()
    assert streams.record_compute().query()
    assert streams.mark() <= streams.mark()


def test_close_finishes_what_is_queued_ends_the_threads_and_refuses_more(open_streams):
    before = set(threading.enumerate())
    streams = open_streams(delays_s={H2D: 0.02})
    threads = [thread for thread in threading.enumerate() if thread not in before]
    assert sorted(thread.name for thread in threads) == ["megatrain-d2h", "megatrain-h2d"]
    target = torch.zeros(1)
    event = streams.copy(H2D, [(target, torch.ones(1))], after=[], label="x")
    streams.close()
    streams.close()
    assert event.query()
    assert target.item() == 1.0
    assert not any(thread.is_alive() for thread in threads)
    with pytest.raises(StateError, match="h2d copy of late: allowed from open, but the state is closed"):
        streams.copy(H2D, [(target, torch.ones(1))], after=[], label="late")
