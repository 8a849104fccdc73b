"""The gradient drain: missing gradients, second gradients, staging under a slow worker, norms, races, growth."""

from __future__ import annotations

import time
import warnings

import pytest
import torch

from megatrain_ds.memory.streams import D2H
from megatrain_ds.optim.deferral import MomentDeferral
from megatrain_ds.optim.pipeline import HostPipeline
from megatrain_ds.optim.torch_kernel import TorchKernel
from megatrain_ds.runtime.gradient_buffers import GradientBuffers
from megatrain_ds.runtime.gradients import GradientDrain
from megatrain_ds.runtime.staging import STAGING_BLOCKS, StagingRing
from megatrain_ds.tests.runtime.fakes import NUMEL, Recorder, RecordingStreams, make_store

SHAPES = ((NUMEL,), (4, 8), (3,))  # the middle one is half a run's alignment: padding on both sides


class SlowKernel(TorchKernel):
    """The torch kernel after a pause."""

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s

    def accumulate(self, **kwargs):
        time.sleep(self.pause_s)
        super().accumulate(**kwargs)


class Rig:
    """A drain over real memory, flows and worker."""

    def __init__(
        self,
        num_units: int = 1,
        *,
        direct: bool = True,
        buffers: int = 2,
        pause_s: float = 0.0,
        staging_bytes: int | None = None,
        measure: bool = True,
        **streams,
    ) -> None:
        self.recorder = Recorder()
        self.store = make_store(num_units, shapes=SHAPES, direct=direct)
        self.streams = RecordingStreams(self.recorder, **streams)
        names = [f"unit {index}" for index in range(num_units)]
        self.pipeline = HostPipeline(
            host_units=self.store.units,
            names=names,
            kernel=SlowKernel(pause_s),
            tracer=self.recorder,
            deferral=MomentDeferral([1] * num_units),
            synchronous=self.streams.synchronous,
        )
        gradient_bytes = self.store.units[0].layout.gradient_bytes
        self.buffers = GradientBuffers(buffers, gradient_bytes, self.streams)
        self.drain = GradientDrain(
            store=self.store,
            names=names,
            buffers=self.buffers,
            staging_bytes=staging_bytes or gradient_bytes,
            measure_norm=measure,
            streams=self.streams,
            pipeline=self.pipeline,
            tracer=self.recorder,
            pin=False,
        )

    def backward(self, unit: int, values: dict[int, float]) -> None:
        """One backward of a unit that gives parameter `index` the constant gradient `values[index]`."""
        buffer = self.drain.buffers.take()
        for index, value in values.items():
            self.drain.put(buffer, unit, index, torch.full(SHAPES[index], value))
        self.drain.flush(buffer, unit, sorted(values))

    def gradients(self, unit: int) -> list[list[float]]:
        """The distinct values of each received gradient on the host, once they have arrived."""
        for event in self.drain.peek_arrivals(unit):
            event.synchronize()
        self.pipeline.wait_gradient(unit)
        host = self.store.units[unit]
        return [
            host.parameter_view("gradient", index).unique().tolist() if got else []
            for index, got in enumerate(host.received)
        ]

    def close(self) -> None:
        self.pipeline.close()
        self.streams.close()
        self.drain.close()


@pytest.fixture
def make_rig():
    rigs = []

    def make(*args, **kwargs) -> Rig:
        rigs.append(Rig(*args, **kwargs))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def test_three_backwards_of_two_units_in_events(make_rig):
    rig = make_rig(2)
    for step in range(3):
        for unit in (1, 0):
            rig.backward(unit, {0: step + 0.5, 1: step + 1.5, 2: step + 2.5})
        assert rig.recorder.take() == ["d2h gradients unit 1", "d2h gradients unit 0"]
        assert [rig.gradients(unit) for unit in (0, 1)] == [[[step + 0.5], [step + 1.5], [step + 2.5]]] * 2
        assert len(rig.drain.arrivals(0)) == 1
        assert rig.drain.arrivals(0) == []
        for host in rig.store.units:
            host.clear_gradient()


def test_a_missing_gradient_shifts_nothing_and_poison_stays_where_it_is(make_rig):
    rig = make_rig()
    (host,) = rig.store.units
    host.gradient_block.view(torch.float32).fill_(float("nan"))
    rig.backward(0, {0: 1.0, 2: 3.0})
    assert rig.gradients(0) == [[1.0], [], [3.0]]
    assert host.received == [True, False, True]
    assert host.parameter_view("gradient", 1).isnan().all()  # the copy went around it
    # Norms: sqrt(64 x 1), none, sqrt(3 x 9); a gradient that did not come counts 0.
    assert rig.drain.norms() == [[8.0, 0.0, 27**0.5]]


def test_neighbouring_gradients_leave_in_one_copy_a_gap_splits_it(make_rig):
    rig = make_rig()
    pairs: list[int] = []
    original = rig.streams._enqueue

    def count(flow, copies, after, label):
        pairs.append(len(copies))
        return original(flow, copies, after, label)

    rig.streams._enqueue = count
    rig.backward(0, {0: 1.0, 1: 1.0, 2: 1.0})
    rig.store.units[0].clear_gradient()
    rig.backward(0, {0: 1.0, 2: 1.0})
    assert pairs == [1, 2]


@pytest.mark.parametrize("delays_s", [{}, {D2H: 0.005}])
@pytest.mark.parametrize("buffers", [1, 2])
def test_a_buffer_is_not_overwritten_before_it_has_left(make_rig, delays_s, buffers):
    rig = make_rig(4, buffers=buffers, delays_s=delays_s)
    for unit in (3, 2, 1, 0):
        rig.backward(unit, {0: unit + 1.0, 1: unit + 2.0, 2: unit + 3.0})
    assert [rig.gradients(unit) for unit in range(4)] == [[[u + 1.0], [u + 2.0], [u + 3.0]] for u in range(4)]
    assert rig.buffers.num_bytes == buffers * rig.store.units[0].layout.gradient_bytes


def test_interleaved_backwards_get_one_more_buffer_said_once(make_rig):
    rig = make_rig(2, buffers=1)
    first = rig.buffers.take()
    with pytest.warns(RuntimeWarning, match=r'all 1 gradient buffers are taken.*"gradient_slots": 2'):
        second = rig.buffers.take()
    for unit, buffer in enumerate((first, second)):
        rig.drain.put(buffer, unit, 0, torch.full(SHAPES[0], unit + 1.0))
    rig.drain.flush(first, 0, [0])
    rig.drain.flush(second, 1, [0])
    assert [rig.gradients(unit)[0] for unit in (0, 1)] == [[1.0], [2.0]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rig.buffers.take()
        rig.buffers.take()
    rig.buffers.release_all()
    assert not any(buffer.taken for buffer in (first, second))


def test_a_second_gradient_without_planned_accumulation_is_added(make_rig):
    rig = make_rig(2)
    rig.store.units[0].gradient_block.view(torch.float32).fill_(float("nan"))
    rig.backward(0, {0: 1.0, 1: 2.0})
    with pytest.warns(RuntimeWarning, match=r"a second gradient of unit 0 arrived before step\(\).*accumulators are"):
        rig.backward(0, {0: 10.0, 2: 5.0})
    assert rig.gradients(0) == [[11.0], [2.0], [5.0]]
    assert [unit.accumulator is None for unit in rig.store.units] == [False, True]
    norms = rig.drain.norms()[0]
    assert norms == pytest.approx([88.0, 128**0.5, 75**0.5], rel=1e-12)
    # The next step has the accumulator, and overwrites it.
    rig.store.units[0].clear_gradient()
    rig.backward(0, {0: 4.0})
    rig.backward(0, {0: 4.0, 1: 1.0})
    assert rig.gradients(0) == [[8.0], [1.0], []]


@pytest.mark.parametrize("delays_s", [{}, {D2H: 0.004}])
@pytest.mark.parametrize("pause_s", [0.0, 0.004])
def test_staging_blocks_survive_a_slow_worker_and_slow_copies(make_rig, delays_s, pause_s):
    rig = make_rig(2, direct=False, pause_s=pause_s, delays_s=delays_s)
    for micro in range(2 * STAGING_BLOCKS):
        for unit in (1, 0):
            rig.backward(unit, {0: 2.0**micro, 1: unit + 1.0, 2: -1.0})
    total = 2.0 ** (2 * STAGING_BLOCKS) - 1
    for unit in (0, 1):
        assert rig.gradients(unit) == [[total], [2.0 * STAGING_BLOCKS * (unit + 1.0)], [-2.0 * STAGING_BLOCKS]]
    assert rig.drain.staging.num_bytes == rig.drain.staging.arena.num_bytes


def test_waits_for_a_staging_block_are_traced(make_rig):
    rig = make_rig(direct=False)
    rig.backward(0, {0: 1.0})
    assert rig.recorder.take()[:2] == ["wait a staging block", "d2h gradients unit 0"]


def test_the_ring_hands_out_a_block_again_only_after_its_ticket(make_rig):
    rig = make_rig(direct=False, pause_s=0.03)
    ring = StagingRing(256, pin=False, pipeline=rig.pipeline)
    order = []
    tickets = []
    for _ in range(STAGING_BLOCKS + 1):
        index, block = ring.take()
        order.append(index)
        done = [rig.pipeline._worker.done(ticket) for ticket in tickets[:1]]
        tickets.append(rig.pipeline.accumulate(0, [], None))
        ring.give_back(index, tickets[-1])
        assert block.numel() == 256
    assert order == [0, 1, 2, 0]
    assert done == [True]
    ring.arena.close()


@pytest.mark.parametrize("direct", [True, False])
def test_root_gradients_arrive_in_pieces_where_they_are_larger_than_the_ring(make_rig, direct):
    rig = make_rig(direct=direct, staging_bytes=64)  # 16 fp32 elements: parameter 0 takes four pieces
    grad = torch.arange(float(NUMEL))
    rig.drain.put_root(0, 0, grad)
    if not direct:
        rig.drain.put_root(0, 0, grad)
    rig.gradients(0)
    assert torch.equal(rig.store.units[0].parameter_view("gradient", 0), grad if direct else 2 * grad)
    copies = [event for event in rig.recorder.take() if event.startswith("d2h")]
    assert copies == ["d2h gradient 0.0"] * (1 if direct else 8)


def test_sparse_and_strided_root_gradients_are_made_dense(make_rig):
    rig = make_rig()
    indices = torch.tensor([[0, 3]])
    rig.drain.put_root(0, 1, torch.sparse_coo_tensor(indices, torch.ones(2, 8), (4, 8), check_invariants=True))
    rig.drain.put_root(0, 0, torch.arange(2.0 * NUMEL)[::2])
    rig.gradients(0)
    host = rig.store.units[0]
    assert host.parameter_view("gradient", 1).sum(1).tolist() == [8.0, 0.0, 0.0, 8.0]
    assert torch.equal(host.parameter_view("gradient", 0), torch.arange(2.0 * NUMEL)[::2])


def test_gradients_in_flight_are_let_go_when_they_have_arrived(make_rig):
    rig = make_rig(delays_s={D2H: 0.02})
    rig.drain.put_root(0, 0, torch.ones(NUMEL))
    rig.drain.reap()
    assert len(rig.drain._in_flight) == 1
    rig.drain.reap(wait=True)
    assert rig.drain._in_flight == []


def test_norms_are_those_of_the_gradients_and_carry_infinities(make_rig):
    rig = make_rig(2)
    rig.backward(1, {0: 3.0, 1: float("inf")})
    assert rig.drain.norms() == [[0.0] * 3, [24.0, float("inf"), 0.0]]
    rig.gradients(1)
    rig.store.units[1].parameter_view("gradient", 1).fill_(0.5)
    rig.drain.remeasure(1, 1)
    assert rig.drain.norms()[1][1] == pytest.approx((32 * 0.25) ** 0.5, rel=1e-12)


def test_norms_are_not_measured_where_nobody_asks(make_rig):
    rig = make_rig(measure=False)
    rig.backward(0, {0: 1.0})
    assert rig.drain._norms.numel() == 0


def test_reset_drops_gradients_arrivals_and_buffers(make_rig):
    rig = make_rig(buffers=1)
    rig.drain.buffers.take()
    rig.drain.put_root(0, 1, torch.ones(4, 8))
    rig.drain.reset()
    assert rig.store.units[0].received == [False] * 3
    assert rig.drain.arrivals(0) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rig.backward(0, {0: 2.0})
    assert rig.gradients(0) == [[2.0], [], []]


def test_many_steps_allocate_nothing_more(make_rig):
    rig = make_rig(2, direct=False)
    sizes = set()
    for _ in range(20):
        for unit in (1, 0):
            rig.backward(unit, {0: 1.0, 1: 1.0, 2: 1.0})
            rig.drain.put_root(unit, 0, torch.ones(NUMEL))
        for host in rig.store.units:
            host.clear_gradient()
        rig.drain.reap(wait=True)
        sizes.add((rig.store.num_bytes, rig.buffers.num_bytes, len(rig.store.arenas), len(rig.drain._in_flight)))
    assert len(sizes) == 1
