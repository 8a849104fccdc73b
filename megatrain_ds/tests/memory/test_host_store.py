"""The host store: bytes by formula, which memory is shared, reconciliation of user writes, accumulators."""

from __future__ import annotations

import pytest
import torch

from megatrain_ds.memory.arena import PAGE_BYTES
from megatrain_ds.memory.host_store import HostStore
from megatrain_ds.memory.layout import ParameterSpec, plan_unit

BF16, FP32 = torch.bfloat16, torch.float32
NUMEL = 4 * PAGE_BYTES  # whole pages in every dtype, so that the formulas below are exact


def layout(*entries: tuple[str, tuple[int, ...], torch.dtype, int | None]):
    return plan_unit([ParameterSpec(*entry) for entry in entries])


def make_store(*layouts, direct: bool = True, dtype: torch.dtype = FP32) -> HostStore:
    return HostStore(layouts, pin=False, direct_gradients=direct, accumulation_dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "group", "direct", "accumulation", "expected"),
    [
        (BF16, 0, True, FP32, 2 + 2 + 4 + 8),  # compute, gradient, master, two moments
        (FP32, 0, True, FP32, 4 + 4 + 0 + 8),  # the compute copy is the master
        (BF16, 0, False, FP32, 2 + 4 + 4 + 8),  # accumulator in place of the gradient block (the ring is not here)
        (BF16, 0, False, BF16, 2 + 2 + 4 + 8),
        (BF16, None, True, FP32, 2),  # frozen: compute alone
        (FP32, None, False, FP32, 4),
    ],
)
def test_bytes_a_parameter(dtype, group, direct, accumulation, expected):
    store = make_store(*[layout(("w", (NUMEL,), dtype, group))] * 2, direct=direct, dtype=accumulation)
    assert store.num_bytes == 2 * NUMEL * expected


def test_compute_copy_gradient_and_states_are_views_of_the_blocks():
    store = make_store(layout(("w", (4, 3), BF16, 0), ("scale", (5,), FP32, 0), ("frozen", (2,), BF16, None)))
    (unit,) = store.units
    low, full, frozen = unit.states
    assert frozen is None
    assert full.master.data_ptr() == full.compute.data_ptr()
    assert low.master.data_ptr() != low.compute.data_ptr()
    unit.compute[0].fill_(1.5)
    assert low.compute[:12].tolist() == [1.5] * 12
    assert unit.parameter_view("compute", 0).data_ptr() == unit.compute[0].data_ptr()
    unit.parameter_view("gradient", 1).fill_(2.0)
    assert unit.gradient_run(1)[:5].tolist() == [2.0] * 5
    pointers = [unit.parameter_view(kind, 0).data_ptr() for kind in ("master", "exp_avg", "exp_avg_sq", "gradient")]
    assert len(set(pointers)) == 4
    assert [tuple(unit.parameter_view(kind, 0).shape) for kind in ("master", "gradient")] == [(4, 3), (4, 3)]


def test_reconcile_carries_only_what_the_user_wrote():
    store = make_store(layout(("w", (4,), BF16, 0)))
    (unit,) = store.units
    master = unit.parameter_view("master", 0)
    master.copy_(torch.tensor([1.0001, 2.0002, 3.0003, 4.0004]))
    unit.compute[0].copy_(master)
    kept = master.clone()
    assert not unit.reconcile(0)
    assert torch.equal(master, kept)
    unit.compute[0][2] = 7.0
    assert unit.reconcile(0)
    # Bits below bf16 survive where the compute copy still is the rounded master.
    assert torch.equal(master, torch.tensor([kept[0], kept[1], 7.0, kept[3]]))


def test_reconcile_leaves_neighbours_frozen_and_fp32_parameters_alone():
    store = make_store(
        layout(("a", (3,), BF16, 0), ("b", (3,), BF16, 0), ("s", (2,), FP32, 0), ("f", (2,), BF16, None))
    )
    (unit,) = store.units
    for view in unit.compute:
        view.fill_(2.0)
    assert unit.reconcile(1)
    assert unit.parameter_view("master", 0).tolist() == [0.0] * 3
    assert unit.parameter_view("master", 1).tolist() == [2.0] * 3
    assert [unit.reconcile(2), unit.reconcile(3)] == [False, False]
    assert unit.parameter_view("master", 2).tolist() == [2.0] * 2


def test_accumulators_replace_the_gradient_block_run_by_run():
    store = make_store(layout(("a", (3,), BF16, 0), ("s", (2,), FP32, 0), ("f", (2,), BF16, None)), direct=False)
    (unit,) = store.units
    assert unit.gradient_block is None
    assert [None if run is None else (run.dtype, run.numel()) for run in unit.accumulator] == [
        (FP32, 64),
        (FP32, 64),
        None,
    ]
    unit.parameter_view("gradient", 0).fill_(1.0)
    unit.parameter_view("gradient", 1).fill_(2.0)
    assert unit.accumulator[0][:3].tolist() == [1.0] * 3
    assert unit.accumulator[1][:2].tolist() == [2.0] * 2


def test_an_accumulator_can_be_added_to_one_unit():
    store = make_store(*[layout(("w", (NUMEL,), BF16, 0))] * 2)
    before = store.num_bytes
    store.add_accumulator(1)
    assert store.num_bytes - before == 4 * NUMEL
    assert [unit.accumulator is None for unit in store.units] == [True, False]
    assert store.units[1].parameter_view("gradient", 0).dtype is FP32


def test_clearing_gradients_forgets_them_without_touching_memory():
    store = make_store(layout(("a", (3,), BF16, 0), ("b", (3,), BF16, 0)))
    (unit,) = store.units
    unit.parameter_view("gradient", 0).fill_(5.0)
    unit.received = [True, False]
    unit.clear_gradient()
    assert unit.received == [False, False]
    assert unit.parameter_view("gradient", 0).tolist() == [5.0] * 3


def test_close_keeps_values_readable():
    store = make_store(layout(("a", (3,), BF16, 0)))
    store.units[0].compute[0].fill_(1.0)
    store.close()
    store.close()
    assert store.units[0].compute[0].tolist() == [1.0] * 3
