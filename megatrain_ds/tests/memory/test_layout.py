"""The flat layout of a unit: order, alignment, prefixes, and views that share the block."""

from __future__ import annotations

import pytest
import torch

from megatrain_ds.memory.layout import ELEMENT_ALIGNMENT, ParameterSpec, align, block_views, plan_unit, run_view

BF16, FP32 = torch.bfloat16, torch.float32


def spec(name: str, shape: tuple[int, ...], group: int | None = 0, dtype: torch.dtype = BF16) -> ParameterSpec:
    return ParameterSpec(name, shape, dtype, group)


MIXED = [
    spec("frozen", (3, 5), group=None),
    spec("late_group", (70,), group=1),
    spec("scale", (9,), dtype=FP32),
    spec("weight", (8, 16)),
    spec("bias", (1,)),
]


@pytest.mark.parametrize(("value", "multiple", "expected"), [(0, 64, 0), (1, 64, 64), (64, 64, 64), (65, 64, 128)])
def test_align_rounds_up(value, multiple, expected):
    assert align(value, multiple) == expected


def test_trainable_runs_come_first_one_a_dtype_sorted_by_group():
    layout = plan_unit(MIXED)
    placed = sorted(layout.placements, key=lambda place: place.byte_offset)
    assert [place.spec.name for place in placed] == ["weight", "bias", "late_group", "scale", "frozen"]
    assert [(run.dtype, run.trainable) for run in layout.runs] == [(BF16, True), (FP32, True), (BF16, False)]
    assert [place.spec.name for place in layout.placements] == [s.name for s in MIXED]


def test_every_offset_in_numbers():
    layout = plan_unit(MIXED)
    # Elements: weight 128, bias 1 -> 64, late_group 70 -> 128; fp32 scale 9 -> 64; frozen 15 -> 64.
    assert [(run.numel, run.byte_offset) for run in layout.runs] == [(320, 0), (64, 768), (64, 1024)]
    # 320 bf16 elements are 640 bytes, the fp32 run starts at the next multiple of 256.
    assert [(run.state_offset, run.master_offset) for run in layout.runs] == [(0, 0), (320, None), (None, None)]
    assert layout.gradient_bytes == 1024  # the end of the last trainable run: frozen weights cost no gradient bytes
    assert layout.compute_bytes == 1280  # 1024 + 64 frozen bf16 elements, rounded up to 256
    assert (layout.state_numel, layout.master_numel) == (384, 320)  # fp32 is its own master
    assert (layout.num_parameters, layout.num_trainable) == (223, 208)


def test_placements_agree_with_their_runs_and_do_not_overlap():
    layout = plan_unit(MIXED)
    spans = []
    for place in layout.placements:
        run = layout.runs[place.run]
        assert place.byte_offset == run.byte_offset + place.offset * run.dtype.itemsize
        assert place.offset % ELEMENT_ALIGNMENT == 0
        spans.append((place.byte_offset, place.byte_offset + place.num_bytes))
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))


def test_empty_and_scalar_parameters():
    empty = plan_unit([])
    assert (empty.placements, empty.runs, empty.compute_bytes, empty.gradient_bytes) == ((), (), 0, 0)
    layout = plan_unit([spec("scalar", ()), spec("nothing", (0, 4)), spec("vector", (2,))])
    assert [place.spec.numel for place in layout.placements] == [1, 0, 2]
    assert [tuple(view.shape) for view in block_views(torch.zeros(512, dtype=torch.uint8), layout)] == [
        (),
        (0, 4),
        (2,),
    ]


def test_views_share_the_block_and_no_two_share_an_element():
    layout = plan_unit(MIXED)
    block = torch.zeros(layout.compute_bytes, dtype=torch.uint8)
    views = block_views(block, layout)
    for value, view in enumerate(views, start=1):
        view.fill_(value)
    assert [(tuple(v.shape), v.dtype, v.unique().tolist()) for v in views] == [
        (s.shape, s.dtype, [float(value)]) for value, s in enumerate(MIXED, start=1)
    ]
    first = run_view(block, layout.runs[0])
    assert first[layout.placements[3].offset].item() == 4.0
    assert first.numel() == 320


def test_the_gradient_block_holds_trainable_parameters_only():
    layout = plan_unit(MIXED)
    views = block_views(torch.zeros(layout.gradient_bytes, dtype=torch.uint8), layout, trainable_only=True)
    assert [view is None for view in views] == [True, False, False, False, False]


def test_only_frozen_parameters_cost_no_gradient_and_no_state():
    layout = plan_unit([spec("a", (100,), group=None), spec("b", (4,), group=None, dtype=FP32)])
    assert (layout.gradient_bytes, layout.state_numel, layout.master_numel, layout.num_trainable) == (0, 0, 0, 0)
