"""Models that torch.compile has wrapped are refused: a traced forward would fix the weights that should stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain_ds.errors import UnsupportedModelError, explain

if TYPE_CHECKING:
    from torch import nn


def check_not_compiled(model: nn.Module) -> None:
    """Look for compiled modules before anything is changed.

    Args:
        model: the user's model.

    Raises:
        UnsupportedModelError: the model or a module in it was compiled.
    """
    for path, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise refuse_compiled(path or "the model", type(module).__name__)


def refuse_compiled(where: str, what: str) -> UnsupportedModelError:
    """The error that names what was compiled and what to do."""
    return UnsupportedModelError(
        explain(
            where,
            what,
            "torch.compile does not combine with streamed weights",
            "Pass the model to deepspeed.initialize uncompiled and leave torch.compile (and torch_compile=True) out",
        )
    )
