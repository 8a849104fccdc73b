"""Puts a saved state into live parameters, after everything about it has been checked.

[Note: Check first, change last]
A load that fails must leave the engine as it was. So `plan` compares every name and shape and changes nothing; what it
returns can be applied without another reason to fail.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from deepspeed.checkpoint.constants import LOSS_SCALER, OPTIMIZER_STATE_DICT

from megatrain_ds.checkpoint.deepspeed_layout import MOMENTS, load_group_settings
from megatrain_ds.checkpoint.saved_state import SavedParameter, SavedState, index_parameters
from megatrain_ds.errors import CheckpointError, explain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatrain_ds.checkpoint.deepspeed_layout import Entry, SteppingOptimizer

_NOT_STRICT = "Load with load_module_strict=False to leave it as it is"
_WEIGHTS_ONLY = "Load with load_optimizer_states=False"


class FrozenEntry(Protocol):
    """A parameter that no optimizer steps."""

    @property
    def shape(self) -> torch.Size:
        """Full shape."""
        ...

    def write(self, value: torch.Tensor) -> None:
        """Replace the weight everywhere; `value` has its full shape and any floating dtype."""
        ...


@dataclass(frozen=True)
class Target:
    """A live parameter.

    Attributes:
        names: every name that it goes by in the model.
        entry: writes it; an `Entry` when an optimizer steps it.
        stepped: whether an optimizer steps it.
    """

    names: tuple[str, ...]
    entry: Any
    stepped: bool


@dataclass(frozen=True)
class Assignment:
    """One live parameter and what it becomes."""

    target: Target
    saved: SavedParameter
    with_moments: bool

    def apply(self) -> None:
        """Write weight, and moments and step count if asked for; every copy of the weight follows."""
        weight = self.saved.weight.view(self.saved.shape)
        if not self.target.stepped:
            self.target.entry.write(weight)
            return
        entry: Entry = self.target.entry
        if self.with_moments:
            for kind in MOMENTS:
                value = (self.saved.moments or {}).get(kind)
                if value is None:
                    entry.view(kind).zero_()
                else:
                    entry.view(kind).copy_(value.view(self.saved.shape))
            entry.set_step(self.saved.step)
        entry.view("master").copy_(weight)
        entry.publish_master()


def plan(targets: Sequence[Target], saved: SavedState, *, strict: bool, with_moments: bool) -> list[Assignment]:
    """Find the saved value of every live parameter; changes nothing.

    Args:
        targets: every live parameter once.
        saved: the checkpoint.
        strict: refuse a live parameter that the checkpoint does not hold.
        with_moments: restore moments and step counts too; they must be there for every stepped parameter.

    Raises:
        CheckpointError: a parameter is missing or of another shape.
    """
    assignments = []
    for target in targets:
        found = saved.find(target.names)
        name = target.names[0]
        if found is None:
            if strict or (with_moments and target.stepped):
                action = _NOT_STRICT if not target.stepped else f"{_NOT_STRICT} (and load_optimizer_states=False)"
                raise CheckpointError(explain("parameter", name, "is not in the checkpoint", action))
            continue
        if found.shape != target.entry.shape:
            rule = f"is its shape in the model, but {tuple(found.shape)} in the checkpoint"
            action = "Build the model that was saved"
            raise CheckpointError(explain(f"shape of {name}", tuple(target.entry.shape), rule, action))
        if with_moments and target.stepped and found.moments is None:
            rule = "was frozen when the checkpoint was saved, so that it has no optimizer state there"
            raise CheckpointError(explain("parameter", name, rule, _WEIGHTS_ONLY))
        assignments.append(Assignment(target, found, with_moments and target.stepped))
    return assignments


def check_groups(optimizer: SteppingOptimizer, state: dict[str, Any]) -> None:
    """Compare the number of parameter groups.

    Raises:
        CheckpointError: it differs.
    """
    live, saved = len(optimizer.param_groups), len(state[OPTIMIZER_STATE_DICT]["param_groups"])
    if live != saved:
        rule = f"differs from the {saved} of the checkpoint"
        raise CheckpointError(explain("number of optimizer parameter groups", live, rule, _WEIGHTS_ONLY))


def apply_optimizer_settings(optimizer: SteppingOptimizer, state: dict[str, Any]) -> None:
    """Restore what belongs to no parameter: hyper-parameters of the groups, loss scaler, overflow."""
    load_group_settings(optimizer.param_groups, state[OPTIMIZER_STATE_DICT]["param_groups"])
    scaler = state[LOSS_SCALER]
    # A checkpoint of another precision brings a scaler that does not fit this one.
    if scaler is not None and type(scaler) is type(optimizer.loss_scaler):
        optimizer.loss_scaler = scaler
        optimizer.dynamic_loss_scale = state["dynamic_loss_scale"]
    optimizer.overflow = state["overflow"]


def load_optimizer_state(
    optimizer: SteppingOptimizer, state: Any, *, load_optimizer_states: bool = True, **_: Any
) -> None:
    """Load what `optimizer_state_dict` gave, of an optimizer with the same sub groups.

    Args:
        optimizer: see `SteppingOptimizer`.
        state: the dict, or a list with the dict of the only rank.
        load_optimizer_states: restore moments, step counts and hyper-parameters too.

    Raises:
        CheckpointError: it does not fit; nothing was changed.
    """
    if isinstance(state, (list, tuple)):
        if len(state) != 1:
            rule = "one rank cannot take the state of several"
            raise CheckpointError(explain("number of optimizer partitions", len(state), rule, "Use as many ranks"))
        state = state[0]
    shapes = [{entry.name: entry.shape for entry in group} for group in optimizer.sub_groups]
    saved = SavedState({}, state, index_parameters(state, shapes, "optimizer state dict"))
    targets = [Target((entry.name,), entry, True) for group in optimizer.sub_groups for entry in group]
    assignments = plan(targets, saved, strict=True, with_moments=load_optimizer_states)
    if load_optimizer_states:
        check_groups(optimizer, state)
        apply_optimizer_settings(optimizer, state)
    for assignment in assignments:
        assignment.apply()
