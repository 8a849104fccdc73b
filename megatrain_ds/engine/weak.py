"""Calls that do not keep the engine alive: it is collected, and its runtime closed, also without `destroy()`."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def weakly(method: Callable[[int], None]) -> Callable[[int], None]:
    """Call a bound method while its object lives.

    DeepSpeed puts bound methods of the engine on its optimizer: a runtime that held the optimizer would hold both.
    """
    reference = weakref.WeakMethod(method)

    def call(unit: int) -> None:
        alive = reference()
        if alive is not None:
            alive(unit)

    return call


def boundary_of(engine: Any) -> Callable[[], bool]:
    """Ask a DeepSpeed engine whether the next step is an optimizer step; False once it is gone."""
    reference = weakref.ref(engine)

    def is_boundary() -> bool:
        alive = reference()
        return alive is not None and bool(alive.is_gradient_accumulation_boundary())

    return is_boundary
