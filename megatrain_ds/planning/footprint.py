"""The byte model: what an engine will allocate, term by term, from layouts alone.

One model serves the refusal before allocation, the report after it, and the tests that compare both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatrain_ds.errors import HostMemoryError
from megatrain_ds.memory.arena import PAGE_BYTES
from megatrain_ds.memory.layout import align

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from megatrain_ds.memory.layout import UnitLayout

# Root gradients pass the ring in pieces: below this size the pieces would be many and small.
_SMALLEST_STAGING_BYTES = 1 << 20


@dataclass(frozen=True)
class Footprint:
    """Bytes of an engine, per term.

    Attributes:
        compute_bytes: host, compute copies (pinned).
        gradient_bytes: host, arriving gradients (pinned): one block a unit, or the staging ring.
        accumulator_bytes: host, gradient accumulators.
        master_bytes: host, fp32 masters that are not themselves the compute copy.
        moment_bytes: host, both moments.
        slot_bytes: device, weight slots.
        gradient_slot_bytes: device, gradient buffers.
        root_bytes: device, root weights.
        num_parameters: elements of all parameters.
        largest_unit_bytes: compute bytes of the largest streamed unit: the size of a weight slot.
        largest_gradient_bytes: gradient bytes of the largest streamed unit: the size of a gradient buffer.
        staging_block_bytes: size of one block of the staging ring.
    """

    compute_bytes: int
    gradient_bytes: int
    accumulator_bytes: int
    master_bytes: int
    moment_bytes: int
    slot_bytes: int
    gradient_slot_bytes: int
    root_bytes: int
    num_parameters: int
    largest_unit_bytes: int
    largest_gradient_bytes: int
    staging_block_bytes: int

    @property
    def host_bytes(self) -> int:
        """All host terms."""
        return self.compute_bytes + self.gradient_bytes + self.accumulator_bytes + self.master_bytes + self.moment_bytes

    @property
    def device_bytes(self) -> int:
        """All device terms; activations and root gradients come on top."""
        return self.slot_bytes + self.gradient_slot_bytes + self.root_bytes

    @property
    def host_bytes_per_parameter(self) -> float:
        """Host bytes over parameters."""
        return self.host_bytes / max(self.num_parameters, 1)


def estimate(
    *,
    streamed: Sequence[UnitLayout],
    roots: Sequence[UnitLayout],
    accumulates: bool,
    accumulation_dtype: torch.dtype,
    weight_slots: int,
    gradient_slots: int,
    staging_blocks: int,
) -> Footprint:
    """Add up what an engine allocates.

    Args:
        streamed: layouts of streamed units.
        roots: layouts of root units.
        accumulates: gradients pass a staging ring into accumulators.
        accumulation_dtype: dtype of the accumulators.
        weight_slots: device weight slots.
        gradient_slots: device gradient buffers.
        staging_blocks: blocks of the staging ring.
    """
    every = [*streamed, *roots]
    largest = max((layout.compute_bytes for layout in streamed), default=0)
    largest_gradient = max((layout.gradient_bytes for layout in streamed), default=0)
    staging_block = align(max(largest_gradient, _SMALLEST_STAGING_BYTES), PAGE_BYTES)
    if accumulates:
        gradient = staging_blocks * staging_block
        accumulator = sum(align(accumulation_dtype.itemsize * layout.state_numel, PAGE_BYTES) for layout in every)
    else:
        gradient = sum(align(layout.gradient_bytes, PAGE_BYTES) for layout in every)
        accumulator = 0
    return Footprint(
        compute_bytes=sum(align(layout.compute_bytes, PAGE_BYTES) for layout in every),
        gradient_bytes=gradient,
        accumulator_bytes=accumulator,
        master_bytes=sum(align(4 * layout.master_numel, PAGE_BYTES) for layout in every),
        moment_bytes=2 * sum(align(4 * layout.state_numel, PAGE_BYTES) for layout in every),
        slot_bytes=weight_slots * largest,
        gradient_slot_bytes=gradient_slots * largest_gradient,
        root_bytes=sum(place.num_bytes for layout in roots for place in layout.placements),
        num_parameters=sum(layout.num_parameters for layout in every),
        largest_unit_bytes=largest,
        largest_gradient_bytes=largest_gradient,
        staging_block_bytes=staging_block,
    )


def require_host_memory(footprint: Footprint, *, have_bytes: int) -> None:
    """Refuse before anything is allocated.

    Args:
        footprint: what will be allocated.
        have_bytes: what may be allocated.

    Raises:
        HostMemoryError: with both figures.
    """
    if footprint.host_bytes > have_bytes:
        raise HostMemoryError(
            footprint.host_bytes,
            have_bytes,
            f"The model has {footprint.num_parameters} parameters at {footprint.host_bytes_per_parameter:.1f} bytes "
            "of host memory each (compute copy, gradient, fp32 master, two moments). Free memory, use a machine with "
            'more, train fewer parameters (freeze some, or LoRA), or set "host_memory_limit_gib" in the megatrain '
            "block if the machine has more than it shows",
        )
