"""Where each parameter of a unit lies in the unit's flat blocks. Pure arithmetic, no tensors.

A unit's parameters are grouped into runs of one dtype: trainable runs first, so that the gradient block and the
optimizer state cover a prefix and frozen weights cost neither. Within a run parameters are sorted by optimizer group,
so that one kernel call updates neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

# Parameters start at multiples of this many elements: whole vector registers for the host kernel, so that no result
# depends on where a parameter lies, and aligned loads for device kernels in every dtype.
ELEMENT_ALIGNMENT = 64
# Runs start at multiples of this many bytes.
RUN_ALIGNMENT_BYTES = 256


def align(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class ParameterSpec:
    """What the layout needs to know of a parameter.

    Attributes:
        name: its name in the model.
        shape: its full shape.
        dtype: compute dtype.
        group: index of its optimizer group, or None when no optimizer steps it (frozen).
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    group: int | None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return int(torch.Size(self.shape).numel())


@dataclass(frozen=True)
class Placement:
    """Where one parameter lies.

    Attributes:
        spec: the parameter.
        run: index of its run in the layout.
        offset: first element within the run.
        byte_offset: first byte within the unit's compute block; the same in the gradient block.
    """

    spec: ParameterSpec
    run: int
    offset: int
    byte_offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the parameter in compute dtype."""
        return self.spec.numel * self.spec.dtype.itemsize


@dataclass(frozen=True)
class Run:
    """Consecutive parameters of one dtype.

    Attributes:
        dtype: compute dtype of every parameter in it.
        trainable: whether an optimizer steps them.
        numel: elements, padding included.
        byte_offset: first byte within the unit's compute block.
        state_offset: first element within the unit's moment blocks (trainable runs).
        master_offset: first element within the unit's master block; None when the compute copy is the master (fp32).
    """

    dtype: torch.dtype
    trainable: bool
    numel: int
    byte_offset: int
    state_offset: int | None
    master_offset: int | None


@dataclass(frozen=True)
class UnitLayout:
    """The flat layout of a unit; `placements` keeps the order in which the parameters were given."""

    placements: tuple[Placement, ...]
    runs: tuple[Run, ...]
    compute_bytes: int
    gradient_bytes: int
    state_numel: int
    master_numel: int

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, padding left out."""
        return sum(placement.spec.numel for placement in self.placements)

    @property
    def num_trainable(self) -> int:
        """Elements of the parameters an optimizer steps, padding left out."""
        return sum(placement.spec.numel for placement in self.placements if placement.spec.group is not None)


def plan_unit(specs: Sequence[ParameterSpec]) -> UnitLayout:
    """Lay out one unit.

    Args:
        specs: the unit's parameters, each once, in the module's order.

    Returns:
        The layout; empty `specs` give an empty layout.
    """
    order = sorted(
        range(len(specs)), key=lambda i: (specs[i].group is None, str(specs[i].dtype), specs[i].group or 0, i)
    )
    runs: list[Run] = []
    placed: dict[int, Placement] = {}
    cursor_bytes = state = master = gradient_bytes = 0
    position = 0
    while position < len(order):
        head = specs[order[position]]
        trainable, dtype = head.group is not None, head.dtype
        start_bytes = align(cursor_bytes, RUN_ALIGNMENT_BYTES)
        numel = 0
        while position < len(order):
            index = order[position]
            spec = specs[index]
            if (spec.group is not None, spec.dtype) != (trainable, dtype):
                break
            placed[index] = Placement(spec, len(runs), numel, start_bytes + numel * dtype.itemsize)
            numel += align(spec.numel, ELEMENT_ALIGNMENT)
            position += 1
        own_master = trainable and dtype != torch.float32
        runs.append(
            Run(
                dtype=dtype,
                trainable=trainable,
                numel=numel,
                byte_offset=start_bytes,
                state_offset=state if trainable else None,
                master_offset=master if own_master else None,
            )
        )
        cursor_bytes = start_bytes + numel * dtype.itemsize
        if trainable:
            gradient_bytes = cursor_bytes
            state += numel
            master += numel if own_master else 0
    return UnitLayout(
        placements=tuple(placed[i] for i in range(len(specs))),
        runs=tuple(runs),
        compute_bytes=align(cursor_bytes, RUN_ALIGNMENT_BYTES),
        gradient_bytes=align(gradient_bytes, RUN_ALIGNMENT_BYTES),
        state_numel=state,
        master_numel=master,
    )


def block_views(block: torch.Tensor, layout: UnitLayout, *, trainable_only: bool = False) -> list[torch.Tensor | None]:
    """Full-shape views of each parameter in a unit's flat block.

    Args:
        block: uint8 tensor [at least compute_bytes, or gradient_bytes with `trainable_only`], any device.
        layout: the unit's layout.
        trainable_only: give None for frozen parameters (the gradient block does not hold them).

    Returns:
        One view per placement, in order, shape and dtype of the parameter, sharing the block's memory.
    """
    views: list[torch.Tensor | None] = []
    for placement in layout.placements:
        if trainable_only and placement.spec.group is None:
            views.append(None)
            continue
        flat = block[placement.byte_offset : placement.byte_offset + placement.num_bytes]
        views.append(flat.view(placement.spec.dtype).view(placement.spec.shape))
    return views


def run_view(block: torch.Tensor, run: Run) -> torch.Tensor:
    """The flat view [run.numel] of a run in a unit's uint8 compute or gradient block."""
    return block[run.byte_offset : run.byte_offset + run.numel * run.dtype.itemsize].view(run.dtype)
