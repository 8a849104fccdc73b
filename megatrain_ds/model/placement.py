"""On which device an operation on a streamed parameter runs.

Inside its own block's forward a weight lies in a slot on the device. Used elsewhere in a forward (a part of the block
called by itself, a weight in a penalty, a head that borrows a matrix) it lies on the host, while user code and plain
autograd expect it where everything else computes: the operation gets a copy there, and gradient comes back through
the copy. Knows tensors and function names, no engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

if TYPE_CHECKING:
    from collections.abc import Sequence

# What is asked of the parameter's own memory, on the host like the answer.
_STAYS = {
    torch.Tensor.data.__get__,  # type: ignore[attr-defined]
    *(
        getattr(torch.Tensor, name)
        for name in ["data_ptr", "untyped_storage", "storage", "numpy", "tolist", "item", "cpu", "__repr__"]
        if hasattr(torch.Tensor, name)
    ),
}
_IN_PLACE = {"__setitem__", "__set__"}  # and every name that ends with one underscore

Copies = list[tuple[torch.Tensor, torch.Tensor]]


def on_compute_device(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    streamed: Sequence[torch.Tensor],
    device: torch.device | None,
) -> tuple[tuple[Any, ...], dict[str, Any], Copies]:
    """Put device copies in place of host parameters among the arguments of an operation.

    Outside a forward a parameter is moved only where another argument lies on a device already.

    Args:
        func: the operation, as `__torch_function__` gets it.
        args: its positional arguments.
        kwargs: its keyword arguments.
        streamed: the parameters among them.
        device: where the forward or backward under way computes; None where none is under way.

    Returns:
        The arguments, and (parameter, copy) for each parameter that was moved.
    """
    target = device or _device_of_others(args, kwargs)
    moving = {id(param): param for param in streamed if target is not None and param.device != target}
    if not moving or func in _STAYS or _writes_one_of(moving, func, args, kwargs):
        return args, kwargs, []
    copies: dict[int, torch.Tensor] = {}

    def move(value: Any) -> Any:
        if id(value) not in moving:
            return value
        if id(value) not in copies:
            copies[id(value)] = value.to(target)
        return copies[id(value)]

    args, kwargs = tree_map(move, (args, kwargs))
    return args, kwargs, [(moving[key], copied) for key, copied in copies.items()]


def bare_alias(result: Any, tensor: torch.Tensor) -> bool:
    """Whether an operation's result lets user code write the memory of `tensor`.

    A differentiable view of a leaf that requires grad cannot be written in place, so only views without a graph count;
    a result that is no tensor counts where it may give the memory away.
    """
    if isinstance(result, torch.Tensor):
        if result.requires_grad and result.grad_fn is not None:
            return False
        return result is not tensor and _same_storage(result, tensor)
    if isinstance(result, (tuple, list)):
        return any(bare_alias(item, tensor) for item in result)
    return not isinstance(result, (bool, int, float, str, torch.Size, torch.dtype, torch.device, type(None)))


def _device_of_others(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu":
            return leaf.device
    return None


def _writes_one_of(moving: dict[int, torch.Tensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    return (in_place and bool(args) and id(args[0]) in moving) or id(kwargs.get("out")) in moving


def _same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.layout != torch.strided or a.device != b.device or a.device.type == "meta":
        return False
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
