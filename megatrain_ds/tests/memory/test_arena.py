"""Host arenas: exact size, page-aligned blocks of zeros, segments, refused page-locking, and closing."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch

from megatrain_ds.memory import arena as arena_module
from megatrain_ds.memory.arena import PAGE_BYTES, HostArena, locked_bytes


def test_blocks_are_zero_page_aligned_of_their_size_and_apart():
    arena = HostArena("test", [1, 0, PAGE_BYTES, PAGE_BYTES + 1], pin=False)
    blocks = [arena.block(index) for index in range(4)]
    assert [block.numel() for block in blocks] == [1, 0, PAGE_BYTES, PAGE_BYTES + 1]
    # 1 -> one page, 0 -> none, one page, one page and a byte -> two.
    assert arena.num_bytes == 4 * PAGE_BYTES
    assert all(block.data_ptr() % PAGE_BYTES == 0 for block in blocks if block.numel())
    assert all(not block.any() for block in blocks)
    for value, block in enumerate(blocks, start=1):
        block.fill_(value)
    assert [block.unique().tolist() for block in blocks] == [[1], [], [3], [4]]


@pytest.mark.parametrize("sizes", [[], [0], [0, 0]])
def test_an_arena_without_bytes_has_empty_blocks(sizes):
    arena = HostArena("test", sizes, pin=True)
    assert arena.num_bytes == arena.pinned_bytes == arena.num_segments == 0
    assert [arena.block(index).numel() for index in range(len(sizes))] == [0] * len(sizes)
    arena.close()


def test_prefault_gets_the_whole_mapping_once():
    seen = []
    HostArena("test", [5, 6], pin=False, prefault=lambda memory: seen.append((memory.dtype, memory.numel())))
    assert seen == [(torch.uint8, 2 * PAGE_BYTES)]


def test_tensors_stay_valid_after_close_and_after_the_arena_is_gone():
    arena = HostArena("test", [64], pin=False)
    values = arena.block(0).view(torch.float32)
    values.fill_(3.0)
    arena.close()
    arena.close()
    del arena
    gc.collect()
    others = [HostArena("other", [64], pin=False) for _ in range(8)]
    for other in others:
        other.block(0).fill_(255)
    assert values.tolist() == [3.0] * 16


def test_segments_end_on_block_boundaries_and_cover_the_mapping(monkeypatch):
    monkeypatch.setattr(arena_module, "SEGMENT_BYTES", 2 * PAGE_BYTES)
    arena = HostArena("test", [PAGE_BYTES] * 3 + [5 * PAGE_BYTES, 0, 1, 0], pin=False)
    start = arena.block(0).data_ptr()
    # Two pages fill a segment; the third block and the large one after it are one, since no block is cut.
    pages = [((pointer - start) // PAGE_BYTES, size // PAGE_BYTES) for pointer, size in arena._segments()]
    assert pages == [(0, 2), (2, 6), (8, 1)]


def test_refused_locking_is_told_once_and_leaves_pageable_memory(monkeypatch):
    monkeypatch.setattr(arena_module, "_refusal_told", False)
    monkeypatch.setattr(arena_module, "_register", lambda _pointer, _size: 2)
    with pytest.warns(RuntimeWarning, match=r"refused to page-lock 0\.00 GiB for weights.*error 2.*memlock"):
        arena = HostArena("weights", [16], pin=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        HostArena("gradients", [16], pin=True)
    assert (arena.pinned_bytes, arena.num_segments, locked_bytes()) == (0, 0, 0)
    arena.block(0).fill_(1)
    assert arena.block(0).tolist() == [1] * 16


@pytest.mark.gpu
def test_locked_bytes_are_the_mapping_and_are_given_back():
    before = locked_bytes()
    arena = HostArena("test", [PAGE_BYTES + 1, 7], pin=True)
    assert arena.pinned_bytes == arena.num_bytes == 3 * PAGE_BYTES == locked_bytes() - before
    assert arena.block(1).is_pinned()
    arena.close()
    assert locked_bytes() == before
