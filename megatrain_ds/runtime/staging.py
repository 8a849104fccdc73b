"""Pinned host blocks that gradients pass through on their way into accumulators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain_ds.memory.arena import HostArena

if TYPE_CHECKING:
    import torch

    from megatrain_ds.optim.pipeline import HostPipeline

# Blocks of the ring: one fills, one is read by the worker, one waits.
STAGING_BLOCKS = 3


class StagingRing:
    """A ring of pinned blocks of one size.

    Args:
        num_bytes: size of one block.
        pin: page-lock them.
        pipeline: reads the blocks; a block is free again when its ticket is done.
    """

    def __init__(self, num_bytes: int, *, pin: bool, pipeline: HostPipeline) -> None:
        self._arena = HostArena("gradient staging", [num_bytes] * STAGING_BLOCKS, pin=pin)
        self._pipeline = pipeline
        self._tickets = [0] * STAGING_BLOCKS
        self._next = 0
        self.block_bytes = num_bytes

    @property
    def num_bytes(self) -> int:
        """Host bytes of all blocks."""
        return self._arena.num_bytes

    @property
    def arena(self) -> HostArena:
        """The memory of the blocks."""
        return self._arena

    def take(self) -> tuple[int, torch.Tensor]:
        """The next block (index, uint8 tensor), once the worker has read it."""
        index, self._next = self._next, (self._next + 1) % STAGING_BLOCKS
        self._pipeline.wait_ticket(self._tickets[index])
        return index, self._arena.block(index)

    def give_back(self, index: int, ticket: int) -> None:
        """Block `index` may be written again after `ticket`."""
        self._tickets[index] = ticket
