"""What DeepSpeed's `safe_get_*` and `safe_set_*` functions find on a parameter.

They dispatch on `_hp_mapping` and call bound functions on the parameter (deepspeed/utils/tensor_fragment.py); values
come back on the compute device, as from stock ZeRO-3. Unlike there, a written master also reaches the compute copy.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from megatrain_ds.engine.parameter_state import ParameterState
    from megatrain_ds.model.units import Unit

_ATTRIBUTES = ("_hp_mapping", "get_full_hp_param", "set_full_hp_param", "get_full_hp_grad", "set_full_hp_grad")


def attach(units: Sequence[Unit], states: Sequence[Sequence[ParameterState]]) -> None:
    """Give every parameter its `ds_status`, and every trainable one the functions."""
    for unit in units:
        for _, param in unit.parameters:
            # TRL reads it unguarded in stage 3.
            param.ds_status = ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]
    for entry in (entry for group in states for entry in group):
        _set(entry.param, "_hp_mapping", entry)
        _set(entry.param, "get_full_hp_param", partial(_get_param, entry))
        _set(entry.param, "set_full_hp_param", partial(_set_param, entry))
        _set(entry.param, "get_full_hp_grad", partial(_get_grad, entry))
        _set(entry.param, "set_full_hp_grad", partial(_set_grad, entry))


def detach(units: Sequence[Unit]) -> None:
    """Undo `attach`."""
    for unit in units:
        for _, param in unit.parameters:
            for name in ("ds_status", *_ATTRIBUTES):
                vars(param).pop(name, None)


def _set(param: nn.Parameter, name: str, value: object) -> None:
    vars(param)[name] = value


def _get_param(entry: ParameterState, optim_state_key: str | None = None) -> torch.Tensor:
    entry.reconcile()
    device = entry.runtime.streams.device
    return entry.view(optim_state_key or "master").to(device, copy=True)


def _set_param(entry: ParameterState, value: torch.Tensor, optim_state_key: str | None = None) -> None:
    entry.reconcile()
    entry.view(optim_state_key or "master").copy_(value)
    if optim_state_key is None:
        entry.publish_master()


def _get_grad(entry: ParameterState) -> torch.Tensor:
    gradient = entry.gradient()
    device = entry.runtime.streams.device
    if gradient is None:
        return torch.zeros(entry.shape, dtype=entry.runtime.policy.accumulation_dtype, device=device)
    return gradient.to(device, copy=True)


def _set_grad(entry: ParameterState, value: torch.Tensor) -> None:
    entry.set_gradient(value)
