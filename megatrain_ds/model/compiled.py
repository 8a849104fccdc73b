"""torch.compile: units are compiled here, one graph for all units of a class; models compiled elsewhere are refused.

A model that torch.compile has wrapped traces through the streaming itself and fixes the weights that should stream.
Inside a unit's forward there is no streaming: its weights are inputs of the graph, so that one graph serves every
unit of a class and every step.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import torch

from megatrain_ds.errors import UnsupportedModelError, explain

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

_GRAPH_MODES = ("reduce-overhead", "max-autotune")


class UnitCompiler:
    """Compiles the forwards of units.

    Args:
        backend: as `torch.compile`'s; "inductor" needs triton for a CUDA device and a C++ compiler for the CPU.
        settings: `torch.compile`'s other keyword arguments.
        device: where units compute.

    Raises:
        UnsupportedModelError: a setting that records addresses of weights, or a package that is missing.
    """

    def __init__(self, backend: Any = "inductor", *, settings: dict[str, Any], device: torch.device) -> None:
        _check_settings(settings)
        if backend == "inductor" and device.type == "cuda" and importlib.util.find_spec("triton") is None:
            raise UnsupportedModelError(
                explain("compile", backend, "needs triton for a CUDA device", "Install triton, or do not compile")
            )
        self._settings = {"backend": backend, **settings}
        self._compiled: dict[Any, Callable[..., Any]] = {}
        # Where a call fits two graphs (one made for its shapes, one for any), forward and recompute must take the
        # same, and the order in which graphs are tried must not change between them.
        keep_order = getattr(torch._C._dynamo.eval_frame, "_set_lru_cache", None)  # type: ignore[attr-defined]
        if keep_order is not None:
            keep_order(False)

    def compile(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled form of a unit's own forward.

        Args:
            forward: the bound method; a function that somebody put on one module is compiled for it alone.
        """
        function, module = getattr(forward, "__func__", None), getattr(forward, "__self__", None)
        if function is None or getattr(type(module), "forward", None) is not function:
            return torch.compile(forward, **self._settings)
        if function not in self._compiled:
            self._compiled[function] = torch.compile(function, **self._settings)
        return self._compiled[function].__get__(module)


def check_not_compiled(model: nn.Module) -> None:
    """Look for compiled modules.

    Args:
        model: the user's model.

    Raises:
        UnsupportedModelError: the model or a module in it was compiled.
    """
    for path, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise UnsupportedModelError(
                explain(
                    path or "the model",
                    type(module).__name__,
                    "torch.compile around streamed weights would fix their values",
                    'Leave torch.compile out and set "compile": true in the megatrain block, which compiles each block '
                    "inside its streaming",
                )
            )


def refuse_beyond_forward(**asked: Any) -> None:
    """Refuse what `DeepSpeedEngine.compile` offers beyond the forward.

    Raises:
        UnsupportedModelError: one of the arguments is set.
    """
    for name, value in asked.items():
        if value:
            rule = "does not go with streamed weights: the forward of each unit is compiled, and nothing around it"
            raise UnsupportedModelError(explain(f"engine.compile: {name}", value, rule, "Leave it out"))


def _check_settings(settings: dict[str, Any]) -> None:
    graphs = settings.get("mode") in _GRAPH_MODES or (settings.get("options") or {}).get("triton.cudagraphs")
    if graphs:
        raise UnsupportedModelError(
            explain(
                "compile",
                settings,
                "CUDA graphs record the addresses of weights, which move from slot to slot",
                'Use no mode, or "max-autotune-no-cudagraphs"',
            )
        )
