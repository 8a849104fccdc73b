"""The composition root: turns a model and its settings into a running engine's parts.

The only module that constructs collaborators; everything else receives them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatrain_ds.config import BLOCK_KEY
from megatrain_ds.engine import param_access
from megatrain_ds.errors import EngineConfigError, explain
from megatrain_ds.memory.host_store import HostStore
from megatrain_ds.memory.layout import ParameterSpec, UnitLayout, plan_unit
from megatrain_ds.memory.streams import make_streams
from megatrain_ds.model.compiled import UnitCompiler
from megatrain_ds.model.discovery import find_units
from megatrain_ds.model.parameters import adopt, release
from megatrain_ds.optim.deferral import MomentDeferral
from megatrain_ds.optim.kernel import load_kernel
from megatrain_ds.optim.pipeline import HostPipeline
from megatrain_ds.planning.footprint import Footprint, estimate, require_host_memory
from megatrain_ds.planning.probe import available_host_bytes
from megatrain_ds.runtime.access import ParameterAccess
from megatrain_ds.runtime.executor import Executor
from megatrain_ds.runtime.gradient_buffers import GradientBuffers
from megatrain_ds.runtime.gradients import GradientDrain
from megatrain_ds.runtime.root_weights import RootWeights
from megatrain_ds.runtime.schedule import Schedule
from megatrain_ds.runtime.slot import SlotPool
from megatrain_ds.runtime.staging import STAGING_BLOCKS
from megatrain_ds.runtime.streamer import WeightStreamer
from megatrain_ds.runtime.unit_forward import UnitForward
from megatrain_ds.telemetry.trace import ChromeTracer, NullTracer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from megatrain_ds.config import MegaTrainConfig
    from megatrain_ds.memory.streams import Streams
    from megatrain_ds.model.units import Unit
    from megatrain_ds.optim.kernel import UpdateKernel

logger = logging.getLogger("megatrain_ds")


@dataclass(frozen=True)
class StepPolicy:
    """How gradients become steps.

    Attributes:
        accumulates: more than one micro-batch a step is expected.
        accumulation_dtype: dtype in which micro-batches are added.
        measure_norm: clipping or the finite check needs every gradient's norm.
    """

    accumulates: bool
    accumulation_dtype: torch.dtype
    measure_norm: bool


@dataclass
class Runtime:
    """The parts of a built engine."""

    config: MegaTrainConfig
    policy: StepPolicy
    units: list[Unit]
    layouts: list[UnitLayout]
    footprint: Footprint
    store: HostStore
    streams: Streams
    tracer: NullTracer
    pipeline: HostPipeline
    pool: SlotPool
    drain: GradientDrain
    executor: Executor
    roots: RootWeights
    access: ParameterAccess
    forwards: list[UnitForward] = field(default_factory=list)

    def update_order(self) -> list[int]:
        """Unit indices in the order in which the next forward needs them."""
        position = {unit: place for place, unit in reversed(list(enumerate(self.executor.schedule.order)))}
        last = len(position)

        def key(unit: Unit) -> tuple[float, int]:
            if unit.is_root:
                # A root unit first used after n streamed units comes just before the next one.
                return self.roots.first_use(unit.index) - 0.5, unit.index
            return position.get(unit.index, last), unit.index

        return [unit.index for unit in sorted(self.units, key=key)]

    def close(self) -> None:
        """Stop threads, unlock pages, give modules and parameters back; idempotent. Never raises.

        Parameters stay readable, full shape, where their values are.
        """
        for forward in self.forwards:
            forward.remove()
        self.roots.close()
        self.pipeline.close()
        self.streams.close()
        self.tracer.close()
        self.drain.close()
        self.store.close()
        param_access.detach(self.units)
        for unit in self.units:
            for _, param in unit.parameters:
                release(param)


def build_runtime(
    model: nn.Module,
    *,
    config: MegaTrainConfig,
    policy: StepPolicy,
    groups: Mapping[nn.Parameter, int],
    device: torch.device,
    on_unit_done: Callable[[int], None],
) -> Runtime:
    """Lay out, check, allocate, and redirect the model's blocks.

    Args:
        model: the user's model, full parameters in compute precision on any device.
        config: the megatrain block.
        policy: how gradients become steps.
        groups: optimizer group per trainable parameter; parameters that are not in it are frozen.
        device: where compute runs.
        on_unit_done: called with a unit index when a backward call of it has ended.

    Raises:
        UnsupportedModelError: the structure cannot be served.
        HostMemoryError: too little host memory; nothing was allocated.
        EngineConfigError: the trace file cannot be written.
    """
    if config.trace_file is not None:
        _check_writable(config.trace_file)
    units = find_units(model, config.units)
    layouts = [plan_unit(_specs(unit, groups)) for unit in units]
    footprint = _plan(units, layouts, config, policy)
    _check_memory(footprint, model, config)
    kernel = load_kernel(config.update_kernel, config.update_threads)
    store = HostStore(
        layouts,
        pin=_pins(config, device),
        direct_gradients=not policy.accumulates,
        accumulation_dtype=policy.accumulation_dtype,
        load=lambda views: _move_values(units, views),
        prefault=kernel.prefault,
    )
    runtime = _compose(units, layouts, footprint, store, kernel, config, policy, device, on_unit_done)
    _take_over(runtime)
    _log(runtime)
    return runtime


def _compose(
    units: list[Unit],
    layouts: list[UnitLayout],
    footprint: Footprint,
    store: HostStore,
    kernel: UpdateKernel,
    config: MegaTrainConfig,
    policy: StepPolicy,
    device: torch.device,
    on_unit_done: Callable[[int], None],
) -> Runtime:
    tracer = _make_tracer(config, device)
    common: dict[str, Any] = {"names": [unit.name for unit in units], "tracer": tracer}
    streams = make_streams(device, synchronous=config.synchronous, tracer=tracer)
    deferral = MomentDeferral([_updated_elements(layout) for layout in layouts])
    pipeline = HostPipeline(store.units, kernel=kernel, deferral=deferral, synchronous=config.synchronous, **common)
    pool = SlotPool(config.weight_slots, footprint.largest_unit_bytes, device)
    schedule = Schedule()
    flows: dict[str, Any] = {"host_units": store.units, "streams": streams, **common}
    streamer = WeightStreamer(pool=pool, publication=pipeline, **flows)
    buffers = GradientBuffers(config.gradient_slots, footprint.largest_gradient_bytes, streams)
    drain = GradientDrain(
        store=store,
        buffers=buffers,
        staging_bytes=footprint.staging_block_bytes,
        measure_norm=policy.measure_norm,
        streams=streams,
        pipeline=pipeline,
        pin=_pins(config, device),
        **common,
    )
    executor = Executor(streamer=streamer, drain=drain, schedule=schedule, on_unit_done=on_unit_done, **flows)
    roots = RootWeights(
        units=[unit for unit in units if unit.is_root],
        position=lambda: len(schedule.under_way),
        host_units=store.units,
        streams=streams,
        pipeline=pipeline,
        tracer=tracer,
    )
    access = ParameterAccess(
        host_units=store.units, pipeline=pipeline, roots=roots, compute_device=executor.device_in_use
    )
    return Runtime(
        config,
        policy,
        units,
        layouts,
        footprint,
        store,
        streams,
        tracer,
        pipeline,
        pool,
        drain,
        executor,
        roots,
        access,
    )


def _updated_elements(layout: UnitLayout) -> int:
    return sum(place.spec.numel for place in layout.placements if place.spec.group is not None)


def _log(runtime: Runtime) -> None:
    footprint, streamed = runtime.footprint, [unit for unit in runtime.units if not unit.is_root]
    logger.info(
        "megatrain: %d streamed units, %d root units, %.2f GiB host (%.1f bytes a parameter, %.2f GiB page-locked), "
        "%.2f GiB device besides activations",
        len(streamed),
        len(runtime.units) - len(streamed),
        footprint.host_bytes / 2**30,
        footprint.host_bytes_per_parameter,
        sum(arena.pinned_bytes for arena in runtime.store.arenas) / 2**30,
        footprint.device_bytes / 2**30,
    )


def _pins(config: MegaTrainConfig, device: torch.device) -> bool:
    return config.pin_memory and device.type == "cuda"


def _specs(unit: Unit, groups: Mapping[nn.Parameter, int]) -> list[ParameterSpec]:
    return [
        ParameterSpec(name, tuple(param.shape), param.dtype, groups.get(param) if param.requires_grad else None)
        for name, param in unit.parameters
    ]


def _plan(
    units: Sequence[Unit], layouts: Sequence[UnitLayout], config: MegaTrainConfig, policy: StepPolicy
) -> Footprint:
    pairs = list(zip(units, layouts, strict=True))
    return estimate(
        streamed=[layout for unit, layout in pairs if not unit.is_root],
        roots=[layout for unit, layout in pairs if unit.is_root],
        accumulates=policy.accumulates,
        accumulation_dtype=policy.accumulation_dtype,
        weight_slots=config.weight_slots,
        gradient_slots=config.gradient_slots,
        staging_blocks=STAGING_BLOCKS,
    )


def _check_memory(footprint: Footprint, model: nn.Module, config: MegaTrainConfig) -> None:
    if config.host_memory_limit_gib is not None:
        have = int(config.host_memory_limit_gib * 2**30)
    else:
        # The model's own host tensors are given back as their values move into the arenas.
        have = available_host_bytes() + sum(
            param.numel() * param.element_size() for param in model.parameters() if param.device.type == "cpu"
        )
    require_host_memory(footprint, have_bytes=have)


def _make_tracer(config: MegaTrainConfig, device: torch.device) -> NullTracer:
    if config.trace_file is None:
        return NullTracer()
    return ChromeTracer(
        config.trace_file,
        skip_steps=config.trace_after,
        num_steps=config.trace_steps,
        use_cuda=device.type == "cuda",
    )


def _check_writable(path: str) -> None:
    # Now, not when the last step to be recorded is over. What was not there is not left there empty.
    file = Path(path)
    existed = file.exists()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.open("a").close()
        if not existed:
            file.unlink()
    except OSError as error:
        name, action = f"{BLOCK_KEY}.trace_file", "Name a file that this process may write"
        raise EngineConfigError(explain(name, path, f"cannot be written ({error.strerror})", action)) from None


def _move_values(units: Sequence[Unit], views: Sequence[Sequence[torch.Tensor]]) -> None:
    # Parameter by parameter, so that the model is held once; its own memory is free before optimizer state is made.
    with torch.no_grad():
        for unit, unit_views in zip(units, views, strict=True):
            for (_, param), view in zip(unit.parameters, unit_views, strict=True):
                view.copy_(param.data)
                param.data = view


def _take_over(runtime: Runtime) -> None:
    compiler = UnitCompiler(settings={}, device=runtime.streams.device) if runtime.config.compile else None
    runtime.roots.move_to_device()
    for unit, layout in zip(runtime.units, runtime.layouts, strict=True):
        for index, (_, param) in enumerate(unit.parameters):
            adopt(param, runtime.access, (unit.index, index))
        if not unit.is_root:
            trainable = [placement.spec.group is not None for placement in layout.placements]
            keep = runtime.config.activations == "keep"
            forward = UnitForward(unit, trainable, runtime.executor, keep_activations=keep)
            if compiler is not None:
                forward.compile(compiler)
            forward.install()
            runtime.forwards.append(forward)

    def is_trainable(unit: int, index: int) -> bool:
        return runtime.layouts[unit].placements[index].spec.group is not None

    runtime.roots.watch_gradients(runtime.executor.root_gradient, is_trainable)
