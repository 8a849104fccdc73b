"""A gradient that is not finite skips the step: no byte of state changes, and the next good step is right."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

from integration_tests.cases.engines import assert_same_bits, initialize, masters, state
from integration_tests.cases.models import Block, Stack, token_batches


class Poisoned(Block):
    """Its gradient is multiplied by `factor`."""

    factor = 1.0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = super().forward(hidden)
        if out.requires_grad and self.factor != 1.0:
            out.register_hook(lambda grad: grad * self.factor)
        return out


def model_with_a_poisoned_block() -> Stack:
    return Stack(Block(), Poisoned(), Block(), Block())


def engine_state(engine: Any) -> dict[str, torch.Tensor]:
    steps = {f"{entry.name}:step": torch.tensor(entry.step) for group in engine.optimizer.parameters for entry in group}
    return {**state(engine), **steps}


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_step_is_skipped_whole(start, device, value, accumulation, clip, dtype) -> None:
    """The engine that met the bad gradient ends with the bits of one that never did."""
    scheduler = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.01, "warmup_num_steps": 10}}
    model = model_with_a_poisoned_block()
    config = {
        "dtype": dtype,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "scheduler": scheduler,
    }
    engine, clean = start(copy.deepcopy(model), **config), start(copy.deepcopy(model), **config)

    def step(which: Any, seed: int) -> None:
        for ids in token_batches(device, accumulation, seed=seed):
            which.backward(which(ids))
            which.step()

    for which in (engine, clean):
        step(which, 1)
        step(which, 2)
    before, rates = engine_state(engine), engine.get_lr()
    engine.module.blocks[1].factor = value
    step(engine, 3)
    engine.module.blocks[1].factor = 1.0
    assert_same_bits(engine_state(engine), before)
    assert engine.optimizer.overflow is True
    assert engine.skipped_steps == 1
    assert engine.was_step_applied() is False
    assert engine.get_lr() == rates
    for which in (engine, clean):
        step(which, 4)
    assert engine.optimizer.overflow is False
    assert engine.global_steps == clean.global_steps + 1
    assert_same_bits(engine_state(engine), engine_state(clean))


def test_root_gradient_that_is_not_finite(start, device) -> None:
    engine = start(Stack())
    (ids,) = token_batches(device, 1)
    before = engine_state(engine)
    hook = engine.module.head.weight.register_hook(lambda grad: grad * float("nan"))
    engine.backward(engine(ids))
    engine.step()
    hook.remove()
    assert engine.skipped_steps == 1
    assert_same_bits(engine_state(engine), before)


def test_dynamic_loss_scale(device) -> None:
    """The scale follows DeepSpeed's own scaler over a pattern of overflows, and no applied step depends on it."""
    if not get_accelerator().is_fp16_supported():
        pytest.skip("DeepSpeed supports no fp16 on this device")
    settings = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3, "hysteresis": 2, "min_loss_scale": 1}
    torch.manual_seed(0)
    model = model_with_a_poisoned_block()
    engine = initialize(model, fp16=settings)
    expected = DynamicLossScaler(
        init_scale=2**8,
        scale_factor=2.0,
        scale_window=3,
        min_scale=1,
        delayed_shift=2,
        consecutive_hysteresis=False,
        raise_error_at_min_scale=True,
        dtype=torch.float16,
    )
    bad = [False, False, True, True, False, False, False, False, True, False, False, False, False]
    for overflow, ids in zip(bad, token_batches(device, len(bad)), strict=True):
        before = masters(engine)
        scale = engine.optimizer.loss_scale
        engine.module.blocks[1].factor = float("inf") if overflow else 1.0
        engine.backward(engine(ids))
        engine.step()
        expected.update_scale(overflow)
        assert engine.optimizer.overflow is overflow
        assert engine.optimizer.loss_scale == expected.cur_scale
        changed = any(not torch.equal(a, before[name]) for name, a in masters(engine).items())
        assert changed is not overflow
        if not overflow:
            assert 0 < float(engine.get_global_grad_norm()) < scale
    assert engine.skipped_steps == sum(bad)
    engine.destroy()
