"""What stands where in a ZeRO-3 checkpoint of one rank: names of files, keys, flat groups.

Pure building of state dicts; nothing is written here. The order of a flat group is that of the names in `param_shapes`.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Protocol

import torch
from deepspeed.checkpoint.constants import (
    FP32_FLAT_GROUPS,
    LOSS_SCALER,
    OPTIMIZER_STATE_DICT,
    PARTITION_COUNT,
    ZERO_STAGE,
)
from deepspeed.runtime.zero.config import ZeroStageEnum

from megatrain_ds.checkpoint.archive import StreamedTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

MODEL_FILE = "zero_pp_rank_0_mp_rank_00_model_states.pt"
MOMENTS = ("exp_avg", "exp_avg_sq")
# The engine's own section in both files; stock DeepSpeed and its tools pass over it.
OWN_KEY = "megatrain"
# What no client state may overwrite, because reading the checkpoint depends on it.
RESERVED_KEYS = frozenset(
    [
        "module",
        "buffer_names",
        "param_shapes",
        "frozen_param_shapes",
        "frozen_param_fragments",
        "shared_params",
        "dp_world_size",
        "checkpoint_parallel_dimensions",
        OWN_KEY,
    ]
)


class Entry(Protocol):
    """A parameter that an optimizer steps."""

    @property
    def name(self) -> str:
        """Name in the model."""
        ...

    @property
    def group(self) -> int:
        """Index of its optimizer group."""
        ...

    @property
    def shape(self) -> torch.Size:
        """Full shape."""
        ...

    @property
    def numel(self) -> int:
        """Number of elements."""
        ...

    @property
    def step(self) -> int:
        """Optimizer steps applied to it."""
        ...

    def set_step(self, step: int) -> None:
        """Set the number of optimizer steps applied to it."""
        ...

    def view(self, kind: str) -> torch.Tensor:
        """A live fp32 host view of "master", "exp_avg" or "exp_avg_sq", full shape."""
        ...

    def publish_master(self) -> None:
        """The master was written: make every copy of the weight follow."""
        ...


class SteppingOptimizer(Protocol):
    """What the layout needs of an optimizer."""

    loss_scaler: Any
    dynamic_loss_scale: bool
    overflow: bool

    @property
    def sub_groups(self) -> Sequence[Sequence[Entry]]:
        """Stepped parameters per ZeRO-3 sub group, in order."""
        ...

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Live parameter groups."""
        ...


def optimizer_file(*, bf16: bool) -> str:
    """Name of the file with the optimizer state."""
    return f"{'bf16_' if bf16 else ''}zero_pp_rank_0_mp_rank_00_optim_states.pt"


def is_state_file(name: str) -> bool:
    """Whether a file in a checkpoint's folder belongs to the checkpoint."""
    return name.endswith("_states.pt")


def concatenated(entries: Sequence[Entry], kind: str) -> torch.Tensor:
    """The flat fp32 tensor of a sub group, as a copy."""
    return torch.cat([entry.view(kind).reshape(-1) for entry in entries])


def streamed(entries: Sequence[Entry], kind: str) -> StreamedTensor:
    """The flat fp32 tensor of a sub group, read parameter by parameter when it is written."""
    pieces: list[Callable[[], torch.Tensor]] = [lambda entry=entry: entry.view(kind) for entry in entries]
    return StreamedTensor(pieces, [sum(entry.numel for entry in entries)], torch.float32)


def optimizer_state_dict(
    optimizer: SteppingOptimizer, flatten: Callable[[Sequence[Entry], str], Any] = concatenated
) -> dict[str, Any]:
    """The optimizer's state as ZeRO-3 keeps it.

    Args:
        optimizer: see `SteppingOptimizer`.
        flatten: makes the flat tensor of a sub group; `concatenated` or `streamed`.

    Returns:
        ZeRO-3's dict, its sub groups' "step" being the largest of their parameters'; and under "megatrain" the
        "parameter_steps" by name, which differ where a parameter got no gradient in some steps.
    """
    groups = optimizer.sub_groups
    return {
        ZERO_STAGE: ZeroStageEnum.weights,
        LOSS_SCALER: optimizer.loss_scaler,
        "dynamic_loss_scale": optimizer.dynamic_loss_scale,
        "overflow": optimizer.overflow,
        PARTITION_COUNT: 1,
        OPTIMIZER_STATE_DICT: {
            "state": {position: _group_state(group, flatten) for position, group in enumerate(groups)},
            "param_groups": _saved_groups(optimizer),
        },
        FP32_FLAT_GROUPS: [flatten(group, "master") for group in groups],
        OWN_KEY: {"parameter_steps": {entry.name: entry.step for group in groups for entry in group}},
    }


def empty_optimizer_state_dict() -> dict[str, Any]:
    """The same for an engine without optimizer: every parameter counts as frozen."""
    return {
        ZERO_STAGE: ZeroStageEnum.weights,
        LOSS_SCALER: None,
        "dynamic_loss_scale": False,
        "overflow": False,
        PARTITION_COUNT: 1,
        OPTIMIZER_STATE_DICT: {"state": {}, "param_groups": []},
        FP32_FLAT_GROUPS: [],
    }


def load_group_settings(groups: Sequence[dict[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Write saved hyper-parameters into live groups, which stay the same objects: schedulers hold on to them.

    Args:
        groups: live parameter groups.
        saved: as many groups of a saved state dict.
    """
    for live, source in zip(groups, saved, strict=True):
        for key, value in source.items():
            if key in ("params", "param_names"):
                continue
            current = live.get(key)
            if isinstance(current, torch.Tensor):
                current.fill_(value)
            elif isinstance(value, torch.Tensor) and isinstance(current, (int, float)):
                live[key] = value.item()
            else:
                live[key] = copy.deepcopy(value)


def _group_state(entries: Sequence[Entry], flatten: Callable[[Sequence[Entry], str], Any]) -> dict[str, Any]:
    state = {kind: flatten(entries, kind) for kind in MOMENTS}
    return {"step": max(entry.step for entry in entries), **state}


def _saved_groups(optimizer: SteppingOptimizer) -> list[dict[str, Any]]:
    saved = [
        {key: copy.deepcopy(value) for key, value in group.items() if key not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]
    for group in saved:
        group["params"] = []
    for position, entries in enumerate(optimizer.sub_groups):
        saved[entries[0].group]["params"].append(position)
    return saved
