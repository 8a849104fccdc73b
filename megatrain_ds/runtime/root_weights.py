"""Root units: weights that live on the device, with their state on the host.

After an update the host holds the new values; they are uploaded at the first operation that touches the parameter,
and nobody waits for a unit that is not used yet.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from megatrain_ds.memory.streams import H2D
from megatrain_ds.model.parameters import raw_data, set_raw_data
from megatrain_ds.runtime.inputs import refuse_double_backward

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from megatrain_ds.memory.host_store import HostUnit
    from megatrain_ds.memory.streams import Streams
    from megatrain_ds.model.units import Unit
    from megatrain_ds.optim.pipeline import HostPipeline
    from megatrain_ds.telemetry.trace import NullTracer


class RootWeights:
    """Keeps device copies of root units current.

    Args:
        units: the root units.
        host_units: host memory per unit index (all units).
        streams: the flows.
        pipeline: updates the host copies.
        position: how many streamed units the forward under way has run, for the order of first use.
        tracer: receives the named waits.
    """

    def __init__(
        self,
        *,
        units: Sequence[Unit],
        host_units: Sequence[HostUnit],
        streams: Streams,
        pipeline: HostPipeline,
        position: Callable[[], int],
        tracer: NullTracer,
    ) -> None:
        self._units = {unit.index: unit for unit in units}
        self._host_units, self._streams, self._pipeline = host_units, streams, pipeline
        self._position, self._tracer = position, tracer
        self._uploaded = {unit.index: pipeline.version(unit.index) for unit in units}
        self._first_use = {unit.index: 0 for unit in units}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def __contains__(self, unit: int) -> bool:
        """Whether `unit` is a root unit."""
        return unit in self._units

    @property
    def device_bytes(self) -> int:
        """Device bytes of all root weights."""
        return sum(raw_data(p).numel() * p.element_size() for u in self._units.values() for _, p in u.parameters)

    def first_use(self, unit: int) -> int:
        """How many streamed units ran before `unit` was first needed in the last forward that uploaded it."""
        return self._first_use[unit]

    def move_to_device(self) -> None:
        """Give every root parameter its own device tensor with the values of the host copy."""
        for unit in self._units.values():
            for (_, param), host in zip(unit.parameters, self._host_units[unit.index].compute, strict=True):
                device_copy = torch.empty(host.shape, dtype=host.dtype, device=self._streams.device)
                device_copy.copy_(host)
                set_raw_data(param, device_copy)

    def watch_gradients(
        self, take: Callable[[int, int, torch.Tensor], None], trainable: Callable[[int, int], bool]
    ) -> None:
        """Hand every gradient of a trainable root parameter to `take(unit, index, grad)` and clear `param.grad`."""
        for unit in self._units.values():
            for index, (_, param) in enumerate(unit.parameters):
                if trainable(unit.index, index):
                    hook = functools.partial(_take_gradient, take, unit.index, index)
                    self._hooks.append(param.register_post_accumulate_grad_hook(hook))

    def ensure(self, unit: int) -> None:
        """Upload `unit` if the host has newer values; compute waits for the copy."""
        if self._uploaded[unit] == self._pipeline.version(unit):
            return
        if not self._pipeline.is_current(unit):
            with self._tracer.host_span("wait", f"update of {self._units[unit].name}"):
                self._pipeline.wait_weights(unit)
        self._first_use[unit] = self._position()
        pairs = [
            (raw_data(param), host)
            for (_, param), host in zip(self._units[unit].parameters, self._host_units[unit].compute, strict=True)
        ]
        after = [self._streams.record_compute()]
        event = self._streams.copy(H2D, pairs, after=after, label=f"weights {self._units[unit].name}")
        self._streams.compute_wait(event)
        self._uploaded[unit] = self._pipeline.version(unit)

    def download(self, unit: int, index: int) -> None:
        """Copy what the device shows of a parameter to the host's compute copy (user code wrote the device copy)."""
        self.ensure(unit)
        self._host_units[unit].compute[index].copy_(raw_data(self._units[unit].parameters[index][1]))

    def close(self) -> None:
        """Remove the gradient hooks; idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def _take_gradient(take: Callable[[int, int, torch.Tensor], None], unit: int, index: int, param: torch.Tensor) -> None:
    refuse_double_backward()
    grad, param.grad = param.grad, None
    assert grad is not None
    take(unit, index, grad)
