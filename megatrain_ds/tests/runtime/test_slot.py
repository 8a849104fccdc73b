"""Slot states and the pool: transitions that are allowed, refused, and what happens when all slots are bound."""

from __future__ import annotations

import pytest
import torch

from megatrain_ds.errors import StateError
from megatrain_ds.memory.streams import HostStreams
from megatrain_ds.runtime.slot import Slot, SlotPool, SlotState
from megatrain_ds.telemetry.trace import NullTracer
from megatrain_ds.tests.runtime.fakes import CPU, make_store


@pytest.fixture
def event():
    streams = HostStreams(CPU, synchronous=False, tracer=NullTracer())
    yield streams.record_compute()
    streams.close()


def make_slot() -> Slot:
    return Slot(torch.zeros(256, dtype=torch.uint8))


def test_the_life_of_a_slot(event):
    slot = make_slot()
    states = [slot.state]
    slot.fill(3, 7, event)
    states.append(slot.state)
    slot.bind()
    slot.bind()
    states.append(slot.state)
    slot.unbind(event)
    states.append(slot.state)
    slot.unbind(event)
    states.append(slot.state)
    slot.fill(4, 0, event)
    states.append(slot.state)
    slot.drop()
    states.append(slot.state)
    empty, filling, ready, in_use = SlotState
    assert states == [empty, filling, in_use, in_use, ready, filling, empty]
    assert (slot.unit, slot.version, slot.users) == (-1, -1, 0)


def test_illegal_transitions_name_allowed_and_actual_state(event):
    slot = make_slot()
    with pytest.raises(StateError, match="weight slot bound: allowed from filling or ready or in use, .* is empty"):
        slot.bind()
    with pytest.raises(StateError, match="weight slot unbound: allowed from in use, but the state is empty"):
        slot.unbind(event)
    slot.fill(0, 0, event)
    slot.bind()
    with pytest.raises(StateError, match="weight slot filled: allowed from empty or ready or filling, .* is in use"):
        slot.fill(1, 0, event)
    assert (slot.unit, slot.users) == (0, 1)


def test_views_are_made_once_and_share_the_slot():
    layout = make_store(1, shapes=((4, 4), (3,))).units[0].layout
    slot = Slot(torch.zeros(layout.compute_bytes, dtype=torch.uint8))
    with torch.inference_mode():
        views = slot.views(0, layout)
    assert slot.views(0, layout) is views
    assert not views[0].is_inference()
    assert {view.untyped_storage().data_ptr() for view in views} == {slot.block.data_ptr()}


def test_holding_asks_for_the_version(event):
    pool = SlotPool(2, 256, CPU)
    pool.slots[1].fill(5, 1, event)
    assert pool.holding(5, 1) is pool.slots[1]
    assert pool.holding(5, 2) is None
    assert pool.holding(-1, -1) is None
    pool.drop_all()
    assert pool.holding(5, 1) is None


def test_a_free_slot_is_empty_or_unused_and_not_kept(event):
    pool = SlotPool(2, 256, CPU)
    pool.slots[0].fill(5, 1, event)
    assert pool.free([(5, 1)]) is pool.slots[1]
    pool.slots[1].fill(6, 0, event)
    assert pool.free([(5, 1), (6, 0)]) is None
    assert pool.free([(5, 1)]) is pool.slots[1]
    assert pool.free([(5, 2), (6, 0)]) is pool.slots[0]  # it holds unit 5 as it was before an update
    pool.slots[0].bind()
    assert pool.free([(6, 0)]) is None


def test_a_kept_slot_is_taken_before_the_pool_grows(event):
    pool = SlotPool(2, 256, CPU)
    for unit, slot in enumerate(pool.slots):
        slot.fill(unit, 0, event)
    pool.slots[0].bind()
    assert pool.free_or_grow([(0, 0), (1, 0)]) is pool.slots[1]


def test_the_pool_grows_with_a_warning_when_all_are_bound(event):
    pool = SlotPool(2, 1 << 20, CPU)
    for unit, slot in enumerate(pool.slots):
        slot.fill(unit, 0, event)
        slot.bind()
    with pytest.warns(RuntimeWarning, match=r'all 2 weight slots are in use.*one more of 1 MiB.*"weight_slots": 3'):
        grown = pool.free_or_grow([])
    assert grown is pool.slots[2]
    assert grown.block.numel() == 1 << 20
    assert pool.num_bytes == 3 << 20


def test_a_model_without_streamed_units_has_no_slots():
    assert SlotPool(2, 0, CPU).slots == []
