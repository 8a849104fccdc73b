"""Fetching: events of three iterations, prefetch that never waits, stale copies, wrong guesses, races and overlap."""

from __future__ import annotations

import time
import warnings

import pytest
import torch

from megatrain_ds.memory.streams import H2D
from megatrain_ds.runtime.slot import SlotPool
from megatrain_ds.runtime.streamer import WeightStreamer
from megatrain_ds.tests.runtime.fakes import CPU, FakePublication, Recorder, RecordingStreams, make_store


class Rig:
    """A streamer over real host blocks, slots and flows."""

    def __init__(self, num_units: int, *, slots: int = 2, **streams) -> None:
        self.recorder = Recorder()
        self.store = make_store(num_units)
        self.streams = RecordingStreams(self.recorder, **streams)
        self.publication = FakePublication(num_units)
        self.pool = SlotPool(slots, self.store.units[0].layout.compute_bytes, CPU)
        self.streamer = WeightStreamer(
            host_units=self.store.units,
            names=[str(unit) for unit in range(num_units)],
            pool=self.pool,
            streams=self.streams,
            publication=self.publication,
            tracer=self.recorder,
        )

    def run(self, unit: int, upcoming: list[int], compute_s: float = 0.0) -> float:
        """One use of a unit as the executor does it; the value that the unit's weights had, seen at the end."""
        slot = self.streamer.acquire(unit, keep=upcoming)
        self.streamer.prefetch(upcoming)
        self.recorder.events.append(f"compute {unit}")
        if compute_s:
            time.sleep(compute_s)
        values = slot.views(unit, self.store.units[unit].layout)[0].unique().tolist()
        self.streamer.release(slot)
        self.recorder.events.append(f"release {unit}")
        assert len(values) == 1
        return values[0]


@pytest.fixture
def make_rig():
    rigs = []

    def make(*args, **kwargs) -> Rig:
        rigs.append(Rig(*args, **kwargs))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.streams.close()


def forward(rig: Rig, order: list[int], **kwargs) -> list[float]:
    depth = rig.streamer.depth
    return [rig.run(unit, order[place + 1 :][:depth], **kwargs) for place, unit in enumerate(order)]


def test_three_iterations_of_three_units_on_two_slots(make_rig):
    rig = make_rig(3)
    for iteration in range(3):
        assert forward(rig, [0, 1, 2]) == [0.0, 1.0, 2.0]
        # From the second iteration on, unit 1 is still in the slot that the last iteration left it in.
        ahead = ["h2d weights 1"] if iteration == 0 else []
        assert rig.recorder.take() == [
            *["h2d weights 0", *ahead, "compute 0", "release 0"],
            *["h2d weights 2", "compute 1", "release 1"],
            *["compute 2", "release 2"],
        ]


def test_what_is_still_in_a_slot_is_not_fetched_again(make_rig):
    rig = make_rig(2)
    forward(rig, [0, 1])
    rig.recorder.take()
    forward(rig, [1, 0, 1])
    assert [event for event in rig.recorder.take() if "h2d" in event] == []


def test_a_stale_copy_is_fetched_again_and_does_not_block_prefetching(make_rig):
    rig = make_rig(3, slots=3)
    forward(rig, [0, 1, 2])
    rig.recorder.take()
    for unit, host in enumerate(rig.store.units):
        host.compute[0].fill_(10.0 + unit)
        rig.publication.versions[unit] += 1
    rig.streamer.prefetch([0, 1])
    assert rig.recorder.take() == ["h2d weights 0", "h2d weights 1"]
    assert forward(rig, [0, 1, 2]) == [10.0, 11.0, 12.0]


def test_a_fetch_waits_for_its_own_update_alone_and_names_the_wait(make_rig):
    rig = make_rig(3)
    rig.publication.under_way = {1, 2}
    rig.streamer.release(rig.streamer.acquire(1, keep=[]))
    assert rig.publication.waited == [1]
    assert rig.recorder.take() == ["wait update of 1", "h2d weights 1"]


def test_a_prefetch_never_waits_and_stops_at_the_first_unit_under_way(make_rig):
    rig = make_rig(4, slots=4)
    rig.publication.under_way = {1}
    rig.streamer.prefetch([0, 1, 2])
    assert rig.publication.waited == []
    assert rig.recorder.take() == ["h2d weights 0"]


def test_a_prefetch_keeps_what_comes_and_never_takes_a_bound_slot(make_rig):
    rig = make_rig(4)
    bound = rig.streamer.acquire(0, keep=[])
    rig.streamer.prefetch([1])
    rig.streamer.prefetch([1, 2])
    assert rig.recorder.take() == ["h2d weights 0", "h2d weights 1"]
    rig.streamer.release(bound)
    rig.streamer.prefetch([1, 2])
    assert rig.recorder.take() == ["h2d weights 2"]


def test_a_wrong_guess_costs_a_fetch_and_no_result(make_rig):
    rig = make_rig(4)
    rig.streamer.prefetch([3])
    assert rig.run(1, [2]) == 1.0
    assert rig.run(0, [3]) == 0.0
    assert rig.run(3, []) == 3.0
    assert [event for event in rig.recorder.take() if "h2d" in event] == [
        f"h2d weights {unit}" for unit in (3, 1, 2, 0, 3)
    ]


def test_a_unit_wanted_while_all_slots_are_bound_gets_one_more(make_rig):
    rig = make_rig(3)
    first, second = rig.streamer.acquire(0, keep=[]), rig.streamer.acquire(1, keep=[])
    with pytest.warns(RuntimeWarning, match="all 2 weight slots are in use"):
        third = rig.streamer.acquire(2, keep=[])
    views = [s.views(u, rig.store.units[u].layout)[0] for u, s in enumerate([first, second, third])]
    assert [view.unique().tolist() for view in views] == [[0.0], [1.0], [2.0]]
    for slot in (first, second, third):
        rig.streamer.release(slot)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert forward(rig, [0, 1, 2]) == [0.0, 1.0, 2.0]
    assert rig.streamer.depth == 2


def test_reset_frees_bound_slots(make_rig):
    rig = make_rig(3)
    for unit in (0, 1):
        rig.streamer.acquire(unit, keep=[])
    rig.streamer.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert forward(rig, [2, 1, 0]) == [2.0, 1.0, 0.0]


def test_a_fill_waits_for_the_last_use_and_the_last_fill_of_its_slot(make_rig):
    # The CPU flows cannot race here (compute is the calling thread), so the events themselves are looked at.
    rig = make_rig(2, slots=2)
    given = []
    original = rig.streams.copy

    def copy(flow, pairs, *, after, label):
        given.append(list(after))
        return original(flow, pairs, after=after, label=label)

    rig.streams.copy = copy
    rig.pool.slots.pop()
    rig.run(0, [])
    (slot,) = rig.pool.slots
    freed, ready = slot.freed, slot.ready
    rig.run(1, [])
    assert given == [[], [freed, ready]]


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("delay_s", [0.0, 0.003])
@pytest.mark.parametrize("compute_s", [0.0, 0.003])
def test_slow_copies_and_slow_compute_never_mix_units(make_rig, slots, delay_s, compute_s):
    rig = make_rig(4, slots=slots, delays_s={H2D: delay_s})
    for _ in range(3):
        assert forward(rig, [0, 1, 2, 3], compute_s=compute_s) == [0.0, 1.0, 2.0, 3.0]
        assert forward(rig, [3, 2, 1, 0], compute_s=compute_s) == [3.0, 2.0, 1.0, 0.0]


def test_prefetching_hides_copies_behind_compute(make_rig):
    def seconds(*, synchronous: bool) -> float:
        rig = make_rig(8, synchronous=synchronous, delays_s={H2D: 0.02})
        start = time.perf_counter()
        forward(rig, list(range(8)), compute_s=0.02)
        return time.perf_counter() - start

    assert seconds(synchronous=False) < 0.8 * seconds(synchronous=True)


def test_a_failed_update_is_raised_where_the_unit_is_needed(make_rig):
    rig = make_rig(2)
    rig.publication.under_way = {0}

    def wait_weights(unit: int) -> None:
        raise torch.OutOfMemoryError(f"update of {unit}")

    rig.publication.wait_weights = wait_weights
    with pytest.raises(torch.OutOfMemoryError, match="update of 0"):
        rig.streamer.acquire(0, keep=[])
    rig.publication.under_way.clear()
    assert forward(rig, [0, 1]) == [0.0, 1.0]
