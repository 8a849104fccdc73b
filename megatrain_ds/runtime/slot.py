"""Device buffers that weights stream through, and which unit each one holds.

[Note: Which event frees a slot]
A slot is filled on the h2d flow and read on the compute flow. The fill waits for the compute event recorded after the
last use (`freed`), the first use waits for the event of the fill (`ready`). A slot whose users are still counted is
bound and is never chosen for another unit: between a unit's first unpack and its last backward node other units may
run, and the tensors that recomputation saved are views of the slot.
"""

from __future__ import annotations

import enum
import warnings
from typing import TYPE_CHECKING

import torch

from megatrain_ds.errors import StateError
from megatrain_ds.memory.layout import block_views

if TYPE_CHECKING:
    from collections.abc import Collection

    from megatrain_ds.memory.layout import UnitLayout
    from megatrain_ds.memory.streams import Event


class SlotState(enum.Enum):
    """Where the data of a slot is. EMPTY -> FILLING -> IN_USE -> READY -> (IN_USE | FILLING); any -> EMPTY."""

    EMPTY = "empty"
    FILLING = "filling"
    READY = "ready"
    IN_USE = "in use"


class Slot:
    """One device buffer.

    Args:
        block: uint8 [largest unit's compute bytes] on the compute device.
    """

    def __init__(self, block: torch.Tensor) -> None:
        self.block = block
        self.state = SlotState.EMPTY
        self.unit = -1
        self.version = -1
        self.users = 0
        self.ready: Event | None = None
        self.freed: Event | None = None
        self._views: dict[int, list[torch.Tensor]] = {}

    def fill(self, unit: int, version: int, ready: Event) -> None:
        """The buffer receives `unit` at `version`; `ready` is the event of the copy."""
        self._require("filled", SlotState.EMPTY, SlotState.READY, SlotState.FILLING)
        self.unit, self.version, self.ready = unit, version, ready
        self.state = SlotState.FILLING

    def bind(self) -> None:
        """One more user reads the buffer."""
        self._require("bound", SlotState.FILLING, SlotState.READY, SlotState.IN_USE)
        self.users += 1
        self.state = SlotState.IN_USE

    def unbind(self, freed: Event) -> None:
        """One user is done; `freed` is the compute event after its last use."""
        self._require("unbound", SlotState.IN_USE)
        self.users -= 1
        self.freed = freed
        if self.users == 0:
            self.state = SlotState.READY

    def drop(self) -> None:
        """Forget the contents and all users (after a failure)."""
        self.users, self.unit, self.version = 0, -1, -1
        self.state = SlotState.EMPTY

    def views(self, unit: int, layout: UnitLayout) -> list[torch.Tensor]:
        """Full-shape views of a unit's parameters in the buffer; made once per unit."""
        if unit not in self._views:
            # Views made in inference mode could not take part in training later.
            with torch.inference_mode(False):
                self._views[unit] = [view for view in block_views(self.block, layout) if view is not None]
        return self._views[unit]

    def _require(self, action: str, *allowed: SlotState) -> None:
        if self.state not in allowed:
            raise StateError(f"weight slot {action}", tuple(state.value for state in allowed), self.state.value)


class SlotPool:
    """The weight slots of an engine, allocated once.

    Args:
        num_slots: buffers. Each costs `num_bytes` of device memory; `num_slots - 1` units can be fetched ahead.
        num_bytes: bytes of the largest unit.
        device: compute device.
    """

    def __init__(self, num_slots: int, num_bytes: int, device: torch.device) -> None:
        self._num_bytes, self._device = num_bytes, device
        self.slots = [self._allocate() for _ in range(num_slots if num_bytes else 0)]

    @property
    def num_bytes(self) -> int:
        """Device bytes of all slots."""
        return self._num_bytes * len(self.slots)

    def holding(self, unit: int, version: int) -> Slot | None:
        """The slot that holds, or is being filled with, `unit` at `version`."""
        for slot in self.slots:
            if slot.unit == unit and slot.version == version and slot.state is not SlotState.EMPTY:
                return slot
        return None

    def free(self, keep: Collection[tuple[int, int]]) -> Slot | None:
        """A slot that nobody uses and whose (unit, version) is not in `keep`; None if there is none."""
        for slot in self.slots:
            if slot.users == 0 and (slot.state is SlotState.EMPTY or (slot.unit, slot.version) not in keep):
                return slot
        return None

    def free_or_grow(self, keep: Collection[tuple[int, int]]) -> Slot:
        """As `free`; takes a kept slot before it makes one more."""
        slot = self.free(keep) or self.free(())
        if slot is None:
            warnings.warn(
                f"megatrain: all {len(self.slots)} weight slots are in use by units whose backward passes interleave; "
                f"one more of {self._num_bytes / 2**20:.0f} MiB was made. To set it aside from the start, use "
                f'"weight_slots": {len(self.slots) + 1} in the megatrain block.',
                RuntimeWarning,
                stacklevel=2,
            )
            slot = self._allocate()
            self.slots.append(slot)
        return slot

    def drop_all(self) -> None:
        """Forget every slot's contents and users (after a failure)."""
        for slot in self.slots:
            slot.drop()

    def _allocate(self) -> Slot:
        return Slot(torch.empty(self._num_bytes, dtype=torch.uint8, device=self._device))
