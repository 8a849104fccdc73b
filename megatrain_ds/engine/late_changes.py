"""Notices what user code changed about the model after the engine was built and what no update would ever reach."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from torch import nn

from megatrain_ds.errors import MegaTrainWarning, UnsupportedModelError, explain
from megatrain_ds.model.compiled import check_not_compiled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatrain_ds.model.units import Unit


class LateChanges:
    """Knows the parameters that the engine was built for.

    Args:
        model: the user's model.
        units: the engine's units.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        self._model = model
        self._known = {id(param): param.requires_grad for unit in units for _, param in unit.parameters}
        self._step = -1
        self._told = False

    def check(self, step: int) -> None:
        """Look once per optimizer step.

        Args:
            step: optimizer steps done.

        Raises:
            UnsupportedModelError: a parameter was added or replaced, or a module was compiled.
        """
        if step == self._step:
            return
        self._step = step
        check_not_compiled(self._model)
        for name, param in self._model.named_parameters():
            # Plain tensors stand there for the length of a torch.func.functional_call.
            if type(param) is not nn.Parameter and id(param) not in self._known:
                continue
            known = self._known.get(id(param))
            if known is None:
                raise UnsupportedModelError(
                    explain(
                        name,
                        tuple(param.shape),
                        "was added or replaced after deepspeed.initialize and would never be trained",
                        "Change the model first, then call deepspeed.initialize",
                    )
                )
            if param.requires_grad != known and not self._told:
                self._told = True
                warnings.warn(
                    explain(
                        f"{name}.requires_grad",
                        param.requires_grad,
                        "was changed after deepspeed.initialize and has no effect on which parameters are trained",
                        "Freeze and unfreeze before deepspeed.initialize, or initialize again",
                    ),
                    MegaTrainWarning,
                    stacklevel=2,
                )
