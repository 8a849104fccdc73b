"""The optimizer that DeepSpeed's engine, schedulers and Accelerate see.

It decides when a step happens and with which hyper-parameters; the arithmetic is the pipeline's. Numerics follow
ZeRO-3 (deepspeed/runtime/zero/stage3.py): fp32 masters of the cast weights, per-parameter norms in fp64 summed to fp32
per sub group, clip factor (norm + 1e-6) / clip at least 1, gradients multiplied by the reciprocal in fp32.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.utils import maybe_loss_for_backward

from megatrain_ds.engine.parameter_state import ParameterState
from megatrain_ds.errors import StateError, UnsupportedOptimizerError, explain
from megatrain_ds.optim.hyperparameters import adam_mode, read_group

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from megatrain_ds.engine.build import Runtime
    from megatrain_ds.optim.adam import AdamStep


@dataclass(frozen=True)
class StepSettings:
    """What the engine's configuration says about a step.

    Attributes:
        clip_grad: largest global gradient norm; 0 for no clipping.
        dtype: compute dtype.
        sub_group_size: elements a ZeRO-3 sub group holds, for norms and checkpoints in its layout.
        is_boundary: whether the backward under way is the last before `step()`.
    """

    clip_grad: float
    dtype: torch.dtype
    sub_group_size: int
    is_boundary: Callable[[], bool]


class MegaTrainOptimizer(ZeROOptimizer, torch.optim.Optimizer):
    """Steps masters on the host; a real `torch.optim.Optimizer` whose groups are the user's live ones.

    Args:
        optimizer: the user's optimizer: its param groups are read at every step, its own step is never called.
        settings: see `StepSettings`.
        loss_scaler: DeepSpeed's static or dynamic loss scaler.
        dp_process_group: the data-parallel group, for DeepSpeed's checkpoint naming.

    Attributes:
        overflow: whether the last step was skipped because a gradient was not finite.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        settings: StepSettings,
        loss_scaler: Any,
        dp_process_group: Any,
    ) -> None:
        ZeROOptimizer.__init__(self)
        self.optimizer = optimizer
        self._decoupled = adam_mode(optimizer)
        self._settings = settings
        self.dtype = settings.dtype
        self.clip_grad = settings.clip_grad
        self.loss_scaler = loss_scaler
        self.dynamic_loss_scale = loss_scaler.dynamic
        self.custom_loss_scaler = False
        self.external_loss_scale: float | None = None
        self.torch_autocast_gradscaler = None
        self.dp_process_group = dp_process_group
        self.overflow = False
        # None while unknown: with clipping and the finite check off nobody measures it.
        self._global_grad_norm: float | torch.Tensor | None = None
        self._eager_hyper: dict[int, AdamStep] | None = None
        self._eager_units: set[int] = set()
        self._runtime: Runtime | None = None
        self.parameters: list[list[ParameterState]] = []
        # The same in ZeRO-3's sub groups, in its order.
        self.sub_groups: list[list[ParameterState]] = []
        torch.optim.Optimizer.__setstate__(self, {})

    def attach(self, runtime: Runtime) -> None:
        """Connect to a built runtime; called once by the engine."""
        self._runtime = runtime
        places = {
            param: (unit.index, index) for unit in runtime.units for index, (_, param) in enumerate(unit.parameters)
        }
        names = {param: name for unit in runtime.units for name, param in unit.parameters}
        self.parameters = [
            [
                ParameterState(runtime, names[param], param, position, *places[param])
                for param in group["params"]
                if param in places and _is_stepped(runtime, *places[param])
            ]
            for position, group in enumerate(self.optimizer.param_groups)
        ]
        size = self._settings.sub_group_size
        self.sub_groups = [part for group in self.parameters for part in _split_sub_groups(group, size)]

    @property
    def runtime(self) -> Runtime:
        """The running engine's parts."""
        if self._runtime is None:
            raise StateError("optimizer call", ("a live engine",), "destroyed", "Call deepspeed.initialize again")
        return self._runtime

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The live groups of the user's optimizer."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = groups

    @property
    def defaults(self) -> dict[str, Any]:
        """Defaults of the user's optimizer."""
        return self.optimizer.defaults

    @property
    def state(self) -> Mapping[Any, Any]:
        """Optimizer state per parameter: step and full-shape fp32 moments on the host, live views."""
        return {
            entry.param: {"step": entry.step, "exp_avg": entry.view("exp_avg"), "exp_avg_sq": entry.view("exp_avg_sq")}
            for group in self.parameters
            for entry in group
        }

    @property
    def loss_scale(self) -> float:
        """The factor that the loss is multiplied with before backward."""
        return self.external_loss_scale if self.external_loss_scale is not None else self.loss_scaler.loss_scale

    cur_scale = loss_scale

    @property
    def holds_gradients(self) -> bool:
        """Whether backward has given gradients that no `step()` has used or dropped yet."""
        return bool(self._eager_units) or any(any(unit.received) for unit in self.runtime.store.units)

    @property
    def fp16_groups(self) -> list[list[torch.nn.Parameter]]:
        """Parameters per ZeRO-3 sub group."""
        return [[entry.param for entry in group] for group in self.sub_groups]

    @property
    def fp32_partitioned_groups_flat(self) -> list[torch.Tensor]:
        """fp32 masters per ZeRO-3 sub group, flat; copies, since masters lie unit by unit."""
        self.runtime.pipeline.wait_all()
        return [torch.cat([entry.view("master").reshape(-1) for entry in group]) for group in self.sub_groups]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: arenas are laid out once.

        Raises:
            UnsupportedOptimizerError: always.
        """
        raise UnsupportedOptimizerError(
            explain(
                "add_param_group",
                sorted(param_group),
                "groups are fixed once the engine is built",
                "Give every group to the optimizer before deepspeed.initialize",
            )
        )

    def override_loss_scale(self, loss_scale: float) -> None:
        """Use a loss scale of the caller's instead of the scaler's."""
        self.custom_loss_scaler = True
        self.external_loss_scale = loss_scale

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, **_: Any) -> None:
        """Scale the loss and run backward (`engine.backward` does not come through here)."""
        if not maybe_loss_for_backward(loss):
            raise ValueError(f"loss of shape {tuple(loss.shape)}: backward needs a scalar that has a grad_fn.")
        self.scale_if_loss(loss).backward(retain_graph=retain_graph)

    def backward_prologue(self, loss: Any = None) -> Any:
        """A backward pass begins, by `engine.backward` or by the user's own call (DeepSpeed's name for it)."""
        self.runtime.executor.enter_backward()
        return loss

    def overlapping_partition_gradients_reduce_epilogue(self) -> None:
        """A backward pass is over (DeepSpeed's name for it)."""
        self.runtime.executor.end_backward()

    def finalize_gradient_accumulation_boundary(self) -> None:
        """All backward passes of a step are over (DeepSpeed's name for it)."""
        self.runtime.executor.end_backward()

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002
        """Nothing to clear: gradients leave the device as they come, and a step consumes them."""

    def reset_iteration(self, reason: str) -> None:
        """Recover after an exception: gradients gathered since the last step are dropped, with a warning."""
        self._eager_hyper, self._eager_units = None, set()
        self.runtime.executor.reset_iteration(reason)

    def on_unit_done(self, unit: int) -> None:
        """Start a unit's update at once when nothing more is needed to decide it (see "When a step may start")."""
        runtime = self.runtime
        if runtime.policy.measure_norm or not self._settings.is_boundary():
            return
        if runtime.executor.schedule.pending(unit):
            return
        if unit in self._eager_units:
            raise self._gradient_after_update(unit)
        if self._eager_hyper is None:
            runtime.access.reconcile()
            self._eager_hyper = self._read_groups(1.0 / self.loss_scale)
        self._eager_units.add(unit)
        runtime.pipeline.update(unit, self._eager_hyper, runtime.drain.arrivals(unit))

    def step(self, closure: Any = None) -> None:
        """Decide, then queue the update of every unit in the order the next forward needs them.

        Args:
            closure: not supported.

        A gradient that is not finite skips the step: state stays as it was to the byte, `overflow` is True.
        """
        if closure is not None:
            raise ValueError("closure given to step(): an offloading optimizer cannot run it; pass None.")
        runtime = self.runtime
        runtime.executor.end_backward()
        runtime.access.reconcile()
        grad_scale = self._decide()
        if grad_scale is None:
            runtime.drain.reset()
        else:
            hyper = self._read_groups(grad_scale)
            self._check_eager(hyper)
            order = runtime.update_order()
            deferred = self._defer_moments(order)
            with runtime.pipeline.updating():
                for unit in order:
                    if unit in self._eager_units and any(runtime.store.units[unit].received):
                        raise self._gradient_after_update(unit)
                    runtime.pipeline.update(unit, hyper, runtime.drain.arrivals(unit), defer_moments=unit in deferred)
        self._eager_hyper, self._eager_units = None, set()
        # Schedulers that were given the user's optimizer ask it whether a step has run.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        runtime.tracer.step_done()

    def state_dict(self) -> dict[str, Any]:
        """The optimizer state in ZeRO-3's layout; see `megatrain_ds.checkpoint`."""
        from megatrain_ds.checkpoint.deepspeed_layout import optimizer_state_dict

        return optimizer_state_dict(self)

    def load_state_dict(self, state_dict: Any = None, **kwargs: Any) -> None:
        """Load what `state_dict` returned, or a list of ZeRO-3 partitions of it."""
        from megatrain_ds.checkpoint.restore import load_optimizer_state

        load_optimizer_state(self, state_dict if state_dict is not None else kwargs.pop("state_dict_list"), **kwargs)

    def destroy(self) -> None:
        """Forget the runtime; the engine closes it. Idempotent."""
        self._runtime = None
        self.parameters, self.sub_groups = [], []

    def _defer_moments(self, order: Sequence[int]) -> frozenset[int]:
        # Without the barrier updates begin in backward, and nothing waits for them in forward.
        runtime = self.runtime
        if not (runtime.policy.measure_norm and runtime.config.defer_moments) or runtime.config.synchronous:
            return frozenset()
        return runtime.pipeline.deferral.choose(order)

    def _decide(self) -> float | None:
        # Returns the factor for every gradient, or None to skip the step.
        self.overflow = False
        scale = self.loss_scale
        if not self.runtime.policy.measure_norm:
            self._global_grad_norm = None
            return 1.0 / scale
        norm = self._global_norm()
        if not bool(torch.isfinite(norm)):
            self.overflow = True
            self._global_grad_norm = float("inf")
            self.loss_scaler.update_scale(True)
            return None
        # The scale that the gradients carry is read before the scaler may grow it for the next step.
        self.loss_scaler.update_scale(False)
        unscaled = norm / scale
        self._global_grad_norm = unscaled
        combined = torch.tensor(scale, dtype=torch.float32)
        if self.clip_grad > 0.0:
            combined = torch.clamp((unscaled + 1e-6) / self.clip_grad, min=1.0) * scale
        return float(1.0 / combined)

    def _global_norm(self) -> torch.Tensor:
        norms = self.runtime.drain.norms()
        groups = []
        for group in self.sub_groups:
            total = sum((norms[entry.unit][entry.index] ** 2 for entry in group), 0.0)
            groups.append(torch.tensor(total, dtype=torch.float32) ** 0.5)
        return torch.linalg.vector_norm(torch.stack(groups)) if groups else torch.tensor(0.0)

    def _read_groups(self, grad_scale: float) -> dict[int, AdamStep]:
        return {
            position: read_group(group, decoupled=self._decoupled, grad_scale=grad_scale)
            for position, group in enumerate(self.optimizer.param_groups)
        }

    def _gradient_after_update(self, unit: int) -> StateError:
        return StateError(
            f"gradient of {self.runtime.units[unit].name}",
            ("no update begun",),
            "update begun",
            "With gradient_clipping and finite_check off a step has one backward pass, and a block's weights are used "
            'in its forward only: set "finite_check": true in the megatrain block',
        )

    def _check_eager(self, hyper: Mapping[int, AdamStep]) -> None:
        if self._eager_hyper is not None and self._eager_hyper != hyper:
            warnings.warn(
                "megatrain: learning rate or another hyper-parameter changed between backward() and step(), but with "
                "gradient_clipping and finite_check off updates began in backward with the earlier values. Change them "
                'before backward(), or set "finite_check": true.',
                RuntimeWarning,
                stacklevel=3,
            )


def _is_stepped(runtime: Runtime, unit: int, index: int) -> bool:
    return runtime.layouts[unit].placements[index].spec.group is not None


def _split_sub_groups(group: Sequence[ParameterState], size: int) -> list[list[ParameterState]]:
    # ZeRO-3's rule: a sub group is full once it holds at least `size` elements.
    if not group or sum(entry.numel for entry in group) <= size:
        return [list(group)] if group else []
    parts: list[list[ParameterState]] = [[]]
    held = 0
    for entry in group:
        if held >= size:
            parts.append([])
            held = 0
        parts[-1].append(entry)
        held += entry.numel
    return parts
