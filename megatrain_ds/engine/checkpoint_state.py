"""An engine's state as a checkpoint sees it: what goes into the files, and where what they hold goes."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.git_version_info import version
from deepspeed.runtime import engine as deepspeed_engine
from torch import nn

from megatrain_ds.checkpoint import deepspeed_layout, restore, rng
from megatrain_ds.checkpoint.archive import StreamedTensor
from megatrain_ds.engine.optimizer import MegaTrainOptimizer
from megatrain_ds.errors import CheckpointError, explain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatrain_ds.checkpoint.saved_state import SavedState
    from megatrain_ds.engine.build import Runtime


@dataclass(frozen=True)
class FrozenWeight:
    """A parameter that no optimizer steps.

    Attributes:
        runtime: the engine's parts.
        param: the parameter.
        unit: its unit.
        index: its position in the unit.
    """

    runtime: Runtime
    param: nn.Parameter
    unit: int
    index: int

    @property
    def shape(self) -> torch.Size:
        """Full shape."""
        return self.value.shape

    @property
    def value(self) -> torch.Tensor:
        """The live host copy, full shape, compute dtype."""
        return self.runtime.store.units[self.unit].compute[self.index]

    def write(self, value: torch.Tensor) -> None:
        """Replace the weight; slots and device copies follow."""
        self.value.copy_(value)
        self.runtime.pipeline.bump(self.unit)


class CheckpointState:
    """Reads and writes what an engine's checkpoints hold.

    Args:
        engine: a `MegaTrainEngine`, with or without optimizer.

    Attributes:
        optimizer: the engine's optimizer, or None: then every parameter counts as frozen.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._runtime: Runtime = engine.runtime
        self._module: nn.Module = engine.module
        self.optimizer = engine.optimizer if isinstance(engine.optimizer, MegaTrainOptimizer) else None
        self._entries = [entry for group in self.optimizer.parameters for entry in group] if self.optimizer else []

    @property
    def holds_gradients(self) -> bool:
        """Whether an unfinished step has gathered gradients."""
        return self.optimizer is not None and self.optimizer.holds_gradients

    def settle(self) -> None:
        """Writes of user code reach the masters, and no update is queued or running any more."""
        self._runtime.access.reconcile()
        self._runtime.pipeline.wait_all()

    def module_items(self, *, exclude_frozen: bool = False) -> list[tuple[str, Any]]:
        """The module's state dict, with the parameters themselves: an alias would count as a write by user code."""
        return [
            (key, value)
            for key, value in self._module.state_dict(keep_vars=True).items()
            if not (exclude_frozen and isinstance(value, nn.Parameter) and not value.requires_grad)
        ]

    def weights(self, *, exclude_frozen: bool = False) -> dict[str, Any]:
        """The module's state dict in compute precision, read when it is written; tied names share one tensor."""
        streamed: dict[int, StreamedTensor] = {}
        state: dict[str, Any] = {}
        for key, value in self.module_items(exclude_frozen=exclude_frozen):
            if isinstance(value, nn.Parameter):
                value = streamed.setdefault(id(value), StreamedTensor.of(self._locate(value).value))
            state[key] = value
        return state

    def model_content(self, *, exclude_frozen: bool) -> dict[str, Any]:
        """Content of the model file: placeholders for parameters, the values of frozen ones, buffers, counters."""
        engine = self._engine
        frozen = self._frozen()
        if exclude_frozen:
            frozen = {name: weight for name, weight in frozen.items() if weight.param.requires_grad}
        placeholders = OrderedDict(
            (key, torch.empty(0, dtype=value.dtype) if isinstance(value, nn.Parameter) else value)
            for key, value in self.module_items(exclude_frozen=exclude_frozen)
        )
        shapes: dict[str, Any] | None = OrderedDict((name, weight.shape) for name, weight in frozen.items())
        fragments: dict[str, Any] | None = OrderedDict(
            (name, StreamedTensor([lambda w=weight: w.value], [weight.shape.numel()], weight.value.dtype))
            for name, weight in frozen.items()
        )
        if exclude_frozen and not frozen:
            shapes = fragments = None
        parallel = getattr(deepspeed_engine, "_checkpoint_parallel_metadata", lambda _mpu: {})
        return {
            "module": placeholders,
            "buffer_names": engine._get_buffer_names(),
            "optimizer": None,
            "param_shapes": engine._get_zero_param_shapes() if self.optimizer else [],
            "frozen_param_shapes": shapes,
            "shared_params": self.shared_names(),
            "frozen_param_fragments": fragments,
            "lr_scheduler": engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None,
            "data_sampler": None,
            "random_ltd": None,
            "skipped_steps": engine.skipped_steps,
            "global_steps": engine.global_steps,
            "global_samples": engine.global_samples,
            "dp_world_size": engine.seq_dp_world_size,
            "mp_world_size": engine.mp_world_size,
            **parallel(engine.mpu),
            "ds_config": engine.config,
            "ds_version": version,
            deepspeed_layout.OWN_KEY: {"rng_state": rng.capture()},
        }

    def optimizer_content(self) -> dict[str, Any]:
        """Content of the optimizer file."""
        if self.optimizer is None:
            state = deepspeed_layout.empty_optimizer_state_dict()
        else:
            state = deepspeed_layout.optimizer_state_dict(self.optimizer, deepspeed_layout.streamed)
        return {"optimizer_state_dict": state, "ds_config": self._engine.config, "ds_version": version}

    def shared_names(self) -> dict[str, str]:
        """Further names of tied parameters, each with the name under which the parameter is saved."""
        return {name: names[0] for names in self._names().values() for name in names[1:]}

    def plan(self, saved: SavedState, *, strict: bool, with_state: bool) -> list[restore.Assignment]:
        """Check that a checkpoint fits and say what goes where; changes nothing.

        Raises:
            CheckpointError: it does not fit.
        """
        self._check_module_items(saved, strict=strict)
        with_moments = with_state and self.optimizer is not None
        assignments = restore.plan(self._targets(), saved, strict=strict, with_moments=with_moments)
        if with_state and self.optimizer is not None:
            restore.check_groups(self.optimizer, saved.optimizer)
        return assignments

    def apply(self, saved: SavedState, assignments: Sequence[restore.Assignment], *, with_state: bool) -> None:
        """Do what `plan` said, and with `with_state` restore hyper-parameters and loss scaler."""
        self.settle()
        if with_state and self.optimizer is not None:
            restore.apply_optimizer_settings(self.optimizer, saved.optimizer)
        for assignment in assignments:
            assignment.apply()

    def load_buffers(self, saved: SavedState) -> None:
        """Load what in the module's state dict is no parameter."""
        found = saved.model["module"]
        others = {
            key: found[key]
            for key, value in self.module_items()
            if key in found and not isinstance(value, nn.Parameter)
        }
        self._module.load_state_dict(others, strict=False)

    def load_scheduler(self, saved: SavedState) -> None:
        """Load the learning-rate scheduler.

        Raises:
            CheckpointError: it does not take the saved state; it is as it was.
        """
        scheduler = self._engine.lr_scheduler
        if scheduler is None:
            return
        state = saved.model.get("lr_scheduler")
        before = copy.deepcopy(scheduler.state_dict())
        try:
            scheduler.load_state_dict(copy.deepcopy(state))
        except Exception as error:
            scheduler.load_state_dict(before)
            rule = f"does not load into {type(scheduler).__name__} ({error!r})"
            action = "Use the scheduler that was saved, or load with load_lr_scheduler_states=False"
            raise CheckpointError(explain("lr_scheduler of the checkpoint", state, rule, action)) from error

    def load_counters(self, saved: SavedState) -> None:
        """Load the engine's counts of steps and samples."""
        engine, model = self._engine, saved.model
        engine.global_steps = model["global_steps"]
        engine.global_samples = model.get("global_samples", engine.global_steps * engine.train_batch_size())
        engine.skipped_steps = model["skipped_steps"]
        engine.loaded_checkpoint_mp_world_size = model["mp_world_size"]
        engine.loaded_checkpoint_dp_world_size = model["dp_world_size"]

    def drop_gradients(self) -> None:
        """Forget the gradients of an unfinished step, with a warning, and start its micro-batches anew."""
        if self.optimizer is not None and self.optimizer.holds_gradients:
            self.optimizer.reset_iteration("load_checkpoint() was called")
            self._engine.micro_steps -= self._engine.micro_steps % self._engine.gradient_accumulation_steps()

    def _names(self) -> dict[int, list[str]]:
        names: dict[int, list[str]] = {}
        for name, param in self._module.named_parameters(remove_duplicate=False):
            names.setdefault(id(param), []).append(name)
        return names

    def _locate(self, param: Any) -> FrozenWeight:
        return FrozenWeight(self._runtime, param, *param.megatrain_key)

    def _frozen(self) -> dict[str, FrozenWeight]:
        stepped = {id(entry.param) for entry in self._entries}
        return {
            name: self._locate(param) for name, param in self._module.named_parameters() if id(param) not in stepped
        }

    def _targets(self) -> list[restore.Target]:
        names = self._names()
        stepped = [restore.Target(tuple(names[id(entry.param)]), entry, True) for entry in self._entries]
        frozen = self._frozen().values()
        return stepped + [restore.Target(tuple(names[id(weight.param)]), weight, False) for weight in frozen]

    def _check_module_items(self, saved: SavedState, *, strict: bool) -> None:
        live, found = dict(self.module_items()), saved.model["module"]
        if strict and live.keys() != found.keys():
            missing, unexpected = sorted(live.keys() - found.keys()), sorted(found.keys() - live.keys())
            rule = f"are {len(missing)} names that are not in the checkpoint; {unexpected[:5]} are only there"
            action = "Build the model that was saved, or load with load_module_strict=False"
            raise CheckpointError(explain("names only in the model", missing[:5], rule, action))
        for key in live.keys() & found.keys():
            value = live[key]
            if isinstance(value, nn.Parameter) or not isinstance(value, torch.Tensor):
                continue
            if value.shape != found[key].shape:
                rule = f"is its shape in the model, but {tuple(found[key].shape)} in the checkpoint"
                action = "Build the model that was saved"
                raise CheckpointError(explain(f"shape of buffer {key}", tuple(value.shape), rule, action))
