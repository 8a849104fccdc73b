"""Inputs and comparisons that the tests of the update kernels share."""

from __future__ import annotations

import torch

from megatrain_ds.optim.kernel import AdamStep, load_kernel

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HALF_DTYPES = (torch.bfloat16, torch.float16)
MOMENTS = ("exp_avg", "exp_avg_sq")
BASE = AdamStep(1e-3, 0.9, 0.999, 1e-8, 0.1, decoupled=True, bias_correction=True, step=1, grad_scale=1.0)

# Whole vectors of every width and span, then a remainder of 13.
BODY = 8 * 16 * 5 + 16 * 3
NUMEL = BODY + 13


def native(num_threads=2):
    kernel = load_kernel("native", num_threads)
    assert kernel.name == "native"
    return kernel


def ordered_bits(tensor):
    bits = tensor.contiguous().view(torch.int32).long()
    return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def max_ulps(actual, expected):
    assert torch.equal(actual.isnan(), expected.isnan())
    distance = (ordered_bits(actual) - ordered_bits(expected)).abs()
    distance[actual.isnan()] = 0
    return int(distance.max()) if distance.numel() else 0


def same_bits(actual, expected):
    """Equal to the bit, except that any NaN equals any NaN."""
    assert actual.dtype == expected.dtype
    as_integers = torch.int32 if actual.dtype == torch.float32 else torch.int16
    both_nan = actual.isnan() & expected.isnan()
    return bool(((actual.view(as_integers) == expected.view(as_integers)) | both_nan).all())


def random_state(numel, seed=0):
    generator = torch.Generator().manual_seed(seed)
    master, exp_avg = torch.randn(2, numel, generator=generator)
    return {"master": master, "exp_avg": exp_avg.mul_(0.01), "exp_avg_sq": torch.rand(numel, generator=generator)}
