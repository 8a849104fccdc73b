"""Running a block on weights that are not its own.

The block keeps its attributes, buffers and hooks; for the length of one call its parameters are replaced by the given
tensors and put back afterwards, whatever happens. Nothing is copied. (The semantics of
`torch.func.functional_call`, with the look-ups done once.)
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from megatrain_ds.model.units import Unit


class Template:
    """Binds tensors in place of a unit's parameters.

    Args:
        unit: a streamed unit; its holders say which (module, attribute) pairs refer to which parameter.
    """

    def __init__(self, unit: Unit) -> None:
        self._entries = [
            (module._parameters, name, index, unit.parameters[index][1])
            for index, holders in enumerate(unit.holders)
            for module, name in holders
        ]
        # Calls nest: a reentrant checkpoint inside a block runs the block's forward in the recompute of itself.
        self._bound: list[Sequence[torch.Tensor]] = []

    @contextlib.contextmanager
    def bound(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Replace parameter `i` by `tensors[i]` wherever the block refers to it, inside the context.

        A parameter that the caller has replaced by other means (`torch.func.functional_call` on the whole model) keeps
        the caller's tensor.
        """
        outer = self._bound[-1] if self._bound else None
        replaced = []
        for parameters, name, index, param in self._entries:
            current = parameters[name]
            if current is param or (outer is not None and current is outer[index]):
                replaced.append((parameters, name, current))
                parameters[name] = tensors[index]  # type: ignore[assignment]
        self._bound.append(tensors)
        try:
            yield
        finally:
            self._bound.pop()
            for parameters, name, current in replaced:
                parameters[name] = current
