"""Makes the second run of a block's forward, the recompute in backward, invisible to user code.

The recompute exists to rebuild saved tensors. What else a forward does must happen once: buffers it changes (batch
statistics, counters) keep the values the real forward left, hooks that only look are not called again, and containers
or caches it is given are seen as they were before the real forward filled them.
"""

from __future__ import annotations

import contextlib
import copy
from typing import TYPE_CHECKING, Any

import torch

from megatrain_ds.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn


def snapshot(tree: Any, name: str) -> Any:
    """What a recompute should be given in place of `tree`: mutable containers copied, everything else as it is.

    Args:
        tree: one argument of a block.
        name: the block, for messages.

    Raises:
        UnsupportedModelError: a key-value cache that is written in place.
    """
    if _is_cache(tree):
        return _snapshot_cache(tree, name)
    if isinstance(tree, tuple) and type(tree) is tuple:
        return tuple(snapshot(item, name) for item in tree)
    if isinstance(tree, (list, dict, set)):
        copied = copy.copy(tree)
        items = enumerate(tree) if isinstance(tree, list) else tree.items() if isinstance(tree, dict) else ()
        for key, item in items:
            if _is_cache(item) or isinstance(item, (list, dict, set)):
                copied[key] = snapshot(item, name)  # type: ignore[index]
        return copied
    return tree


class Replay:
    """What must not happen twice in one block.

    Args:
        module: the block.
        name: its path, for messages.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self._name = module, name
        self._mutable: set[tuple[int, str]] = set()
        self._observers: set[tuple[int, int]] = set()

    @contextlib.contextmanager
    def first_run(self) -> Iterator[dict[tuple[int, str], torch.Tensor]]:
        """The real forward. Yields the values, before it, of the buffers that it is known to change."""
        before = {
            (id(module), key): buffer.clone()
            for module, key, buffer in self._buffers()
            if (id(module), key) in self._mutable
        }
        versions = {(id(module), key): (buffer, buffer._version) for module, key, buffer in self._buffers()}
        with self._recording_hooks():
            yield before
        for module, key, buffer in self._buffers():
            was = versions.get((id(module), key))
            if was is not None and (was[0] is not buffer or was[1] != buffer._version):
                self._mutable.add((id(module), key))

    @contextlib.contextmanager
    def second_run(self, before: dict[tuple[int, str], torch.Tensor]) -> Iterator[None]:
        """The recompute: changed buffers get their old values for its length, observing hooks are left out."""
        saved = [(module, key, buffer) for module, key, buffer in self._buffers() if (id(module), key) in self._mutable]
        for module, key, buffer in saved:
            module._buffers[key] = before.get((id(module), key), buffer).clone()
        hooks = [(owner, table, dict(table)) for owner, table in self._hook_tables()]
        for owner, table, entries in hooks:
            for key in entries:
                if (owner, key) in self._observers:
                    del table[key]
        try:
            yield
        finally:
            for module, key, buffer in saved:
                module._buffers[key] = buffer
            for _, table, entries in hooks:
                table.clear()
                table.update(entries)

    def _buffers(self) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
        for module in self._module.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    yield module, key, buffer

    def _hook_tables(self) -> list[tuple[int, dict[int, Any]]]:
        # Hooks of the block itself run around our forward, once; only those inside would run again.
        tables = []
        for module in self._module.modules():
            if module is not self._module:
                if module._forward_hooks:
                    tables.append((id(module), module._forward_hooks))
                if module._forward_pre_hooks:
                    tables.append((-id(module), module._forward_pre_hooks))
        return tables

    @contextlib.contextmanager
    def _recording_hooks(self) -> Iterator[None]:
        tables = self._hook_tables()
        for owner, table in tables:
            for key, hook in list(table.items()):
                self._observers.add((owner, key))
                table[key] = self._recorded(hook, (owner, key))
        try:
            yield
        finally:
            for _, table in tables:
                for key, hook in list(table.items()):
                    table[key] = getattr(hook, "megatrain_hook", hook)

    def _recorded(self, hook: Any, key: tuple[int, int]) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = hook(*args, **kwargs)
            if result is not None:
                self._observers.discard(key)
            return result

        call.megatrain_hook = hook  # type: ignore[attr-defined]
        return call


def _is_cache(value: Any) -> bool:
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def _snapshot_cache(cache: Any, name: str) -> Any:
    layers = getattr(cache, "layers", None)
    kinds = {type(layer).__name__ for layer in layers} if isinstance(layers, list) else {"none"}
    if not kinds <= {"DynamicLayer", "DynamicSlidingWindowLayer"}:
        raise UnsupportedModelError(
            f"{name} was given a {type(cache).__name__} with {sorted(kinds)} layers in a forward that needs gradients: "
            "the recompute in backward would write it a second time. Pass use_cache=False (or past_key_values=None) "
            "when training."
        )
    copied = copy.copy(cache)
    # Dynamic layers rebind their tensors when they grow, so that a shallow copy keeps what they held before.
    copied.layers = [copy.copy(layer) for layer in layers]
    return copied
