"""The host update by DeepSpeed's own C++ Adam: a testing option, for bit comparison with stock ZeRO-3 offload.

Knows nothing about DeepSpeed's Python optimizer; it calls the same compiled operator on flat tensors. The operator
holds the GIL for the whole call, so nothing overlaps with it.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch

from megatrain_ds.errors import explain
from megatrain_ds.optim.adam import AdamStep, UpdatePart
from megatrain_ds.optim.operands import check_update
from megatrain_ds.optim.torch_kernel import TorchKernel

# DeepSpeedCPUAdam numbers its C++ objects 0, 1, 2, ... in one process-wide table: ours count down from -1.
_object_ids = itertools.count(-1, -1)


class DeepSpeedKernel(TorchKernel):
    """Update kernel around `adam_update` of DeepSpeed's CPU Adam; everything but the update is done in torch.

    [Note: The running powers] The C++ object multiplies its fp32 powers of the betas once when the step it is given is
    one more than its last, leaves them for the same step, and recomputes them by `pow` after any other jump or when
    the betas change. One object therefore serves every flat buffer of a step, as it does in ZeRO-3: one object per
    buffer would give the same powers, but an object per call would take `pow` and differ in the last bits.
    AdamW or Adam with L2 is fixed when an object is made, so there is one for each.
    """

    name = "deepspeed"

    def __init__(self) -> None:
        from deepspeed.ops import op_builder

        # The builders are put into the package at run time, by the accelerator.
        self._operator: Any = getattr(op_builder, "CPUAdamBuilder")().load()  # noqa: B009
        self._objects: dict[bool, int] = {}
        self._finalizer = weakref.finalize(self, _destroy, self._operator, self._objects)

    @torch.no_grad()
    def update(
        self,
        *,
        master: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        grad: torch.Tensor,
        compute: torch.Tensor | None,
        hyper: AdamStep,
        part: UpdatePart = UpdatePart.ALL,
    ) -> None:
        """Apply one Adam step by DeepSpeed's operator; every buffer of a step, then the next step."""
        if part is not UpdatePart.ALL:
            raise ValueError(explain("part", part.name, "DeepSpeed's operator writes everything", "Pass ALL"))
        compute = check_update(master, exp_avg, exp_avg_sq, grad, compute)
        # A copy even in fp32: scaling in place would change the caller's gradient.
        grad32 = grad.to(torch.float32, copy=True).mul_(hyper.grad_scale)
        self._operator.adam_update(
            self._object_for(hyper),
            hyper.step,
            hyper.lr,
            hyper.beta1,
            hyper.beta2,
            hyper.eps,
            hyper.weight_decay,
            hyper.bias_correction,
            master,
            grad32,
            exp_avg,
            exp_avg_sq,
        )
        if compute is not None:
            compute.copy_(master)

    def close(self) -> None:
        """Free the C++ objects; a later update makes new ones."""
        _destroy(self._operator, self._objects)

    def _object_for(self, hyper: AdamStep) -> int:
        if hyper.decoupled not in self._objects:
            number = next(_object_ids)
            defaults = (hyper.lr, hyper.beta1, hyper.beta2, hyper.eps, hyper.weight_decay, hyper.decoupled, False)
            self._operator.create_adam(number, *defaults)
            self._objects[hyper.decoupled] = number
        return self._objects[hyper.decoupled]


def _destroy(operator: Any, objects: dict[bool, int]) -> None:
    while objects:
        operator.destroy_adam(objects.popitem()[1])
