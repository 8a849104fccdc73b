"""Makes the second run of a block's forward, the recompute in backward, invisible to user code.

The recompute exists to rebuild saved tensors. What else a forward does must happen once: buffers it changes (batch
statistics, counters) keep the values the real forward left, hooks that only look are not called again, and containers
or caches it is given are seen as they were before the real forward filled them.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from megatrain_ds.errors import UnsupportedModelError, explain
from megatrain_ds.runtime.random_state import GlobalRandom

if TYPE_CHECKING:
    from collections.abc import Iterator

# The dicts that make a module a module; `copy.copy` of one would cut the module off from its own tables.
_MODULE_TABLES = frozenset(nn.Module().__dict__)


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


def holds_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a block's arguments include a key-value cache."""
    return any(_is_cache(value) for value in (*args, *kwargs.values()))


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
        self._known_modes: set[tuple[bool, ...]] = set()

    def has_inner_hooks(self) -> bool:
        """Whether modules inside the block carry forward hooks."""
        return bool(self._hook_tables())

    @contextlib.contextmanager
    def first_run(self) -> Iterator[Before]:
        """The real forward. Yields what the block was before it, for the recompute."""
        # In a mode that ran before, only the buffers it changed are copied. Batch norm writes its running statistics
        # without raising their version, so the first run in a mode compares values.
        mode = tuple(module.training for module in self._module.modules())
        known = mode in self._known_modes
        kept = {
            (id(module), key): buffer.clone()
            for module, key, buffer in self._buffers()
            if not known or (id(module), key) in self._mutable
        }
        versions = {(id(module), key): (buffer, buffer._version) for module, key, buffer in self._buffers()}
        attributes = [(m, frozenset(m.__dict__), _attributes(m)) for m in self._module.modules()]
        tensors = [(key, x, x._version) for _, _, found in attributes for key, x in found.items() if _is_tensor(x)]
        with self._recording_hooks():
            yield Before(kept, attributes, GlobalRandom.now())
        self._refuse_written(tensors)
        for module, key, buffer in self._buffers():
            where = (id(module), key)
            if where not in versions:
                continue
            old, version = versions[where]
            if buffer is not old or buffer._version != version or not (known or _same(buffer, kept[where])):
                self._mutable.add(where)
        self._known_modes.add(mode)

    @contextlib.contextmanager
    def second_run(self, before: Before) -> Iterator[None]:
        """The recompute: the block is as it was before the first run, observing hooks are left out.

        Afterwards buffers, attributes and hooks are what they were; containers among the attributes did not grow.
        """
        buffers = [
            (module, key, buffer) for module, key, buffer in self._buffers() if (id(module), key) in self._mutable
        ]
        attributes = [(module, dict(module.__dict__)) for module in self._module.modules()]
        random_state = GlobalRandom.now()
        hooks = [(table, dict(table)) for _, table in self._hook_tables()]
        for module, key, buffer in buffers:
            module._buffers[key] = before.buffers.get((id(module), key), buffer).clone()
        for module, names, found in before.attributes:
            for name in [name for name in module.__dict__ if name not in names]:
                del module.__dict__[name]
            module.__dict__.update({key: copy.copy(x) if _is_container(key, x) else x for key, x in found.items()})
        before.random_state.restore()
        for owner, table in self._hook_tables():
            for key in [key for key in table if (owner, key) in self._observers]:
                del table[key]
        try:
            yield
        finally:
            for module, entries in attributes:
                module.__dict__.clear()
                module.__dict__.update(entries)
            for module, key, buffer in buffers:
                module._buffers[key] = buffer
            for table, entries in hooks:
                table.clear()
                table.update(entries)
            random_state.restore()

    def _refuse_written(self, tensors: list[tuple[str, torch.Tensor, int]]) -> None:
        for key, tensor, version in tensors:
            if tensor._version != version:
                raise UnsupportedModelError(
                    explain(
                        f"{self._name}: attribute {key}",
                        "a tensor written in place in forward",
                        "its old value is gone when the block is recomputed in backward",
                        'Register it as a buffer, assign a new tensor instead, or set "activations": "keep"',
                    )
                )

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
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # A hook that returns nothing may still matter to the forward: it writes in place, or sets the weight that
            # the module is about to use (weight norm and spectral norm in their older form).
            versions = [(leaf, leaf._version) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            attributes = dict(module.__dict__)
            result = hook(module, *args, **kwargs)
            written = any(leaf._version != version for leaf, version in versions)
            changed = attributes.keys() != module.__dict__.keys() or any(
                value is not attributes[name] for name, value in module.__dict__.items()
            )
            if result is not None or written or changed:
                self._observers.discard(key)
            return result

        call.megatrain_hook = hook  # type: ignore[attr-defined]
        return call


@dataclass(frozen=True)
class Before:
    """A block before its real forward.

    Attributes:
        buffers: values of the buffers that it may change, by (module id, name).
        attributes: per module, the names of its attributes, and the attributes that are plain values (flags, counters,
            names), tensors without a graph, or containers (copied).
        random_state: Python's and NumPy's random state; torch's is the checkpoint's to keep.
    """

    buffers: dict[tuple[int, str], torch.Tensor]
    attributes: list[tuple[nn.Module, frozenset[str], dict[str, Any]]]
    random_state: GlobalRandom


def _attributes(module: nn.Module) -> dict[str, Any]:
    # Tensors with a graph are left out: keeping an earlier output alive would keep its graph.
    kept = {}
    for key, value in module.__dict__.items():
        if isinstance(value, (bool, int, float, str)) or _is_tensor(value):
            kept[key] = value
        elif _is_container(key, value):
            kept[key] = copy.copy(value)
        elif value is None and key not in _MODULE_TABLES:
            kept[key] = value
    return kept


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.requires_grad


def _is_container(name: str, value: Any) -> bool:
    return name not in _MODULE_TABLES and isinstance(value, (list, dict, set))


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) if a.is_floating_point() else torch.equal(a, b)


def _is_cache(value: Any) -> bool:
    # A cache without a configuration keeps its layers' class among its attributes; a class is no cache.
    return not isinstance(value, type) and hasattr(value, "get_seq_length") and hasattr(value, "update")


def _snapshot_cache(cache: Any, name: str) -> Any:
    copied = copy.copy(cache)
    parts = {key: value for key, value in vars(cache).items() if key != "layers"}
    for key, value in parts.items():
        if _is_cache(value):
            # An encoder-decoder cache holds two.
            setattr(copied, key, _snapshot_cache(value, name))
        elif isinstance(value, (list, dict, set)):
            setattr(copied, key, copy.copy(value))
    if not any(_is_cache(value) for value in parts.values()):
        copied.layers = _snapshot_cache_layers(cache, name)
    return copied


def _snapshot_cache_layers(cache: Any, name: str) -> list[Any]:
    layers: Any = getattr(cache, "layers", None)
    kinds = {type(layer).__name__ for layer in layers} if isinstance(layers, list) else {"none"}
    if not kinds <= {"DynamicLayer", "DynamicSlidingWindowLayer"}:
        raise UnsupportedModelError(
            f"{name} was given a {type(cache).__name__} with {sorted(kinds)} layers in a forward that needs gradients: "
            "the recompute in backward would write it a second time. Pass use_cache=False (or past_key_values=None) "
            "when training."
        )
    # Dynamic layers rebind their tensors when they grow, so that a shallow copy keeps what they held before.
    return [copy.copy(layer) for layer in layers]
