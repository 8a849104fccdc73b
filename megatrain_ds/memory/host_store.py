"""Everything a unit keeps on the host: compute copy, gradient, master weights and moments.

[Note: The four copies of a weight]
A trainable weight exists up to four times. The *compute copy* (host, compute dtype) is what streams to the device and
what `param.data` shows. The *slot copy* (device) lives from a fetch to the last use of one pass. The *master* (host,
fp32) is what the optimizer steps; the update kernel writes the compute copy from it in the same pass. For fp32 weights
master and compute copy are the same memory. User code may write the compute copy; `reconcile` carries that to the
master. The *device copy* of a root unit takes the place of the slot copy and stays.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from megatrain_ds.memory.arena import HostArena
from megatrain_ds.memory.layout import block_views, run_view

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from megatrain_ds.memory.layout import Run, UnitLayout

_RECONCILE_CHUNK = 1 << 22


@dataclass(frozen=True)
class RunState:
    """Optimizer state of one trainable run; every tensor is flat [run.numel] on the host.

    Attributes:
        compute: compute copy; the same memory as `master` for fp32 runs.
        master: fp32 master weights.
        exp_avg: fp32 first moment.
        exp_avg_sq: fp32 second moment.
    """

    compute: torch.Tensor
    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


@dataclass
class HostUnit:
    """One unit's host memory.

    Attributes:
        layout: the flat layout.
        compute_block: uint8 [layout.compute_bytes], what a fetch copies.
        compute: full-shape compute copy per parameter.
        states: optimizer state per run; None for frozen runs.
        gradient_block: uint8 [layout.gradient_bytes] that gradients arrive in, or None when they are accumulated.
        accumulator: flat tensor per trainable run in the accumulation dtype, or None until one is needed.
        received: per parameter, whether this step has a gradient for it.
        steps: per parameter, optimizer steps applied to it.
    """

    layout: UnitLayout
    compute_block: torch.Tensor
    compute: list[torch.Tensor]
    states: list[RunState | None]
    gradient_block: torch.Tensor | None
    accumulator: list[torch.Tensor | None] | None = None
    received: list[bool] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    def gradient_run(self, run_index: int) -> torch.Tensor:
        """The gradient of a trainable run, flat [run.numel]: the accumulator if in use, else the arrived block."""
        if self.accumulator is not None:
            gradient = self.accumulator[run_index]
            assert gradient is not None
            return gradient
        assert self.gradient_block is not None
        return run_view(self.gradient_block, self.layout.runs[run_index])

    def parameter_view(self, kind: str, index: int) -> torch.Tensor:
        """A full-shape view of "master", "exp_avg", "exp_avg_sq", "compute" or "gradient" of parameter `index`."""
        placement = self.layout.placements[index]
        if kind == "gradient":
            flat = self.gradient_run(placement.run)
        else:
            state = self.states[placement.run]
            assert state is not None, f"{placement.spec.name} is frozen and has no {kind}"
            flat = getattr(state, kind)
        return flat[placement.offset : placement.offset + placement.spec.numel].view(placement.spec.shape)

    def reconcile(self, index: int) -> bool:
        """Carry a user's write of the compute copy of parameter `index` to its master.

        Elements whose compute copy still is the rounded master keep their master bits.

        Returns:
            Whether anything differed.
        """
        placement = self.layout.placements[index]
        state = self.states[placement.run]
        if state is None or state.compute.data_ptr() == state.master.data_ptr():
            return False
        changed = False
        stop = placement.offset + placement.spec.numel
        for start in range(placement.offset, stop, _RECONCILE_CHUNK):
            part = slice(start, min(start + _RECONCILE_CHUNK, stop))
            compute, master = state.compute[part], state.master[part]
            differs = compute != master.to(compute.dtype)
            if bool(differs.any()):
                changed = True
                torch.where(differs, compute.float(), master, out=master)
        return changed

    def clear_gradient(self) -> None:
        """Forget this step's gradients; nothing is zeroed, the next arrival overwrites."""
        self.received = [False] * len(self.received)


class HostStore:
    """The arenas of all units, allocated once.

    Args:
        layouts: one layout a unit.
        pin: page-lock compute copies and arriving gradients.
        direct_gradients: keep a pinned gradient block a unit (one micro-batch a step). Otherwise gradients pass through
            a staging ring into accumulators.
        accumulation_dtype: dtype of accumulators.
        load: called with the compute views of every unit before anything else is allocated; it fills them, and may
            free where the values came from. None leaves them zero.
        prefault: touches pages from many threads, or None.

    Attributes:
        units: `HostUnit` per layout, in order.
    """

    def __init__(
        self,
        layouts: Sequence[UnitLayout],
        *,
        pin: bool,
        direct_gradients: bool,
        accumulation_dtype: torch.dtype,
        load: Callable[[list[list[torch.Tensor]]], None] | None = None,
        prefault: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        self.accumulation_dtype = accumulation_dtype
        self._compute = HostArena(
            "compute weights", [layout.compute_bytes for layout in layouts], pin=pin, prefault=prefault
        )
        compute = [
            [view for view in block_views(self._compute.block(index), layout) if view is not None]
            for index, layout in enumerate(layouts)
        ]
        if load is not None:
            load(compute)
        gradient_bytes = [layout.gradient_bytes if direct_gradients else 0 for layout in layouts]
        self._gradient = HostArena("gradients", gradient_bytes, pin=pin, prefault=prefault)
        self._master = HostArena("master weights", [4 * x.master_numel for x in layouts], pin=False, prefault=prefault)
        moments = [4 * layout.state_numel for layout in layouts]
        self._exp_avg = HostArena("first moments", moments, pin=False, prefault=prefault)
        self._exp_avg_sq = HostArena("second moments", moments, pin=False, prefault=prefault)
        self._accumulators: list[HostArena] = []
        self.units = [
            self._make_unit(index, layout, compute[index], direct_gradients) for index, layout in enumerate(layouts)
        ]
        if not direct_gradients:
            self._allocate_accumulators(range(len(layouts)), prefault)

    @property
    def arenas(self) -> list[HostArena]:
        """Every arena held now."""
        return [self._compute, self._gradient, self._master, self._exp_avg, self._exp_avg_sq, *self._accumulators]

    @property
    def num_bytes(self) -> int:
        """Host bytes of all arenas."""
        return sum(arena.num_bytes for arena in self.arenas)

    def add_accumulator(self, index: int) -> None:
        """Give unit `index` an accumulator after all, because a second gradient arrived in one step."""
        self._allocate_accumulators([index], None)

    def close(self) -> None:
        """Unlock all pages; idempotent."""
        for arena in self.arenas:
            arena.close()

    def _allocate_accumulators(
        self, indices: Sequence[int] | range, prefault: Callable[[torch.Tensor], None] | None
    ) -> None:
        itemsize = self.accumulation_dtype.itemsize
        units = [self.units[index] for index in indices]
        arena = HostArena(
            "gradient accumulators",
            [itemsize * unit.layout.state_numel for unit in units],
            pin=False,
            prefault=prefault,
        )
        self._accumulators.append(arena)
        for position, unit in enumerate(units):
            flat = arena.block(position).view(self.accumulation_dtype)
            unit.accumulator = [
                None if run.state_offset is None else flat[run.state_offset : run.state_offset + run.numel]
                for run in unit.layout.runs
            ]

    def _make_unit(
        self, index: int, layout: UnitLayout, compute: list[torch.Tensor], direct_gradients: bool
    ) -> HostUnit:
        block = self._compute.block(index)
        count = len(layout.placements)
        return HostUnit(
            layout=layout,
            compute_block=block,
            compute=compute,
            states=[self._run_state(index, run, block) for run in layout.runs],
            gradient_block=self._gradient.block(index) if direct_gradients else None,
            received=[False] * count,
            steps=[0] * count,
        )

    def _run_state(self, index: int, run: Run, block: torch.Tensor) -> RunState | None:
        if run.state_offset is None:
            return None
        compute = run_view(block, run)
        moments = slice(run.state_offset, run.state_offset + run.numel)
        master = compute
        if run.master_offset is not None:
            flat = self._master.block(index).view(torch.float32)
            master = flat[run.master_offset : run.master_offset + run.numel]
            master.copy_(compute)
        return RunState(
            compute=compute,
            master=master,
            exp_avg=self._exp_avg.block(index).view(torch.float32)[moments],
            exp_avg_sq=self._exp_avg_sq.block(index).view(torch.float32)[moments],
        )
