"""Checks of the tensors given to an update kernel: device, dtype, shape, contiguity.

A kernel works on raw addresses, so nothing past these checks can notice a wrong tensor. Every error names the
argument, its value, the rule and what to do.
"""

from __future__ import annotations

import torch

from megatrain_ds.errors import explain
from megatrain_ds.optim.adam import AdamStep, UpdatePart

GRADIENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COMPUTE_DTYPES = (torch.bfloat16, torch.float16)


def check_update(
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    grad: torch.Tensor,
    compute: torch.Tensor | None,
) -> torch.Tensor | None:
    """Check the tensors of one update and return the compute copy that has to be written, if any.

    Args:
        master: fp32 master weights, 1-D.
        exp_avg: fp32 first moment, as many elements as `master`.
        exp_avg_sq: fp32 second moment, as many elements as `master`.
        grad: fp32, bf16 or fp16 gradient, as many elements as `master`.
        compute: bf16 or fp16 copy, as many elements as `master`; or None; or `master` itself, which needs no copy.

    Raises:
        TypeError: An argument is not a tensor or has the wrong dtype.
        ValueError: An argument is not on the CPU, not 1-D contiguous, or differs in its number of elements.
    """
    for name, tensor in (("master", master), ("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq)):
        _check_flat(name, tensor, (torch.float32,))
    _check_flat("grad", grad, GRADIENT_DTYPES)
    others = [("exp_avg", exp_avg), ("exp_avg_sq", exp_avg_sq), ("grad", grad)]
    if compute is not None and not _same_memory(compute, master):
        _check_flat("compute", compute, COMPUTE_DTYPES)
        others.append(("compute", compute))
    else:
        compute = None
    for name, tensor in others:
        _check_numel(name, tensor, "master", master)
    return compute


def check_part(part: UpdatePart, hyper: AdamStep) -> None:
    """Check that an update may be done in parts.

    Raises:
        ValueError: L2 decay adds the old weight to the gradient, which a second pass would no longer find.
    """
    if part is not UpdatePart.ALL and not hyper.divisible:
        rule = "L2 decay reads the old weight for weights and moments, so that one pass must write both"
        raise ValueError(explain("part", part.name, rule, "Pass ALL"))


def check_accumulate(accumulator: torch.Tensor, grad: torch.Tensor) -> None:
    """Check that `accumulator` is fp32 or of `grad`'s dtype, and both are flat CPU tensors of equal size.

    Raises:
        TypeError: An argument is not a tensor or has the wrong dtype.
        ValueError: An argument is not on the CPU, not 1-D contiguous, or they differ in their number of elements.
    """
    check_gradient(grad)
    _check_flat("accumulator", accumulator, (torch.float32, grad.dtype))
    _check_numel("grad", grad, "accumulator", accumulator)


def check_gradient(grad: torch.Tensor) -> None:
    """Check that `grad` is a flat fp32, bf16 or fp16 CPU tensor.

    Raises:
        TypeError: It is not a tensor or has another dtype.
        ValueError: It is not on the CPU or not 1-D contiguous.
    """
    _check_flat("grad", grad, GRADIENT_DTYPES)


def check_block(block: torch.Tensor) -> None:
    """Check that `block` is a flat uint8 CPU tensor.

    Raises:
        TypeError: It is not a tensor or has another dtype.
        ValueError: It is not on the CPU or not 1-D contiguous.
    """
    _check_flat("block", block, (torch.uint8,))


def _check_flat(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(explain(name, type(tensor).__name__, "must be a torch.Tensor", "Pass a flat CPU tensor"))
    if tensor.device.type != "cpu":
        rule = "the update runs on the host and takes CPU tensors"
        raise ValueError(explain(f"{name}.device", str(tensor.device), rule, "Copy it to the host first"))
    if tensor.dtype not in dtypes:
        allowed = " or ".join(dict.fromkeys(str(dtype) for dtype in dtypes))
        raise TypeError(explain(f"{name}.dtype", tensor.dtype, f"must be {allowed}", "Convert it first"))
    if tensor.dim() != 1:
        rule = "must have one dimension"
        raise ValueError(explain(f"{name}.shape", tuple(tensor.shape), rule, "Pass a flat view of the buffer"))
    if not tensor.is_contiguous():
        rule = "must be contiguous (stride 1)"
        raise ValueError(explain(f"{name}.stride()", tensor.stride(), rule, "Pass a slice without a step"))


def _check_numel(name: str, tensor: torch.Tensor, reference_name: str, reference: torch.Tensor) -> None:
    if tensor.numel() != reference.numel():
        rule = f"must equal {reference_name}.numel() = {reference.numel()}"
        raise ValueError(explain(f"{name}.numel()", tensor.numel(), rule, "Slice both to the same range"))


def _same_memory(compute: torch.Tensor, master: torch.Tensor) -> bool:
    """Whether `compute` is the master itself, or another handle on the same elements."""
    if compute is master:
        return True
    if not isinstance(compute, torch.Tensor) or compute.dtype != master.dtype or compute.device != master.device:
        return False
    return compute.data_ptr() == master.data_ptr() and compute.shape == master.shape
