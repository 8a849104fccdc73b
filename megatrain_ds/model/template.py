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

    @contextlib.contextmanager
    def bound(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Replace parameter `i` by `tensors[i]` wherever the block refers to it, inside the context."""
        for parameters, name, index, _ in self._entries:
            parameters[name] = tensors[index]  # type: ignore[assignment]
        try:
            yield
        finally:
            for parameters, name, _, param in self._entries:
                parameters[name] = param
