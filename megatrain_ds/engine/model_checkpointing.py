"""A model's own gradient checkpointing, where the engine recomputes already.

Hugging Face models wrap each block in `_gradient_checkpointing_func` when `gradient_checkpointing` is on. A second
recompute around the engine's would run every block three times, so the function is replaced by a direct call. The
switch itself stays as the user set it: with it a model also leaves its key-value cache out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

_FUNCTION = "_gradient_checkpointing_func"


class ModelCheckpointing:
    """The modules of a model that can be checkpointed.

    Args:
        model: the user's model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
        self._replaced: list[tuple[nn.Module, Any]] = []

    def bypass(self) -> None:
        """Have checkpointed blocks called directly; looked at once per forward, since users switch it at any time."""
        for module in self._modules:
            function = module.__dict__.get(_FUNCTION)
            if not getattr(module, "gradient_checkpointing", False) or function is _call_directly:
                continue
            if function is None:
                # No function to replace: a model that checkpoints by itself where the switch is on.
                setattr(module, "gradient_checkpointing", False)  # noqa: B010 - not an attribute of every module
            else:
                setattr(module, _FUNCTION, _call_directly)
                self._replaced.append((module, function))

    def restore(self) -> None:
        """Give modules the functions they had; idempotent."""
        for module, function in self._replaced:
            if module.__dict__.get(_FUNCTION) is _call_directly:
                setattr(module, _FUNCTION, function)
        self._replaced.clear()


def _call_directly(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)
