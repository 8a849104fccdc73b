"""The executor with real units on real flows: literal events of three iterations, repeats, skips, failures, races."""

from __future__ import annotations

import gc
import time
import warnings

import pytest
import torch
from torch import nn

from megatrain_ds.memory.streams import D2H, H2D
from megatrain_ds.model.discovery import find_units
from megatrain_ds.optim.adam import AdamStep
from megatrain_ds.optim.deferral import MomentDeferral
from megatrain_ds.optim.pipeline import HostPipeline
from megatrain_ds.optim.torch_kernel import TorchKernel
from megatrain_ds.runtime.executor import Executor, Phase
from megatrain_ds.runtime.gradient_buffers import GradientBuffers
from megatrain_ds.runtime.gradients import GradientDrain
from megatrain_ds.runtime.schedule import Schedule
from megatrain_ds.runtime.slot import SlotPool
from megatrain_ds.runtime.streamer import WeightStreamer
from megatrain_ds.runtime.unit_forward import UnitForward
from megatrain_ds.telemetry.trace import NullTracer
from megatrain_ds.tests.runtime.fakes import CPU, Recorder, RecordingStreams, make_store

WIDTH = 8
STILL = AdamStep(
    lr=0.0,
    beta1=0.9,
    beta2=0.99,
    eps=1e-8,
    weight_decay=0.0,
    decoupled=True,
    bias_correction=True,
    step=1,
    grad_scale=1.0,
)


class Block(nn.Module):
    """x * weight, noted when it runs."""

    def __init__(self, index: int, recorder: Recorder) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((WIDTH,), 1.0 + index))
        self.note = lambda: recorder.events.append(f"run {index}")
        self.pause_s = 0.0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.note()
        time.sleep(self.pause_s)
        return hidden * self.weight


class Rig:
    """A stack of blocks served by an executor; no optimizer."""

    def __init__(self, num_units: int, *, slots: int = 2, keep: bool = False, **streams) -> None:
        self.recorder = Recorder()
        self.blocks = nn.ModuleList(Block(index, self.recorder) for index in range(num_units))
        self.store = make_store(num_units, shapes=((WIDTH,),))
        for index, host in enumerate(self.store.units):
            host.compute[0].fill_(1.0 + index)
        self.streams = RecordingStreams(self.recorder, **streams)
        common = {"names": [str(index) for index in range(num_units)], "tracer": self.recorder}
        units = self.store.units
        self.pipeline = HostPipeline(
            host_units=units,
            kernel=TorchKernel(),
            deferral=MomentDeferral([1] * num_units),
            synchronous=False,
            names=common["names"],
            tracer=NullTracer(),
        )
        self.pool = SlotPool(slots, units[0].layout.compute_bytes, CPU)
        self.drain = GradientDrain(
            store=self.store,
            buffers=GradientBuffers(2, units[0].layout.gradient_bytes, self.streams),
            staging_bytes=4096,
            measure_norm=False,
            streams=self.streams,
            pipeline=self.pipeline,
            pin=False,
            **common,
        )
        self.executor = Executor(
            host_units=units,
            streamer=WeightStreamer(
                host_units=units, pool=self.pool, streams=self.streams, publication=self.pipeline, **common
            ),
            drain=self.drain,
            schedule=Schedule(),
            streams=self.streams,
            on_unit_done=lambda unit: self.recorder.events.append(f"done {unit}"),
            **common,
        )
        self.forwards = [
            UnitForward(unit, [True], self.executor, keep_activations=keep)
            for unit in find_units(self.blocks)
            if not unit.is_root
        ]
        for forward in self.forwards:
            forward.install()

    def forward(self, order: list[int], *, input_needs_grad: bool = True) -> torch.Tensor:
        self.executor.begin_forward()
        hidden = torch.ones(WIDTH, requires_grad=input_needs_grad)
        for index in order:
            hidden = self.blocks[index](hidden)
        self.executor.end_forward()
        return hidden.sum()

    def gradients(self) -> list[float | None]:
        """The first element of each unit's gradient of this step, which is then forgotten."""
        found = []
        for index, host in enumerate(self.store.units):
            for event in self.drain.arrivals(index):
                event.synchronize()
            self.pipeline.wait_gradient(index)
            found.append(host.parameter_view("gradient", 0)[0].item() if host.received[0] else None)
            host.clear_gradient()
        return found

    def update(self) -> None:
        """An optimizer step of every unit that leaves the values as they are."""
        for index in range(len(self.store.units)):
            self.recorder.events.append(f"update {index}")
            self.pipeline.update(index, {0: STILL}, self.drain.arrivals(index))
        self.pipeline.wait_all()

    def close(self) -> None:
        for forward in self.forwards:
            forward.remove()
        self.pipeline.close()
        self.streams.close()


@pytest.fixture
def make_rig():
    rigs = []

    def make(*args, **kwargs) -> Rig:
        rigs.append(Rig(*args, **kwargs))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def expected_gradients(order: list[int], num_units: int) -> list[float | None]:
    """d(product of weights)/d(weight): (times used) x product / weight."""
    product = 1.0
    for index in order:
        product *= 1.0 + index
    return [order.count(i) * product / (1.0 + i) if i in order else None for i in range(num_units)]


FORWARD = {
    "first": ["h2d weights 0", "run 0", "h2d weights 1", "run 1", "h2d weights 2", "run 2"],
    # On record: the fetch of a unit is issued before the unit ahead of it runs.
    "then": ["h2d weights 0", "h2d weights 1", "run 0", "h2d weights 2", "run 1", "run 2"],
}
BACKWARD = {
    # Nothing was fetched ahead, so unit 1 is in no slot.
    "first": ["h2d weights 1", "run 2", "d2h gradients 2", "h2d weights 0", "done 2"],
    # Units 1 and 2 still are in the slots that the forward left them in.
    "then": ["run 2", "d2h gradients 2", "h2d weights 0", "done 2"],
}
BACKWARD_END = ["run 1", "d2h gradients 1", "done 1", "run 0", "d2h gradients 0", "done 0"]
UPDATE = ["update 0", "update 1", "update 2"]


def test_three_iterations_of_three_units_on_two_slots(make_rig):
    rig = make_rig(3)
    for when in ("first", "then", "then"):
        loss = rig.forward([0, 1, 2])
        assert rig.recorder.take() == FORWARD[when]
        loss.backward()
        assert rig.recorder.take() == [*BACKWARD[when], *BACKWARD_END]
        assert rig.executor.phase is Phase.IDLE
        rig.update()
        assert rig.recorder.take() == UPDATE


def test_without_an_update_between_nothing_is_fetched_twice(make_rig):
    rig = make_rig(3)
    for _ in range(3):
        rig.forward([0, 1, 2]).backward()
        assert rig.gradients() == expected_gradients([0, 1, 2], 3)
        copies = [event for event in rig.recorder.take() if "h2d" in event]
    # Of six uses two hit what the other pass left behind at each turn.
    assert copies == ["h2d weights 2", "h2d weights 0"]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("order", [[0, 1, 2, 3], [0, 2, 3], [0, 1, 0, 3], [3, 1, 2, 0], [1, 1, 1]])
def test_skipped_repeated_and_reordered_units(make_rig, order, keep):
    rig = make_rig(4, keep=keep)
    for _ in range(2):
        rig.forward([0, 1, 2, 3]).backward()
        rig.gradients()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a unit that runs twice gives a second gradient
            rig.forward(order).backward()
            assert rig.gradients() == expected_gradients(order, 4)


def test_a_kept_activation_is_not_computed_again(make_rig):
    rig = make_rig(3, keep=True)
    rig.forward([0, 1, 2]).backward()
    assert [event for event in rig.recorder.take() if "run" in event] == ["run 0", "run 1", "run 2"]


def test_forwards_without_gradient_leave_the_order_and_expect_no_backward(make_rig):
    rig = make_rig(3)
    with torch.no_grad():
        assert rig.forward([0, 1, 2]).item() == 6.0 * WIDTH
        for block in rig.blocks:  # the raw blocks, without the engine around them
            block(torch.ones(WIDTH))
    assert rig.executor.schedule.order == [0, 1, 2]
    assert not any(rig.executor.schedule.pending(unit) for unit in range(3))
    rig.forward([0, 1, 2]).backward()
    assert rig.gradients() == expected_gradients([0, 1, 2], 3)


def test_a_dropped_graph_leaves_nothing_bound(make_rig):
    rig = make_rig(3)
    loss = rig.forward([0, 1, 2])
    del loss
    gc.collect()
    assert [slot.users for slot in rig.pool.slots] == [0, 0]
    rig.forward([0, 1, 2]).backward()
    assert rig.gradients() == expected_gradients([0, 1, 2], 3)


def test_two_graphs_whose_backwards_come_in_the_other_order(make_rig):
    rig = make_rig(3)
    first, second = rig.forward([0, 1]), rig.forward([1, 2])
    second.backward()
    assert rig.gradients() == expected_gradients([1, 2], 3)
    first.backward()
    assert rig.gradients() == expected_gradients([0, 1], 3)


def test_a_unit_whose_inputs_need_no_gradient_ends_with_the_pass(make_rig):
    rig = make_rig(2)
    for _ in range(2):
        rig.forward([0, 1], input_needs_grad=False).backward()
        # Autograd has no node behind unit 0 that could say when it is over.
        assert [event for event in rig.recorder.take() if event[:3] in ("d2h", "don")] == [
            *["d2h gradients 1", "done 1", "d2h gradients 0", "done 0"],
        ]
        assert [slot.users for slot in rig.pool.slots] == [0, 0]
        assert rig.gradients() == expected_gradients([0, 1], 2)


def test_interleaved_backwards_bind_more_slots_than_there_are(make_rig):
    rig = make_rig(3)
    captured = []
    with torch.enable_grad():
        rig.executor.begin_forward()
        for block in rig.blocks:  # independent branches: all three recompute before any boundary is reached
            captured.append(block(torch.ones(WIDTH, requires_grad=True)))
        rig.executor.end_forward()
    sum(part.sum() for part in captured).backward()
    assert rig.gradients() == [1.0, 1.0, 1.0]
    assert [slot.users for slot in rig.pool.slots] == [0] * len(rig.pool.slots)


def test_an_exception_in_a_unit_names_it_and_the_next_iteration_is_right(make_rig):
    rig = make_rig(3)
    rig.forward([0, 1, 2]).backward()
    expected = rig.gradients()
    note, rig.blocks[1].note = rig.blocks[1].note, lambda: 1 / 0
    with pytest.raises(ZeroDivisionError) as caught:
        rig.forward([0, 1, 2])
    assert any("unit 1 (Block)" in line for line in getattr(caught.value, "__notes__", ["unit 1 (Block)"]))
    rig.blocks[1].note = note
    rig.forward([0, 1, 2]).backward()
    assert rig.gradients() == expected


def test_an_exception_in_backward_frees_every_slot_and_buffer_and_says_what_is_lost(make_rig):
    rig = make_rig(3)
    loss = rig.forward([0, 1, 2])
    note, rig.blocks[1].note = rig.blocks[1].note, lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    rig.blocks[1].note = note
    with pytest.warns(RuntimeWarning, match="the last backward pass did not end; the gradients gathered .* dropped"):
        loss = rig.forward([0, 1, 2])
    assert [slot.users for slot in rig.pool.slots] == [0, 0]
    assert rig.gradients() == [None] * 3
    loss.backward()
    assert rig.gradients() == expected_gradients([0, 1, 2], 3)


def test_reset_with_nothing_to_lose_is_silent(make_rig):
    rig = make_rig(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rig.executor.reset_iteration("asked for")
    assert rig.executor.phase is Phase.IDLE


def bits(rig: Rig, pause_unit: int | None = None) -> list:
    """Gradients of four iterations over changing weights, one block slow."""
    if pause_unit is not None:
        rig.blocks[pause_unit].pause_s = 0.002
    found = []
    for iteration in range(4):
        loss = rig.forward([0, 1, 2, 3])
        loss.backward()
        found.append((loss.item(), rig.gradients()))
        for unit, host in enumerate(rig.store.units):
            host.compute[0].mul_(1.0 + 0.1 * iteration)
            rig.pipeline.bump(unit)
    return found


@pytest.mark.parametrize("delays_s", [{H2D: 0.003}, {D2H: 0.003}, {H2D: 0.002, D2H: 0.002}])
@pytest.mark.parametrize("pause_unit", [None, 0, 2])
@pytest.mark.parametrize("slots", [2, 3])
def test_delayed_flows_give_the_bits_of_the_synchronous_mode(make_rig, delays_s, pause_unit, slots):
    reference = bits(make_rig(4, synchronous=True))
    assert bits(make_rig(4, slots=slots, delays_s=delays_s), pause_unit) == reference


def test_prefetching_hides_the_copies_of_a_step(make_rig):
    def seconds(*, synchronous: bool) -> float:
        rig = make_rig(6, synchronous=synchronous, delays_s={H2D: 0.015})
        for block in rig.blocks:
            block.pause_s = 0.015
        rig.forward(list(range(6))).backward()
        rig.gradients()
        start = time.perf_counter()
        rig.forward(list(range(6))).backward()
        return time.perf_counter() - start

    assert seconds(synchronous=False) < 0.85 * seconds(synchronous=True)
