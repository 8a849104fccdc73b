"""One trainable parameter as checkpoints and DeepSpeed's `safe_*` functions see it: master, moments, gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import nn

    from megatrain_ds.engine.build import Runtime


@dataclass(frozen=True)
class ParameterState:
    """Where a parameter's state lies.

    Attributes:
        runtime: the engine's parts.
        name: name in the model.
        param: the parameter.
        group: index of its optimizer group.
        unit: its unit.
        index: its position in the unit.
    """

    runtime: Runtime
    name: str
    param: nn.Parameter
    group: int
    unit: int
    index: int

    @property
    def shape(self) -> torch.Size:
        """Full shape."""
        return torch.Size(self.runtime.layouts[self.unit].placements[self.index].spec.shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.shape.numel()

    @property
    def step(self) -> int:
        """Optimizer steps applied to it."""
        return self.runtime.store.units[self.unit].steps[self.index]

    def set_step(self, step: int) -> None:
        """Set the number of optimizer steps applied to it."""
        self.runtime.store.units[self.unit].steps[self.index] = step

    def view(self, kind: str) -> torch.Tensor:
        """A live full-shape host view of "master", "exp_avg", "exp_avg_sq" (fp32) or "compute"; waits for updates."""
        self.runtime.pipeline.wait(self.unit)
        return self.runtime.store.units[self.unit].parameter_view(kind, self.index)

    def reconcile(self) -> None:
        """Carry user writes (of any parameter) to the masters before they are read."""
        self.runtime.access.reconcile()

    def publish_master(self) -> None:
        """The master was written: round it into the compute copy, and have slots and device copies renewed."""
        unit = self.runtime.store.units[self.unit]
        self.runtime.pipeline.wait(self.unit)
        master, compute = unit.parameter_view("master", self.index), unit.compute[self.index]
        if master.data_ptr() != compute.data_ptr():
            compute.copy_(master)
        self.runtime.pipeline.bump(self.unit)

    def gradient(self) -> torch.Tensor | None:
        """A live full-shape host view of this step's gradient, in the dtype it is kept in; None if there is none."""
        host = self.runtime.store.units[self.unit]
        if not host.received[self.index]:
            return None
        for event in self.runtime.drain.peek_arrivals(self.unit):
            event.synchronize()
        self.runtime.pipeline.wait_gradient(self.unit)
        return host.parameter_view("gradient", self.index)

    def set_gradient(self, value: torch.Tensor) -> None:
        """Replace the gradient of this step; the next `step()` uses it, and clipping measures it."""
        host = self.runtime.store.units[self.unit]
        current = self.gradient()
        if current is None:
            # The last step's update may still read this unit's gradients.
            self.runtime.pipeline.wait(self.unit)
            current = host.parameter_view("gradient", self.index)
            host.received[self.index] = True
        current.copy_(value)
        self.runtime.drain.remeasure(self.unit, self.index)
