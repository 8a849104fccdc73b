"""The host update in torch operations: what is used where no compiler is found, and a second opinion in tests.

Same formula, order and roundings as the native kernel. torch has no fused multiply-add, so each is done in fp64 and
then rounded to fp32; work goes in chunks, so that the temporaries stay in the caches.
"""

from __future__ import annotations

import mmap

import torch

from megatrain_ds.optim.adam import AdamScalars, AdamStep, DecayMode, UpdatePart, adam_scalars
from megatrain_ds.optim.operands import check_accumulate, check_block, check_gradient, check_part, check_update

# Elements per chunk. Temporary memory is 12 bytes an element: 3 MiB.
CHUNK_NUMEL = 256 * 1024


class TorchKernel:
    """Update kernel in torch operations; uses torch's own threads. Methods are described in `UpdateKernel`."""

    name = "torch"
    splits = False

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
        """Apply one Adam step to flat tensors, chunk by chunk; what is not to be written is computed on copies."""
        check_part(part, hyper)
        compute = check_update(master, exp_avg, exp_avg_sq, grad, compute)
        scalars = adam_scalars(hyper)
        size = min(CHUNK_NUMEL, master.numel())
        narrow, wide = torch.empty(size), torch.empty(size, dtype=torch.float64)
        for start in range(0, master.numel(), CHUNK_NUMEL):
            chunk = slice(start, min(start + CHUNK_NUMEL, master.numel()))
            count = chunk.stop - start
            grad32 = narrow[:count].copy_(grad[chunk])
            weight, first, second = master[chunk], exp_avg[chunk], exp_avg_sq[chunk]
            if part is UpdatePart.WEIGHTS:
                first, second = first.clone(), second.clone()
            elif part is UpdatePart.MOMENTS:
                weight = weight.clone()
            _update_chunk(weight, first, second, grad32, wide[:count], scalars)
            if compute is not None and part is not UpdatePart.MOMENTS:
                compute[chunk].copy_(weight)

    @torch.no_grad()
    def accumulate(self, *, accumulator: torch.Tensor, grad: torch.Tensor, overwrite: bool) -> None:
        """Copy `grad` into `accumulator`, or add it."""
        check_accumulate(accumulator, grad)
        if overwrite:
            accumulator.copy_(grad)
        else:
            accumulator.add_(grad)

    @torch.no_grad()
    def sum_of_squares(self, grad: torch.Tensor) -> float:
        """Add the squares of all elements in fp64."""
        check_gradient(grad)
        total = 0.0
        for chunk in grad.split(CHUNK_NUMEL):
            wide = chunk.double()
            total += float(torch.dot(wide, wide))
        return total

    @torch.no_grad()
    def prefault(self, block: torch.Tensor) -> None:
        """Write one byte of every page with its own value."""
        check_block(block)
        block[:: mmap.PAGESIZE].add_(0)
        block[-1:].add_(0)


def _update_chunk(
    master: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    scratch: torch.Tensor,
    wide: torch.Tensor,
    scalars: AdamScalars,
) -> None:
    """Update one chunk; `scratch` (fp32) holds the gradient on entry and is overwritten, `wide` (fp64) is scratch."""
    scratch.mul_(scalars.grad_scale)
    if scalars.decay_mode == DecayMode.L2:
        _fma(scratch, master, scalars.decay, scratch, wide)

    _fma(exp_avg, scratch, scalars.one_minus_beta1, exp_avg.mul_(scalars.beta1), wide)
    _fma(exp_avg_sq, scratch.mul_(scratch), scalars.one_minus_beta2, exp_avg_sq.mul_(scalars.beta2), wide)

    # In fp64 too: torch's fp32 square root may go through a vector library that is off by one bit.
    scratch.copy_(wide.copy_(exp_avg_sq).sqrt_())
    _fma(scratch, scratch, scalars.inverse_sqrt_bias2, scalars.eps, wide)
    torch.div(exp_avg, scratch, out=scratch)

    if scalars.decay_mode == DecayMode.DECOUPLED:
        _fma(master, master, scalars.decay, master, wide)
    _fma(master, scratch, scalars.step_size, master, wide)


def _fma(
    out: torch.Tensor, factor: torch.Tensor, scale: float, addend: torch.Tensor | float, wide: torch.Tensor
) -> None:
    """Write factor * scale + addend to `out`: the product of two fp32 values is exact in fp64."""
    out.copy_(wide.copy_(factor).mul_(scale).add_(addend))
