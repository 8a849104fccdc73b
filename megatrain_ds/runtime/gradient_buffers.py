"""Flat device buffers that gradients gather in before they leave for the host."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch

from megatrain_ds.memory.layout import block_views

if TYPE_CHECKING:
    from megatrain_ds.memory.layout import UnitLayout
    from megatrain_ds.memory.streams import Event, Streams


class GradientBuffer:
    """A flat device buffer that one unit's gradients leave through.

    Args:
        block: uint8 [largest unit's gradient bytes] on the compute device. What lies between parameters is
            left as it is and never read.
    """

    def __init__(self, block: torch.Tensor) -> None:
        self.block = block
        self.taken = False
        self.left: Event | None = None
        self._views: dict[int, list[torch.Tensor | None]] = {}

    def views(self, unit: int, layout: UnitLayout) -> list[torch.Tensor | None]:
        """Full-shape gradient views of a unit in the buffer; made once per unit."""
        if unit not in self._views:
            self._views[unit] = block_views(self.block, layout, trainable_only=True)
        return self._views[unit]


class GradientBuffers:
    """The gradient buffers of an engine, allocated once.

    Args:
        num_buffers: buffers; each costs `num_bytes` of device memory. With two, one leaves while the next fills.
        num_bytes: gradient bytes of the largest streamed unit.
        streams: the flows.
    """

    def __init__(self, num_buffers: int, num_bytes: int, streams: Streams) -> None:
        self._num_bytes, self._streams = num_bytes, streams
        self._buffers = [self._allocate() for _ in range(num_buffers if num_bytes else 0)]

    @property
    def num_bytes(self) -> int:
        """Device bytes of all buffers."""
        return self._num_bytes * len(self._buffers)

    def take(self) -> GradientBuffer:
        """A buffer for one unit's gradients, oldest first; compute waits until its last contents have left."""
        buffer = next((buffer for buffer in self._buffers if not buffer.taken), None)
        if buffer is None:
            warnings.warn(
                f"megatrain: all {len(self._buffers)} gradient buffers are taken by units whose backward passes "
                f"interleave; one more of {self._num_bytes / 2**20:.0f} MiB was made. Set "
                f'"gradient_slots": {len(self._buffers) + 1} in the megatrain block to set it aside from the start.',
                RuntimeWarning,
                stacklevel=2,
            )
            buffer = self._allocate()
        else:
            self._buffers.remove(buffer)
        self._buffers.append(buffer)
        if buffer.left is not None:
            self._streams.compute_wait(buffer.left)
        buffer.taken = True
        return buffer

    def release_all(self) -> None:
        """Every buffer is free again (after a failure)."""
        for buffer in self._buffers:
            buffer.taken = False

    def _allocate(self) -> GradientBuffer:
        return GradientBuffer(torch.zeros(self._num_bytes, dtype=torch.uint8, device=self._streams.device))
