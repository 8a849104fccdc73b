"""The byte model against what is really allocated, and the refusal before anything is."""

from __future__ import annotations

import pytest
import torch

from megatrain_ds.errors import HostMemoryError
from megatrain_ds.memory.arena import PAGE_BYTES
from megatrain_ds.memory.host_store import HostStore
from megatrain_ds.memory.layout import ParameterSpec, plan_unit
from megatrain_ds.memory.streams import HostStreams
from megatrain_ds.planning.footprint import Footprint, estimate, require_host_memory
from megatrain_ds.runtime.gradient_buffers import GradientBuffers
from megatrain_ds.runtime.slot import SlotPool
from megatrain_ds.telemetry.trace import NullTracer

BF16, FP32 = torch.bfloat16, torch.float32
CPU = torch.device("cpu")


def layout(*shapes: tuple[int, ...], dtype: torch.dtype = BF16, group: int | None = 0):
    return plan_unit([ParameterSpec(f"p{index}", shape, dtype, group) for index, shape in enumerate(shapes)])


def plan(streamed, roots=(), *, accumulates: bool = False, accumulation_dtype: torch.dtype = FP32) -> Footprint:
    return estimate(
        streamed=streamed,
        roots=roots,
        accumulates=accumulates,
        accumulation_dtype=accumulation_dtype,
        weight_slots=3,
        gradient_slots=2,
        staging_blocks=3,
    )


PAGES = [layout((64, 64)), layout((128, 64))]  # 4096 and 8192 parameters: whole pages in every term
ROOTS = [layout((32, 128))]  # 4096
TOTAL = 4096 + 8192 + 4096


def test_every_term_without_accumulation():
    footprint = plan(PAGES, ROOTS)
    assert footprint.num_parameters == TOTAL
    assert footprint.compute_bytes == 2 * TOTAL
    assert footprint.gradient_bytes == 2 * TOTAL
    assert footprint.master_bytes == 4 * TOTAL
    assert footprint.moment_bytes == 2 * 4 * TOTAL
    assert footprint.accumulator_bytes == 0
    assert footprint.host_bytes_per_parameter == 16.0
    assert footprint.slot_bytes == 3 * 2 * 8192  # three slots of the largest streamed unit
    assert footprint.gradient_slot_bytes == 2 * 2 * 8192
    assert footprint.root_bytes == 2 * 4096
    assert footprint.device_bytes == footprint.slot_bytes + footprint.gradient_slot_bytes + footprint.root_bytes


@pytest.mark.parametrize(
    ("dtype", "group", "expected"),
    [(BF16, 0, 16.0), (FP32, 0, 16.0), (BF16, None, 2.0), (FP32, None, 4.0)],
)
def test_host_bytes_a_parameter(dtype, group, expected):
    assert plan([layout((64, 64), dtype=dtype, group=group)]).host_bytes_per_parameter == expected


@pytest.mark.parametrize(("accumulation_dtype", "accumulator"), [(FP32, 4), (BF16, 2)])
def test_accumulation_costs_an_accumulator_and_a_ring(accumulation_dtype, accumulator):
    footprint = plan(PAGES, ROOTS, accumulates=True, accumulation_dtype=accumulation_dtype)
    assert footprint.accumulator_bytes == accumulator * TOTAL
    assert footprint.staging_block_bytes == 1 << 20  # the smallest block, larger than any of these units
    assert footprint.gradient_bytes == 3 * (1 << 20)
    large = plan([layout((1024, 1025))], accumulates=True)
    assert large.staging_block_bytes == -(-2 * 1024 * 1025 // PAGE_BYTES) * PAGE_BYTES


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("accumulation_dtype", [FP32, BF16])
def test_the_model_says_what_is_allocated(accumulates, accumulation_dtype):
    # Odd sizes, mixed dtypes, frozen and empty parameters: every rounding takes part.
    specs = [
        [
            ParameterSpec("a", (3, 77), BF16, 0),
            ParameterSpec("b", (5,), FP32, 1),
            ParameterSpec("c", (999,), BF16, None),
        ],
        [ParameterSpec("d", (4097,), BF16, 0), ParameterSpec("e", (0,), BF16, 0)],
        [ParameterSpec("f", (11,), FP32, None)],
    ]
    streamed, roots = [plan_unit(part) for part in specs], [layout((7, 9)), layout((2, 2), group=None)]
    footprint = plan(streamed, roots, accumulates=accumulates, accumulation_dtype=accumulation_dtype)
    store = HostStore(
        [*streamed, *roots], pin=False, direct_gradients=not accumulates, accumulation_dtype=accumulation_dtype
    )
    ring = 3 * footprint.staging_block_bytes if accumulates else 0
    assert store.num_bytes + ring == footprint.host_bytes
    assert SlotPool(3, footprint.largest_unit_bytes, CPU).num_bytes == footprint.slot_bytes
    streams = HostStreams(CPU, synchronous=False, tracer=NullTracer())
    assert GradientBuffers(2, footprint.largest_gradient_bytes, streams).num_bytes == footprint.gradient_slot_bytes
    streams.close()


def test_nothing_streams_and_nothing_at_all():
    assert plan([], ROOTS).slot_bytes == plan([], ROOTS).gradient_slot_bytes == 0
    assert plan([]).host_bytes_per_parameter == 0.0


def test_too_little_memory_is_refused_with_both_figures():
    footprint = plan(PAGES)
    require_host_memory(footprint, have_bytes=footprint.host_bytes)
    with pytest.raises(HostMemoryError) as caught:
        require_host_memory(footprint, have_bytes=footprint.host_bytes - 1)
    assert (caught.value.need_bytes, caught.value.have_bytes) == (16 * 12288, 16 * 12288 - 1)
    text = str(caught.value)
    assert "need 0.00 GiB (196608 bytes), have 0.00 GiB (196607 bytes)" in text
    assert "12288 parameters at 16.0 bytes" in text
    assert '"host_memory_limit_gib"' in text
