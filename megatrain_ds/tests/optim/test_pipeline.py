"""The host pipeline: which stretches are updated, versions and tickets, accumulation, errors, the synchronous mode."""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from dataclasses import replace

import pytest
import torch

from megatrain_ds.memory.host_store import HostStore
from megatrain_ds.memory.layout import ParameterSpec, plan_unit
from megatrain_ds.optim.adam import AdamStep, UpdatePart
from megatrain_ds.optim.deferral import MomentDeferral
from megatrain_ds.optim.pipeline import GradientPiece, HostPipeline
from megatrain_ds.optim.torch_kernel import TorchKernel
from megatrain_ds.telemetry.trace import NullTracer

BF16, FP32 = torch.bfloat16, torch.float32
HYPER = AdamStep(
    lr=0.5,
    beta1=0.9,
    beta2=0.99,
    eps=1e-8,
    weight_decay=0.0,
    decoupled=True,
    bias_correction=True,
    step=1,
    grad_scale=1.0,
)
SPECS = [ParameterSpec(name, (65,), BF16, 0) for name in "abc"]


class RecordingKernel(TorchKernel):
    """The torch kernel, which also notes each call and can be held up or made to fail."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, float]] = []
        self.parts: list[UpdatePart] = []
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None

    def update(self, *, master, grad, compute, hyper, part, **moments):
        self.gate.wait()
        if self.error is not None:
            raise self.error
        self.calls.append((master.numel(), hyper.step, hyper.lr))
        self.parts.append(part)
        super().update(master=master, grad=grad, compute=compute, hyper=hyper, part=part, **moments)


class Rig:
    def __init__(self, specs=SPECS, *, num_units: int = 1, direct: bool = True, synchronous: bool = False) -> None:
        self.store = HostStore(
            [plan_unit(specs)] * num_units, pin=False, direct_gradients=direct, accumulation_dtype=FP32
        )
        self.kernel = RecordingKernel()
        self.pipeline = HostPipeline(
            host_units=self.store.units,
            names=[f"layers.{index}" for index in range(num_units)],
            kernel=self.kernel,
            tracer=NullTracer(),
            deferral=MomentDeferral([3 * 65] * num_units),
            synchronous=synchronous,
        )

    def give(self, *indices: int, value: float = 1.0, unit: int = 0) -> None:
        host = self.store.units[unit]
        for index in indices:
            host.parameter_view("gradient", index).fill_(value)
            host.received[index] = True

    def step(self, unit: int = 0, hyper=HYPER) -> None:
        self.pipeline.update(unit, {0: hyper, 1: hyper}, [])
        self.pipeline.wait(unit)


@pytest.fixture
def make_rig():
    rigs = []

    def make(*args, **kwargs) -> Rig:
        rigs.append(Rig(*args, **kwargs))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.kernel.gate.set()
        rig.pipeline.close()


def test_neighbours_are_one_kernel_call_padding_included(make_rig):
    rig = make_rig()
    rig.give(0, 1, 2)
    rig.step()
    assert rig.kernel.calls == [(3 * 128, 1, 0.5)]


def test_a_gradient_missing_in_the_middle_shifts_nothing_and_is_not_read(make_rig):
    rig = make_rig()
    (unit,) = rig.store.units
    unit.gradient_block.view(BF16).fill_(float("nan"))  # what an earlier step may have left
    rig.give(0, value=1.0)
    rig.give(2, value=-1.0)
    rig.step()
    assert rig.kernel.calls == [(128, 1, 0.5), (128, 1, 0.5)]
    # Adam's first step is lr x the gradient's sign; without a gradient nothing moves.
    assert [round(unit.parameter_view("master", i)[64].item(), 4) for i in range(3)] == [-0.5, 0.0, 0.5]
    assert [unit.compute[i].unique().tolist() for i in range(3)] == [[-0.5], [0.0], [0.5]]
    assert not unit.parameter_view("exp_avg", 1).any()
    assert unit.steps == [1, 0, 1]


def test_the_gradient_of_an_earlier_step_is_never_used_again(make_rig):
    rig = make_rig()
    rig.give(0, 1, 2)
    rig.step()
    (unit,) = rig.store.units
    after = unit.parameter_view("master", 1).clone()
    rig.give(0, 2)
    rig.step()
    rig.step()
    assert torch.equal(unit.parameter_view("master", 1), after)
    assert unit.steps == [2, 1, 2]


def test_different_step_counts_groups_and_dtypes_split_the_calls(make_rig):
    specs = [*SPECS, ParameterSpec("other group", (64,), BF16, 1), ParameterSpec("scale", (64,), FP32, 0)]
    rig = make_rig(specs)
    rig.give(1)
    rig.step()
    rig.give(0, 1, 2, 3, 4)
    rig.pipeline.update(0, {0: HYPER, 1: replace(HYPER, lr=0.25)}, [])
    rig.pipeline.wait_all()
    assert rig.kernel.calls == [
        (128, 1, 0.5),  # b alone
        *[(128, 1, 0.5), (128, 2, 0.5), (128, 1, 0.5)],  # a, b a step ahead, c
        (64, 1, 0.25),  # the other group
        (64, 1, 0.5),  # fp32: another run
    ]


def test_a_unit_without_gradients_is_not_updated(make_rig):
    rig = make_rig()
    rig.step()
    assert rig.kernel.calls == []
    assert (rig.pipeline.version(0), rig.store.units[0].steps) == (0, [0, 0, 0])


def test_the_version_rises_when_the_update_is_queued_and_each_unit_waits_for_its_own(make_rig):
    rig = make_rig(num_units=2)
    rig.kernel.gate.clear()
    for unit in (0, 1):
        rig.give(0, unit=unit)
    rig.pipeline.update(1, {0: HYPER}, [])
    assert [rig.pipeline.version(unit) for unit in (0, 1)] == [0, 1]
    assert [rig.pipeline.is_current(unit) for unit in (0, 1)] == [True, False]
    rig.pipeline.wait(0)
    assert rig.store.units[1].received == [False] * 3
    rig.kernel.gate.set()
    rig.pipeline.wait(1)
    assert rig.pipeline.is_current(1)
    rig.pipeline.bump(0)
    assert (rig.pipeline.version(0), rig.pipeline.is_current(0)) == (1, True)


def test_pieces_overwrite_first_and_add_then(make_rig):
    rig = make_rig([ParameterSpec("w", (4,), BF16, 0)], direct=False)
    (unit,) = rig.store.units
    unit.accumulator[0].fill_(float("nan"))
    for value, overwrite in ((1.0, True), (256.0, False), (1.0, False)):
        piece = GradientPiece(0, 0, torch.full((4,), value, dtype=BF16), overwrite=overwrite)
        ticket = rig.pipeline.accumulate(0, [piece], None)
    rig.pipeline.wait_gradient(0)
    rig.pipeline.wait_ticket(ticket)
    # 258 is not a bf16 value: the sum is kept in fp32.
    assert unit.parameter_view("gradient", 0).tolist() == [258.0] * 4
    assert unit.accumulator[0][4:].isnan().all()


def test_an_update_comes_after_the_accumulations_before_it(make_rig):
    rig = make_rig([ParameterSpec("w", (4,), BF16, 0)], direct=False)
    rig.pipeline.accumulate(0, [GradientPiece(0, 0, torch.full((4,), -1.0, dtype=BF16), overwrite=True)], None)
    rig.store.units[0].received = [True]
    rig.step()
    assert rig.store.units[0].compute[0].tolist() == [0.5] * 4


def test_synchronous_means_done_when_the_call_returns(make_rig):
    rig = make_rig(synchronous=True)
    rig.give(0)
    rig.pipeline.update(0, {0: HYPER}, [])
    assert rig.pipeline.is_current(0)
    assert len(rig.kernel.calls) == 1


def test_an_error_names_the_unit_and_is_raised_at_wait_and_at_the_next_update(make_rig):
    rig = make_rig(num_units=2)
    rig.kernel.error = ArithmeticError("bad update")
    rig.give(0, unit=1)
    rig.pipeline.update(1, {0: HYPER}, [])
    for call in (rig.pipeline.wait, rig.pipeline.wait_gradient):
        with pytest.raises(ArithmeticError, match="bad update") as caught:
            call(1)
        if sys.version_info >= (3, 11):  # before, errors carry no notes
            assert caught.value.__notes__ == [
                "megatrain: raised in the host worker during the optimizer step of layers.1"
            ]
    rig.give(0)
    with pytest.raises(ArithmeticError):
        rig.pipeline.update(0, {0: HYPER}, [])
    rig.pipeline.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rig.pipeline.close()


def test_deferred_moments_come_after_all_weights_newest_first(make_rig):
    rig = make_rig(num_units=3)
    rig.kernel.splits = True
    rig.kernel.gate.clear()
    for unit in range(3):
        rig.give(0, 1, 2, unit=unit, value=1.0 + unit)
        rig.pipeline.update(unit, {0: HYPER}, [], defer_moments=unit != 1)
    rig.pipeline.write_moments()
    rig.kernel.gate.set()
    rig.pipeline.wait_all()
    whole, weights, moments = UpdatePart.ALL, UpdatePart.WEIGHTS, UpdatePart.MOMENTS
    assert rig.kernel.parts == [weights, whole, weights, moments, moments]
    expected = make_rig(num_units=3)
    for unit in range(3):
        expected.give(0, 1, 2, unit=unit, value=1.0 + unit)
        expected.step(unit)
    for unit in range(3):
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            ours, theirs = (r.store.units[unit].parameter_view(kind, 1) for r in (rig, expected))
            assert torch.equal(ours, theirs)
        assert torch.equal(rig.store.units[unit].compute[1], expected.store.units[unit].compute[1])
    assert rig.store.units[0].steps == [1, 1, 1]


def test_weights_are_current_before_deferred_moments_are_written(make_rig):
    rig = make_rig()
    rig.kernel.splits = True
    rig.give(0)
    rig.pipeline.update(0, {0: HYPER}, [], defer_moments=True)
    rig.pipeline.wait_weights(0)
    rig.kernel.gate.clear()
    rig.pipeline.write_moments()
    assert rig.pipeline.is_current(0)
    assert not rig.store.units[0].parameter_view("exp_avg", 0).any()
    rig.kernel.gate.set()
    rig.pipeline.wait(0)
    assert rig.store.units[0].parameter_view("exp_avg", 0).all()


@pytest.mark.parametrize(("splits", "decoupled", "weight_decay"), [(False, True, 0.1), (True, False, 0.1)])
def test_what_cannot_be_split_is_updated_in_one_pass(make_rig, splits, decoupled, weight_decay):
    rig = make_rig()
    rig.kernel.splits = splits
    rig.give(0)
    hyper = replace(HYPER, decoupled=decoupled, weight_decay=weight_decay)
    rig.pipeline.update(0, {0: hyper}, [], defer_moments=True)
    rig.pipeline.write_moments()
    rig.pipeline.wait_all()
    assert rig.kernel.parts == [UpdatePart.ALL]


def test_moments_are_queued_though_queueing_is_interrupted(make_rig):
    rig = make_rig(num_units=2)
    rig.kernel.splits = True
    rig.give(0)

    def interrupted():
        with rig.pipeline.updating():
            rig.pipeline.update(0, {0: HYPER}, [], defer_moments=True)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    rig.pipeline.wait(0)
    assert rig.kernel.parts == [UpdatePart.WEIGHTS, UpdatePart.MOMENTS]


def test_an_error_that_nobody_waited_for_is_a_warning_at_the_end(make_rig):
    rig = make_rig()
    rig.kernel.error = OSError("bad memory")
    rig.give(0)
    rig.pipeline.update(0, {0: HYPER}, [])
    with pytest.warns(RuntimeWarning, match=r"the last updates failed.*OSError: bad memory.*last checkpoint"):
        rig.pipeline.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rig.pipeline.close()


def test_waits_for_updates_and_accumulations_are_named(make_rig):
    rig = make_rig(direct=False)
    named = []

    class Tracer(NullTracer):
        def host_span(self, track, name):
            named.append((track, name))
            return contextlib.nullcontext()

    rig.pipeline._tracer = Tracer()
    rig.pipeline.wait(0)
    rig.pipeline.wait_gradient(0)
    assert named == []
    held = threading.Event()

    class Arrival:
        def synchronize(self):
            held.wait()

    rig.pipeline.accumulate(0, [], Arrival())
    threading.Timer(0.05, held.set).start()
    rig.pipeline.wait_gradient(0)
    assert ("wait", "accumulation of layers.0") in named
    rig.kernel.gate.clear()
    rig.give(0)
    rig.pipeline.update(0, {0: HYPER}, [])
    threading.Timer(0.05, rig.kernel.gate.set).start()
    rig.pipeline.wait(0)
    assert ("wait", "the last update of layers.0") in named
