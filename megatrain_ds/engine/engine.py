"""`MegaTrainEngine`: DeepSpeed's engine with the model in host memory.

Documentation and delegation: what DeepSpeed's callers touch is here, the work is in the runtime that `build` composes.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.config import DtypeEnum
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from torch import nn

from megatrain_ds.compatibility import check_world_size
from megatrain_ds.config import MegaTrainConfig
from megatrain_ds.engine import param_access
from megatrain_ds.engine.build import Runtime, StepPolicy, build_runtime
from megatrain_ds.engine.checkpointing import CheckpointingMixin
from megatrain_ds.engine.full_parameters import gather_partitioned
from megatrain_ds.engine.late_changes import LateChanges
from megatrain_ds.engine.model_checkpointing import ModelCheckpointing
from megatrain_ds.engine.optimizer import MegaTrainOptimizer, StepSettings
from megatrain_ds.engine.outputs import hand_out
from megatrain_ds.engine.weak import boundary_of, weakly
from megatrain_ds.errors import UnsupportedOptimizerError, add_note, explain
from megatrain_ds.model.compiled import UnitCompiler, check_not_compiled, refuse_beyond_forward
from megatrain_ds.optim.hyperparameters import adam_mode, make_holder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


class MegaTrainEngine(CheckpointingMixin, DeepSpeedEngine):
    """Streams a model's repeated blocks from host memory and steps its optimizer there.

    Built by `deepspeed.initialize` when the configuration says `"offload_engine": "megatrain"`; takes what
    `DeepSpeedEngine` takes, and behaves like it under ZeRO-3 with parameters and optimizer offloaded.
    """

    _runtime: Runtime | None = None
    # In `backward`: whether the pass has begun.
    _pass_begun = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().__init__(*args, **kwargs)
        except BaseException:
            # DeepSpeed hooks the module before the build: a refused build must leave the model free for another try.
            self._let_go()
            raise

    @property
    def _model(self) -> nn.Module:
        return self.__dict__["module"]

    @property
    def runtime(self) -> Runtime:
        """The running engine's parts; gone after `destroy`."""
        if self._runtime is None:
            raise RuntimeError("engine used after destroy(): call deepspeed.initialize again.")
        return self._runtime

    def memory_report(self) -> dict[str, Any]:
        """What is allocated, in bytes.

        Returns:
            "host_bytes", "host_bytes_per_param", "pinned_bytes", "device_bytes" (slots, gradient buffers and root
            weights; activations come on top), "num_parameters".
        """
        runtime = self.runtime
        staging = runtime.drain.staging
        arenas = runtime.store.arenas + ([staging.arena] if staging is not None else [])
        host = sum(arena.num_bytes for arena in arenas)
        return {
            "host_bytes": host,
            "host_bytes_per_param": host / max(runtime.footprint.num_parameters, 1),
            "pinned_bytes": sum(arena.pinned_bytes for arena in arenas),
            "device_bytes": runtime.pool.num_bytes + runtime.drain.buffers.num_bytes + runtime.roots.device_bytes,
            "num_parameters": runtime.footprint.num_parameters,
        }

    def reset_iteration(self) -> None:
        """Recover after an exception in forward or backward: gradients since the last step are dropped."""
        if isinstance(self.optimizer, MegaTrainOptimizer):
            self.optimizer.reset_iteration("reset_iteration() was called")
        else:
            self.runtime.executor.reset_iteration("reset_iteration() was called")

    def _configure_distributed_model(self, model: nn.Module) -> None:
        check_world_size(dist.get_world_size())
        self._megatrain_config = MegaTrainConfig.from_deepspeed(self._config)
        check_not_compiled(model)
        gather_partitioned(model)
        # The model stays on the host: only root units move, once they are known.
        self.dont_change_device = True
        super()._configure_distributed_model(model)

    def _broadcast_model(self) -> None:
        """One rank has nobody to tell."""

    def _configure_basic_optimizer(self, model_parameters: Any) -> torch.optim.Optimizer:
        return make_holder(self.optimizer_name(), model_parameters, self.optimizer_params() or {})

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        if client_optimizer is None:
            optimizer = self._configure_basic_optimizer(model_parameters)
        elif isinstance(client_optimizer, torch.optim.Optimizer):
            optimizer = client_optimizer
        else:
            optimizer = client_optimizer(model_parameters)
        adam_mode(optimizer)
        optimizer.param_groups[:] = [group for group in optimizer.param_groups if len(group["params"]) != 0]
        self._check_for_duplicates(optimizer)
        self.basic_optimizer = optimizer
        self.optimizer = self._configure_zero_optimizer(optimizer)
        # DeepSpeed before 0.19.7 asks both in every step; what would make them do anything is refused by name.
        for name, configure in (("compression_scheduler", "compression_scheduler"), ("quantizer", "quantization")):
            if hasattr(DeepSpeedEngine, f"_configure_{configure}"):
                setattr(self, name, getattr(self, f"_configure_{configure}")())

    def _configure_zero_optimizer(self, optimizer: torch.optim.Optimizer | None) -> MegaTrainOptimizer | None:
        if optimizer is None:
            self._start(groups={}, on_unit_done=lambda _unit: None)
            return None
        model_dtype, _ = self.get_data_types()
        wrapped = MegaTrainOptimizer(
            optimizer,
            settings=StepSettings(
                clip_grad=self.gradient_clipping(),
                dtype=model_dtype,
                sub_group_size=int(self.zero_sub_group_size()),
                is_boundary=boundary_of(self),
            ),
            loss_scaler=CreateLossScaler(
                dtype=model_dtype,
                static_loss_scale=self.loss_scale(),
                dynamic_scaling=self.dynamic_loss_scale(),
                dynamic_loss_args=self.dynamic_loss_scale_args(),
            ),
            dp_process_group=self.seq_data_parallel_group,
        )
        groups = {
            param: position
            for position, group in enumerate(optimizer.param_groups)
            for param in group["params"]
            if param.requires_grad and param.numel() > 0
        }
        if not groups:
            raise UnsupportedOptimizerError(
                explain(
                    "optimizer.param_groups",
                    f"{len(optimizer.param_groups)} groups without a trainable parameter",
                    "there is nothing to train",
                    "Unfreeze parameters (requires_grad_) before deepspeed.initialize, or leave the optimizer out",
                )
            )
        self._start(groups=groups, on_unit_done=weakly(wrapped.on_unit_done))
        wrapped.attach(self.runtime)
        param_access.attach(self.runtime.units, wrapped.parameters)
        return wrapped

    def _start(self, *, groups: dict[nn.Parameter, int], on_unit_done: Callable[[int], None]) -> None:
        config, deepspeed_config = self._megatrain_config, self._config
        assert deepspeed_config is not None
        accumulation = deepspeed_config.grad_accum_dtype
        policy = StepPolicy(
            accumulates=bool(groups) and self.gradient_accumulation_steps() > 1,
            accumulation_dtype=torch.float32 if accumulation is None else DtypeEnum(accumulation).value,
            measure_norm=config.finite_check or self.gradient_clipping() > 0.0 or self.fp16_enabled(),
        )
        self._runtime = build_runtime(
            self._model,
            config=config,
            policy=policy,
            groups=groups,
            device=torch.device(self.device),  # type: ignore[arg-type]
            on_unit_done=on_unit_done,
        )
        for buffer_owner in self._model.modules():
            for name, buffer in buffer_owner._buffers.items():
                if buffer is not None:
                    buffer_owner._buffers[name] = buffer.to(self.device)
        self._late_changes = LateChanges(self._model, self._runtime.units)
        self._model_checkpointing = ModelCheckpointing(self._model)
        # Its synchronisations at both ends of a step would stop what runs across them.
        self.tput_timer.config.synchronized = False
        # Threads and page locks go with the engine, even if destroy() is never called.
        self._finalizer = weakref.finalize(self, self._runtime.close)

    def _create_module_forward_post_hook(self) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> Any:
            self._forward_epilogue()
            return hand_out(output) if torch.is_grad_enabled() else None

        return self._model.register_forward_hook(hook)

    def _forward_prologue(self, inputs: Any, kwargs: Any) -> Any:
        self._model_checkpointing.bypass()
        self._start_timers(self.engine_timers.forward_timers)
        if self._profiles_this_step():
            self.flops_profiler.start_profile(ignore_list=None)
        if self.training_dataloader is None:
            self.tput_timer.start()
        self._late_changes.check(self.global_steps)
        self.runtime.access.invalidate_slots()
        self.runtime.executor.begin_forward()

    def _forward_epilogue(self) -> None:
        self.runtime.executor.end_forward()
        self.runtime.access.end_forward()
        self._stop_timers(self.engine_timers.forward_timers)
        if self._profiles_this_step():
            self.flops_profiler.stop_profile()

    def _profiles_this_step(self) -> bool:
        return (
            self.flops_profiler_enabled()
            and self.global_steps == self.flops_profiler_profile_step()
            and self.global_rank == 0
        )

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Run backward on a loss; see `DeepSpeedEngine.backward`.

        An exception in it frees every slot and buffer and drops the gradients gathered since the last step.
        """
        self._pass_begun = False
        # DeepSpeed begins a pass by hooks on the output, which are gone if the caller wrote it in place.
        hook = loss.register_hook(lambda _grad: self._backward_prologue()) if _has_graph(loss) else None
        try:
            return super().backward(loss, retain_graph=retain_graph, scale_wrt_gas=scale_wrt_gas)
        except BaseException as error:
            if self._runtime is not None and isinstance(self.optimizer, MegaTrainOptimizer):
                add_note(error, f"megatrain: raised in backward, {self._runtime.executor.backward_position}")
                self.optimizer.reset_iteration("backward() raised")
            raise
        finally:
            if hook is not None:
                hook.remove()

    def _backward_prologue(self) -> None:
        if self._running_engine_backward and self._pass_begun:
            return
        self._pass_begun = True
        super()._backward_prologue()

    def zero_grad(self) -> None:
        """Drop `param.grad` of parameters that no optimizer steps; the others' gradients a step consumes."""
        for param in self._model.parameters():
            param.grad = None

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Several backward passes inside, one `step()` after: their gradients add up; see `DeepSpeedEngine`."""
        before = self._is_gradient_accumulation_boundary
        self._is_gradient_accumulation_boundary = False
        try:
            yield
        finally:
            self._is_gradient_accumulation_boundary = before

    def compile(
        self,
        backend: Any = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the forward of each streamed unit; see `DeepSpeedEngine.compile`. As `"compile": true` does.

        Args:
            backend: as `torch.compile`'s.
            compile_kwargs: `torch.compile`'s other arguments.
            schedule: refused.
            compiled_autograd_enabled: refused.

        Raises:
            UnsupportedModelError: something was asked for that streaming does not go with.
        """
        refuse_beyond_forward(schedule=schedule, compiled_autograd_enabled=compiled_autograd_enabled)
        settings = {key: value for key, value in (compile_kwargs or {}).items() if key != "backend"}
        compiler = UnitCompiler(backend, settings=settings, device=self.runtime.streams.device)
        for forward in self.runtime.forwards:
            forward.compile(compiler)
        self._is_compiled = True

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """The module's state_dict with full-shape values; updates under way are waited for."""
        state = self._model.state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        if exclude_frozen_parameters:
            for name, param in self._model.named_parameters():
                if not param.requires_grad:
                    state.pop(name, None)
        return state

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        # Copies: the caller may keep them while training goes on. Tied names share one copy.
        copies: dict[int, torch.Tensor] = {}
        state = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                key = value.data_ptr() if value.numel() else id(value)
                if key not in copies:
                    copies[key] = value.detach().to("cpu", copy=True)
                state[name] = copies[key]
        return state

    def destroy(self) -> None:
        """Stop threads, unlock host memory, and give the module its own forward back; idempotent.

        Parameters stay readable, full shape, where their values are.
        """
        if self._runtime is not None:
            self._let_go()
        super().destroy()

    def _let_go(self) -> None:
        runtime, self._runtime = self._runtime, None
        for name in ("module_forward_pre_hook", "module_forward_post_hook"):
            hook = getattr(self, name, None)
            if hook is not None:
                hook.remove()
        if runtime is not None:
            self._model_checkpointing.restore()
            self._finalizer.detach()
            runtime.close()


def _has_graph(loss: Any) -> bool:
    return isinstance(loss, torch.Tensor) and loss.requires_grad
