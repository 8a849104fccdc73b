"""What an update kernel does, and the choice among the three there are.

A kernel applies Adam to flat host tensors; it knows nothing about units, streams, parameter groups or when a step may
start. "native" is the fused C++ kernel, "torch" the same formula in torch operations, "deepspeed" DeepSpeed's own
operator for bit comparison with ZeRO-3.
"""

from __future__ import annotations

import warnings
from typing import Protocol

import torch

from megatrain_ds.errors import MegaTrainWarning, explain
from megatrain_ds.optim.adam import AdamStep, UpdatePart
from megatrain_ds.optim.native import NativeBuildError, NativeKernel
from megatrain_ds.optim.torch_kernel import TorchKernel
from megatrain_ds.planning.probe import usable_cpus

__all__ = ["KERNEL_NAMES", "AdamStep", "UpdateKernel", "UpdatePart", "default_num_threads", "load_kernel"]

KERNEL_NAMES = ("native", "torch", "deepspeed")


class UpdateKernel(Protocol):
    """Adam on flat host tensors.

    Every tensor is a 1-D contiguous CPU tensor; zero elements are fine. A wrong dtype raises TypeError; a wrong device,
    number of elements, dimension or stride raises ValueError; nothing is written then. Calls on disjoint tensors may
    come from several threads.
    """

    name: str
    splits: bool
    """Whether an update in two parts costs less than two updates."""

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
        """Apply one Adam or AdamW step in place.

        Formula and order of operations are DeepSpeedCPUAdam's; infinities and NaN flow as in torch.

        Args:
            master: fp32 master weights.
            exp_avg: fp32 first moment.
            exp_avg_sq: fp32 second moment.
            grad: fp32, bf16 or fp16 gradient; read only.
            compute: bf16 or fp16 tensor that receives the new master, rounded to nearest even; None for no copy;
                `master` itself when compute is fp32 (nothing more to write).
            hyper: The update's scalars.
            part: What is written. Parts need `hyper.divisible`, the same arguments, and this order.
        """
        ...

    def accumulate(self, *, accumulator: torch.Tensor, grad: torch.Tensor, overwrite: bool) -> None:
        """Set `accumulator` to `grad`, or add `grad` to it.

        Args:
            accumulator: fp32, or of `grad`'s dtype; 16-bit sums are formed in fp32 and rounded to nearest even.
            grad: fp32, bf16 or fp16 gradient; read only.
            overwrite: True to set, False to add.
        """
        ...

    def sum_of_squares(self, grad: torch.Tensor) -> float:
        """Return the sum of squares of an fp32, bf16 or fp16 tensor, added in fp64; inf and NaN propagate."""
        ...

    def prefault(self, block: torch.Tensor) -> None:
        """Make every page of a uint8 tensor resident by a write that leaves its contents unchanged."""
        ...


def default_num_threads() -> int:
    """Return the CPUs this process may keep busy, less one for the launching thread when there are four or more."""
    available = usable_cpus()
    return available - 1 if available >= 4 else max(1, available)


def load_kernel(name: str, num_threads: int | None = None) -> UpdateKernel:
    """Build or load the named kernel.

    The native kernel is compiled on first use and cached; without a working compiler it is replaced by the torch
    kernel, with one warning that shows the compiler's words.

    Args:
        name: "native", "torch" or "deepspeed".
        num_threads: Threads of the native kernel's calls; None for `default_num_threads()`. The other two use torch's
            and OpenMP's own settings.

    Raises:
        ValueError: Unknown name, or fewer than one thread.
    """
    if name not in KERNEL_NAMES:
        raise ValueError(explain("kernel", name, f"must be one of {', '.join(KERNEL_NAMES)}", "Choose one of these"))
    if num_threads is not None and num_threads < 1:
        raise ValueError(explain("num_threads", num_threads, "must be 1 or more", "Leave it out for the default"))
    if name == "deepspeed":
        from megatrain_ds.optim.deepspeed_kernel import DeepSpeedKernel

        return DeepSpeedKernel()
    return TorchKernel() if name == "torch" else _native_or_torch(num_threads or default_num_threads())


def _native_or_torch(num_threads: int) -> UpdateKernel:
    try:
        return NativeKernel(num_threads)
    except NativeBuildError as error:
        message = (
            f"The native update kernel is not available; updates run in torch operations, several times slower. {error}"
        )
        warnings.warn(message, MegaTrainWarning, stacklevel=3)
        return TorchKernel()
