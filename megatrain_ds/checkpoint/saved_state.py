"""Reads a ZeRO-3 checkpoint of one rank and finds every parameter in it by name.

Whoever wrote it, stock DeepSpeed or this package: the split into sub groups is read from the checkpoint and need not be
the engine's. Tensors are mapped from the files, not read, so that loading needs no memory of its own.
"""

from __future__ import annotations

import pickle
import zipfile
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.checkpoint.constants import FP32_FLAT_GROUPS, OPTIMIZER_STATE_DICT, PARTITION_COUNT, ZERO_STAGE

from megatrain_ds.checkpoint.deepspeed_layout import MODEL_FILE, MOMENTS, OWN_KEY, optimizer_file
from megatrain_ds.errors import CheckpointError, explain

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_UNREADABLE = (RuntimeError, EOFError, OSError, ValueError, KeyError, pickle.UnpicklingError, zipfile.BadZipFile)
_OTHER_WORLD = "Load it with as many ranks as it was saved with, or convert it with zero_to_fp32.py"


@dataclass(frozen=True)
class SavedParameter:
    """One parameter in a checkpoint.

    Attributes:
        shape: full shape.
        weight: its elements, flat [numel]: the fp32 master, or the compute copy of a frozen parameter.
        moments: flat fp32 [numel] by "exp_avg" and "exp_avg_sq"; None when frozen; empty before the first step.
        step: optimizer steps applied to it.
    """

    shape: torch.Size
    weight: torch.Tensor
    moments: dict[str, torch.Tensor] | None
    step: int = 0


@dataclass(frozen=True)
class SavedState:
    """A checkpoint as its files hold it.

    Attributes:
        model: content of the model file.
        optimizer: the optimizer's state dict in ZeRO-3's layout.
        parameters: every parameter by name.
        aliases: other names of tied parameters, each with a name in `parameters`.
    """

    model: dict[str, Any]
    optimizer: dict[str, Any]
    parameters: dict[str, SavedParameter]
    aliases: dict[str, str] = field(default_factory=dict)

    def find(self, names: Sequence[str]) -> SavedParameter | None:
        """The parameter that goes by any of `names`."""
        for name in names:
            found = self.parameters.get(self.aliases.get(name, name))
            if found is not None:
                return found
        return None

    def weights(self) -> dict[str, torch.Tensor]:
        """Every weight by name in its full shape, aliases and buffers included; mapped from the files."""
        values = dict(self.model["module"])
        for name in values.keys() & (self.parameters.keys() | self.aliases.keys()):
            found = self.find([name])
            if found is not None:
                values[name] = found.weight.view(found.shape)
        return values


def read_checkpoint(folder: Path, *, bf16: bool) -> SavedState:
    """Read and check the files of a checkpoint.

    Args:
        folder: the folder of a tag.
        bf16: which of the two names of the optimizer file to try first.

    Raises:
        CheckpointError: a file is missing or damaged, the checkpoint is of another ZeRO stage or number of ranks, or
            its parts contradict each other.
    """
    model_path = _existing(folder, [MODEL_FILE])
    model = _read(model_path)
    ranks = model.get("dp_world_size", 1)
    if ranks != 1:
        raise CheckpointError(explain(str(folder), ranks, "is a checkpoint of that many ranks, not of 1", _OTHER_WORLD))
    optimizer_path = _existing(folder, [optimizer_file(bf16=bf16), optimizer_file(bf16=not bf16)])
    optimizer = _read(optimizer_path).get(OPTIMIZER_STATE_DICT, {})
    _check_stage(optimizer_path, optimizer)
    shapes = model.get("param_shapes") or []
    parameters = index_parameters(optimizer, shapes, str(optimizer_path))
    for name, shape in (model.get("frozen_param_shapes") or {}).items():
        weight = model["frozen_param_fragments"][name].reshape(-1)
        if weight.numel() != torch.Size(shape).numel():
            rule = f"is not what the shape {tuple(shape)} in the same file holds"
            raise CheckpointError(explain(f"{model_path}: elements of {name}", weight.numel(), rule, _OTHER_WORLD))
        parameters[name] = SavedParameter(torch.Size(shape), weight, None)
    return SavedState(model, optimizer, parameters, dict(model.get("shared_params") or {}))


def index_parameters(
    optimizer: Mapping[str, Any], shapes: Sequence[Mapping[str, Sequence[int]]], origin: str
) -> dict[str, SavedParameter]:
    """Find every parameter in the flat groups of an optimizer state dict.

    Args:
        optimizer: ZeRO-3's optimizer state dict of one rank.
        shapes: per sub group, names and shapes in the order of the flat tensor.
        origin: what to call the dict in messages.

    Raises:
        CheckpointError: flat tensors and shapes contradict each other.
    """
    flat_groups, states = optimizer[FP32_FLAT_GROUPS], optimizer[OPTIMIZER_STATE_DICT]["state"]
    if len(flat_groups) != len(shapes):
        rule = f"differs from the {len(shapes)} sub groups that the parameter shapes describe"
        action = "Save the checkpoint again, or set the sub_group_size it was saved with"
        raise CheckpointError(explain(f"{origin}: sub groups", len(flat_groups), rule, action))
    own_steps = optimizer.get(OWN_KEY, {}).get("parameter_steps", {})
    found: dict[str, SavedParameter] = {}
    for position, (flat, group) in enumerate(zip(flat_groups, shapes, strict=True)):
        state = states.get(position, {})
        _check_sizes(f"{origin}: sub group {position}", flat, state, group)
        offset = 0
        for name, shape in group.items():
            size = torch.Size(shape)
            part = slice(offset, offset + size.numel())
            moments = {kind: state[kind][part] for kind in MOMENTS if kind in state}
            found[name] = SavedParameter(size, flat[part], moments, own_steps.get(name, int(state.get("step", 0))))
            offset += size.numel()
    return found


def _check_sizes(name: str, flat: torch.Tensor, state: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> None:
    expected = sum(torch.Size(shape).numel() for shape in shapes.values())
    for kind, tensor in {"fp32": flat, **{kind: state[kind] for kind in MOMENTS if kind in state}}.items():
        if tensor.numel() != expected:
            rule = f"differs from the {expected} elements of the parameters {', '.join(list(shapes)[:3])}, ..."
            raise CheckpointError(explain(f"{name}: elements of {kind}", tensor.numel(), rule, _OTHER_WORLD))


def _check_stage(path: Path, optimizer: Mapping[str, Any]) -> None:
    stage, count = optimizer.get(ZERO_STAGE), optimizer.get(PARTITION_COUNT, 1)
    if stage is None or int(stage) != 3:
        action = "Save it with stage 3, or load consolidated weights into the model before deepspeed.initialize"
        raise CheckpointError(explain(f"{path}: zero_stage", stage, "only checkpoints of ZeRO stage 3 load", action))
    if count != 1:
        raise CheckpointError(explain(f"{path}: partition_count", count, "has to be 1", _OTHER_WORLD))


def _existing(folder: Path, names: Sequence[str]) -> Path:
    for name in names:
        if (folder / name).is_file():
            return folder / name
    rule = "is not a complete ZeRO-3 checkpoint: there is no " + " and no ".join(names)
    raise CheckpointError(explain("checkpoint folder", str(folder), rule, "Check load_dir and tag"))


def _read(path: Path) -> dict[str, Any]:
    try:
        # Files in torch's format before the zip cannot be mapped.
        content = torch.load(path, map_location="cpu", mmap=zipfile.is_zipfile(path), weights_only=False)
    except _UNREADABLE as error:
        rule = f"cannot be read, it is cut off or damaged ({error})"
        raise CheckpointError(explain("checkpoint file", str(path), rule, "Load another checkpoint")) from error
    if not isinstance(content, dict):
        rule = "is not a DeepSpeed checkpoint file"
        raise CheckpointError(explain(str(path), type(content).__name__, rule, "Check load_dir and tag"))
    return content
