"""The hyperparameters of one Adam update, and the fp32 scalars that every update kernel takes from them.

Knows nothing about tensors. The scalars follow DeepSpeedCPUAdam (csrc/includes/cpu_adam.h in DeepSpeed) operation by
operation in fp32, so that its bits are reproduced; bias correction takes fp32 powers of the betas by a running product.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from enum import IntEnum

from megatrain_ds.errors import explain

# 1 - power is exactly 1 in fp32 below this: multiplying further changes nothing.
_NEGLIGIBLE_POWER = 2.0**-25

# beta -> (exponent, beta ** exponent as a running fp32 product).
_powers: dict[float, tuple[int, float]] = {}


@dataclass(frozen=True, slots=True)
class AdamStep:
    """Everything about one update that is not a tensor.

    Attributes:
        lr: Learning rate.
        beta1: Decay of the first moment, in [0, 1).
        beta2: Decay of the second moment, in [0, 1).
        eps: Added to the square root of the second moment.
        weight_decay: Weight decay; zero or less means none, as in DeepSpeedCPUAdam.
        decoupled: True for AdamW (decay of the weight), False for Adam with L2 (decay added to the gradient).
        bias_correction: Whether the moments are corrected for their start at zero.
        step: Number of this update, 1 for the first.
        grad_scale: Every gradient element is multiplied by it first; unscaling and clipping are folded in here.

    Raises:
        ValueError: `step` is under 1 or a beta is outside [0, 1).
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    bias_correction: bool
    step: int
    grad_scale: float

    @property
    def divisible(self) -> bool:
        """Whether weights and moments can be written in separate passes: L2 decay reads the old weight for both."""
        return self.decoupled or not self.weight_decay > 0.0

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(explain("step", self.step, "the first update is step 1", "Count the step first"))
        for name in ("beta1", "beta2"):
            beta = getattr(self, name)
            if not 0.0 <= beta < 1.0:
                raise ValueError(explain(name, beta, "a beta lies in [0, 1)", "Correct the optimizer's betas"))


class UpdatePart(IntEnum):
    """What one pass of an update writes; WEIGHTS and then MOMENTS give the bits of ALL."""

    ALL = 0
    WEIGHTS = 1  # master and compute copy
    MOMENTS = 2


class DecayMode(IntEnum):
    """What `AdamScalars.decay` multiplies."""

    NONE = 0
    DECOUPLED = 1  # param += decay * param, with decay = -lr * weight_decay
    L2 = 2  # grad += decay * param, with decay = weight_decay


@dataclass(frozen=True, slots=True)
class AdamScalars:
    """The scalars of one update; each float holds an fp32 value. Field order is that of the native kernel's struct."""

    grad_scale: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    inverse_sqrt_bias2: float
    eps: float
    step_size: float
    decay: float
    decay_mode: int


def adam_scalars(hyper: AdamStep) -> AdamScalars:
    """Derive the fp32 scalars of one update.

    A Python float holds any fp32 value, and one double operation on fp32 values rounded to fp32 is the fp32 operation.
    """
    lr, beta1, beta2 = _fp32(hyper.lr), _fp32(hyper.beta1), _fp32(hyper.beta2)
    bias1 = inverse_sqrt_bias2 = 1.0
    if hyper.bias_correction:
        bias1 = _fp32(1.0 - _fp32_power(beta1, hyper.step))
        inverse_sqrt_bias2 = _fp32(1.0 / _fp32(math.sqrt(_fp32(1.0 - _fp32_power(beta2, hyper.step)))))
    decay, mode = _decay(lr, _fp32(hyper.weight_decay), hyper.decoupled)
    return AdamScalars(
        grad_scale=_fp32(hyper.grad_scale),
        beta1=beta1,
        one_minus_beta1=_fp32(1.0 - beta1),
        beta2=beta2,
        one_minus_beta2=_fp32(1.0 - beta2),
        inverse_sqrt_bias2=inverse_sqrt_bias2,
        eps=_fp32(hyper.eps),
        step_size=_fp32(-lr / bias1),
        decay=decay,
        decay_mode=mode,
    )


def _decay(lr: float, weight_decay: float, decoupled: bool) -> tuple[float, DecayMode]:
    if not weight_decay > 0.0:
        return 0.0, DecayMode.NONE
    if decoupled:
        return _fp32(-lr * weight_decay), DecayMode.DECOUPLED
    return weight_decay, DecayMode.L2


def _fp32(value: float) -> float:
    """Round to fp32, to nearest even; too large becomes infinite."""
    return ctypes.c_float(value).value


def _fp32_power(base: float, exponent: int) -> float:
    """Multiply 1 by `base` `exponent` times, rounding to fp32 each time.

    A function of its arguments alone, so a resumed run takes the bits of an uninterrupted one. The last result of each
    base is kept, so a run pays one product per step.
    """
    done, power = _powers.get(base, (0, 1.0))
    if done > exponent:
        done, power = 0, 1.0
    for _ in range(done, exponent):
        if power < _NEGLIGIBLE_POWER:
            break
        power = _fp32(power * base)
    _powers[base] = (exponent, power)
    return power
