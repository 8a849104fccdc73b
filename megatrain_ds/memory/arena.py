"""Flat host memory of exact size, page-locked where asked.

An arena is one anonymous mapping cut into blocks, one block a unit. Page-locking registers the mapping itself with the
driver instead of asking a caching allocator for pinned memory, which rounds every request up to a power of two.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from megatrain_ds.memory.layout import align

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PAGE_BYTES = mmap.PAGESIZE
# Registration is one call per segment, so that a segment is large and several are registered side by side: a single
# call over the whole mapping locks pages on one thread.
SEGMENT_BYTES = 4 << 30
_REGISTRATION_THREADS = 4

_locked_bytes = 0
_locked_guard = threading.Lock()
# A refusal is about the process, not about one arena: it is told once.
_refusal_told = False


def locked_bytes() -> int:
    """Bytes that this process has page-locked through arenas now."""
    return _locked_bytes


class HostArena:
    """One mapping cut into blocks that start on page boundaries.

    Args:
        name: what it holds, for messages.
        block_bytes: size of each block in bytes; 0 is allowed.
        pin: page-lock it for asynchronous copies (needs CUDA; refused registration falls back to pageable memory with
            one warning).
        prefault: called with the whole mapping (uint8 [n]) to touch its pages from many threads, or None.
    """

    def __init__(
        self,
        name: str,
        block_bytes: Sequence[int],
        *,
        pin: bool,
        prefault: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        self.name = name
        self._starts: list[int] = []
        self._sizes = list(block_bytes)
        cursor = 0
        for size in block_bytes:
            self._starts.append(cursor)
            cursor += align(size, PAGE_BYTES)
        self.num_bytes = cursor
        self._registered: list[tuple[int, int]] = []
        if cursor == 0:
            self._memory = torch.empty(0, dtype=torch.uint8)
            return
        mapping = mmap.mmap(-1, cursor, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE") and cursor >= 2 << 20:
            mapping.madvise(mmap.MADV_HUGEPAGE)
        self._memory = torch.frombuffer(mapping, dtype=torch.uint8)
        if prefault is not None:
            prefault(self._memory)
        if pin:
            self._lock_pages()

    @property
    def pinned_bytes(self) -> int:
        """Bytes of this arena that are page-locked."""
        return sum(size for _, size in self._registered)

    @property
    def num_segments(self) -> int:
        """Registered segments."""
        return len(self._registered)

    def block(self, index: int) -> torch.Tensor:
        """Block `index` as a uint8 tensor [block_bytes[index]] that shares the arena's memory."""
        start = self._starts[index]
        return self._memory[start : start + self._sizes[index]]

    def close(self) -> None:
        """Unlock the pages. The mapping itself goes when the last tensor over it goes. Idempotent."""
        global _locked_bytes
        registered, self._registered = self._registered, []
        for pointer, size in registered:
            _cudart().cudaHostUnregister(pointer)
            with _locked_guard:
                _locked_bytes -= size

    def _lock_pages(self) -> None:
        segments = self._segments()
        with ThreadPoolExecutor(_REGISTRATION_THREADS) as pool:
            codes = list(pool.map(lambda segment: _register(*segment), segments))
        self._registered = [segment for segment, code in zip(segments, codes, strict=True) if code == 0]
        global _locked_bytes
        with _locked_guard:
            _locked_bytes += self.pinned_bytes
        failed = next((code for code in codes if code != 0), 0)
        if failed:
            self.close()
            self._tell_refusal(failed)

    def _tell_refusal(self, code: int) -> None:
        global _refusal_told
        if not _refusal_told:
            _refusal_told = True
            warnings.warn(
                f"megatrain: the system refused to page-lock {self.num_bytes / 2**30:.2f} GiB for {self.name} "
                f"(cudaHostRegister error {code}). Training continues on pageable memory: right, but copies no "
                'longer overlap. Raise the memlock limit ("ulimit -l unlimited"), or set "pin_memory": false in the '
                "megatrain block to silence this.",
                RuntimeWarning,
                stacklevel=2,
            )

    def _segments(self) -> list[tuple[int, int]]:
        # A segment ends on a block boundary: one copy must not cross two registrations.
        base, segments = self._memory.data_ptr(), []
        start = 0
        ends = [*self._starts[1:], self.num_bytes]
        for index, end in enumerate(ends):
            if end - start >= SEGMENT_BYTES or index == len(ends) - 1:
                if end > start:
                    segments.append((base + start, end - start))
                start = end
        return segments


def _cudart() -> Any:
    return torch.cuda.cudart()


def _register(pointer: int, size: int) -> int:
    try:
        code = int(_cudart().cudaHostRegister(pointer, size, 0))
    except RuntimeError:
        code = -1
    if code != 0:
        # The driver keeps a refusal as this thread's pending error, and the next checked call would raise it: let one.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device="cuda")
    return code
