"""Which parts of a model stream: repeated blocks, found by structure.

Knows modules and parameters only. A streamed unit is a child of a repeated block list; what is left forms root units.
No table of attribute paths: a list is a list whatever it is called.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from torch import nn

from megatrain_ds.errors import UnsupportedModelError
from megatrain_ds.model.units import Unit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Root modules with at least this many elements form a root unit of their own, so that an embedding and a head are
# updated and uploaded independently; smaller ones share one unit.
_OWN_ROOT_UNIT_NUMEL = 1 << 20
_CONTAINERS = (nn.ModuleList, nn.Sequential)


def find_units(model: nn.Module, names: Sequence[str] | None = None) -> list[Unit]:
    """Split a model into streamed units and root units.

    Args:
        model: any module.
        names: module paths or class names of the blocks to stream; None to find them by structure.

    Returns:
        Streamed units in module order, then root units. Every parameter of the model is in exactly one unit.

    Raises:
        UnsupportedModelError: a name matches nothing, or a matched block contains another.
    """
    blocks = _named_blocks(model, names) if names else _repeated_blocks(model)
    shared = _shared_parameters(model, blocks)
    units: list[Unit] = []
    owned: set[int] = set()
    for path, block in blocks:
        parameters, holders = _block_parameters(path, block, shared)
        if parameters:
            owned.update(id(param) for _, param in parameters)
            units.append(Unit(len(units), path, block, parameters, holders))
    if not units:
        warnings.warn(
            f"megatrain: {type(model).__name__} has no repeated blocks (a ModuleList or Sequential of two or more "
            "children with parameters), so nothing streams: all weights stay on the device and only gradients and "
            'optimizer state live on the host. Name the blocks in "megatrain": {"units": [...]} if there are any.',
            UserWarning,
            stacklevel=2,
        )
    units.extend(_root_units(model, owned, len(units)))
    return units


def _repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    blocks: dict[int, tuple[str, nn.Module]] = {}
    for path, block in _outermost_children(model, ""):
        blocks.setdefault(id(block), (path, block))
    if not blocks:
        blocks = {id(block): (path, block) for path, block in _no_split_blocks(model)}
    return list(blocks.values())


def _outermost_children(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    children = [(name, child) for name, child in module.named_children() if _has_parameters(child)]
    # named_children drops repetitions; a block that is listed twice still makes its list a repeated one.
    repeated = sum(1 for child in module._modules.values() if child is not None and _has_parameters(child)) >= 2
    is_list = isinstance(module, _CONTAINERS) and repeated
    for name, child in children:
        child_path = f"{path}.{name}" if path else name
        if is_list and _is_callable_block(child):
            yield child_path, child
        else:
            yield from _outermost_children(child, child_path)


def _no_split_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    declared = set(getattr(model, "_no_split_modules", None) or ())
    found = [(path, module) for path, module in model.named_modules() if type(module).__name__ in declared]
    found = [(path, module) for path, module in found if _has_parameters(module) and path]
    return found if len(found) >= 2 else []


def _named_blocks(model: nn.Module, names: Sequence[str]) -> list[tuple[str, nn.Module]]:
    blocks: dict[int, tuple[str, nn.Module]] = {}
    for name in names:
        matched = [(path, m) for path, m in model.named_modules() if path and name in (path, type(m).__name__)]
        if not matched:
            classes = sorted({type(module).__name__ for module in model.modules()})
            raise UnsupportedModelError(
                f"megatrain.units names {name!r}, which is neither a module path nor a class of "
                f"{type(model).__name__}. Name blocks by path (as in named_modules) or by class, one of: "
                f"{', '.join(classes)}."
            )
        for path, block in matched:
            # A list is named for its children: the list itself is never called.
            members = [(path, block)] if _is_callable_block(block) else list(_outermost_children(block, path))
            blocks.update({id(member): (where, member) for where, member in members})
    for path, block in blocks.values():
        inner = next((where for where, b in blocks.values() if b is not block and where.startswith(path + ".")), None)
        if inner is not None:
            raise UnsupportedModelError(
                f"megatrain.units matches {inner!r} inside {path!r}: units must not contain each other. "
                "Name one of them."
            )
    return list(blocks.values())


def _is_callable_block(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward and not isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _shared_parameters(model: nn.Module, blocks: list[tuple[str, nn.Module]]) -> set[int]:
    # A parameter that several blocks hold, or a block and the rest of the model, cannot stream with either of them.
    # Recurrent modules keep a second list of references to their weights, so theirs stay on the device as well.
    holders: dict[int, set[int]] = {}
    blocks_of: dict[int, set[int]] = {}
    for position, (_, block) in enumerate(blocks):
        for module in block.modules():
            blocks_of.setdefault(id(module), set()).add(position)
    pinned_down: set[int] = set()
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                holders.setdefault(id(param), set()).update(blocks_of.get(id(module), {-1}))
                if isinstance(module, nn.RNNBase):
                    pinned_down.add(id(param))
    return {key for key, where in holders.items() if len(where) > 1} | pinned_down


def _block_parameters(
    path: str, block: nn.Module, shared: set[int]
) -> tuple[list[tuple[str, nn.Parameter]], list[list[tuple[nn.Module, str]]]]:
    position: dict[int, int] = {}
    parameters: list[tuple[str, nn.Parameter]] = []
    holders: list[list[tuple[nn.Module, str]]] = []
    for module_path, module in block.named_modules(prefix=path):
        for name, param in module._parameters.items():
            if param is None or id(param) in shared:
                continue
            if id(param) not in position:
                position[id(param)] = len(parameters)
                parameters.append((f"{module_path}.{name}", param))
                holders.append([])
            holders[position[id(param)]].append((module, name))
    return parameters, holders


def _root_units(model: nn.Module, owned: set[int], first_index: int) -> list[Unit]:
    small: list[tuple[str, nn.Parameter]] = []
    large: list[list[tuple[str, nn.Parameter]]] = []
    seen = set(owned)
    for path, module in model.named_modules():
        mine = []
        for name, param in module._parameters.items():
            if param is not None and id(param) not in seen:
                seen.add(id(param))
                mine.append((f"{path}.{name}" if path else name, param))
        if sum(param.numel() for _, param in mine) >= _OWN_ROOT_UNIT_NUMEL:
            large.append(mine)
        else:
            small.extend(mine)
    groups = ([small] if small else []) + large
    return [
        Unit(first_index + offset, f"root: {group[0][0]}" + ("..." if len(group) > 1 else ""), None, group)
        for offset, group in enumerate(groups)
    ]
