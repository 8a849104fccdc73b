"""Who answers when code outside the engine reads or writes a parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain_ds.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from megatrain_ds.memory.host_store import HostUnit
    from megatrain_ds.model.parameters import StreamedParameter
    from megatrain_ds.optim.pipeline import HostPipeline
    from megatrain_ds.runtime.root_weights import RootWeights


class ParameterAccess:
    """Keeps parameters readable, and carries user writes to the masters.

    Args:
        host_units: host memory per unit.
        pipeline: updates the host copies.
        roots: keeps root units' device copies.
        compute_device: where the forward or backward under way computes; None where none is.
    """

    def __init__(
        self,
        *,
        host_units: Sequence[HostUnit],
        pipeline: HostPipeline,
        roots: RootWeights,
        compute_device: Callable[[], torch.device | None],
    ) -> None:
        self._host_units = host_units
        self._pipeline, self._roots = pipeline, roots
        self._touched: set[tuple[int, int]] = set()
        self._lent: list[tuple[StreamedParameter, torch.Tensor]] = []
        self.compute_device = compute_device

    def before_access(self, param: StreamedParameter) -> None:
        """Make the values that `param` shows current."""
        unit, _ = param.megatrain_key
        if unit in self._roots:
            self._roots.ensure(unit)
        else:
            self._pipeline.wait_weights(unit)

    def touched(self, param: StreamedParameter) -> None:
        """Remember that user code wrote, or may write, the values that `param` shows."""
        self._touched.add(param.megatrain_key)

    def lent(self, param: StreamedParameter, copied: torch.Tensor) -> None:
        """Remember a device copy that user code could write by mistake."""
        self._lent.append((param, copied))

    def end_forward(self) -> None:
        """The device copies of this forward are no longer watched.

        Raises:
            StateError: one was written.
        """
        lent, self._lent = self._lent, []
        for param, copied in lent:
            if copied._version != 0:
                raise StateError(
                    f"a view of a streamed parameter of shape {tuple(param.shape)}",
                    ("read",),
                    "written in place inside a forward, where it is a copy on the device",
                    "Write to the parameter itself or to its .data, between steps",
                )

    def invalidate_slots(self) -> None:
        """Streamed units that user code may have written must be fetched again."""
        for unit in {unit for unit, _ in self._touched if unit not in self._roots}:
            self._pipeline.bump(unit)

    def reconcile(self) -> None:
        """Carry what user code wrote to the masters; afterwards nothing counts as touched."""
        touched, self._touched = self._touched, set()
        for unit, index in touched:
            self._pipeline.wait(unit)
            if unit in self._roots:
                self._roots.download(unit, index)
            else:
                self._pipeline.bump(unit)
            self._host_units[unit].reconcile(index)
