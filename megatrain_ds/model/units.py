"""A unit: the modules and parameters that stream, or stay, together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


@dataclass
class Unit:
    """A set of parameters that is fetched, drained and updated as one.

    Attributes:
        index: position in the engine's list of units.
        name: module path of the block, or "root: ..." for parameters that stay on the device.
        module: the block whose forward is redirected; None for root units.
        parameters: (name in the model, parameter), each parameter once.
        holders: per parameter, every (module, attribute name) inside the block that refers to it.
    """

    index: int
    name: str
    module: nn.Module | None
    parameters: list[tuple[str, nn.Parameter]]
    holders: list[list[tuple[nn.Module, str]]] = field(default_factory=list)

    @property
    def is_root(self) -> bool:
        """Whether the weights stay on the device."""
        return self.module is None
