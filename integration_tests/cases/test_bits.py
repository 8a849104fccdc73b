"""Identical bits: against stock ZeRO-3 with DeepSpeed's own Adam, and against ourselves in synchronous mode."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import nn

from integration_tests.cases.engines import (
    Tensors,
    assert_same_bits,
    differing,
    gradients,
    initialize,
    largest,
    masters,
    plain_gradients,
    state,
)
from integration_tests.cases.models import Block, Stack, causal_loss, gpt2, llama, token_batches
from megatrain_ds.optim.adam import UpdatePart
from megatrain_ds.tests.releases import BETA_POWERS_OF_A_STEP


def trained(model: nn.Module, batches: list[torch.Tensor], *, accumulation: int = 1, **config: Any) -> Tensors:
    """Masters after one step per `accumulation` batches, in an engine of its own."""
    engine = initialize(model, gradient_accumulation_steps=accumulation, **config)
    for ids in batches:
        engine.backward(causal_loss(engine, ids))
        engine.step()
    assert engine.global_steps == len(batches) // accumulation
    found = masters(engine)
    engine.destroy()
    return found


CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="stock and ours pick other CUDA kernels for a matrix")


@CPU_ONLY
@BETA_POWERS_OF_A_STEP
@pytest.mark.parametrize(
    ("make", "dtype", "accumulation", "clip"),
    [
        (llama, torch.bfloat16, 1, 1.0),
        (llama, torch.bfloat16, 3, 0.0),
        (gpt2, torch.float32, 1, 1.0),
        (gpt2, torch.float32, 3, 0.1),
        (gpt2, torch.bfloat16, 2, 1.0),
    ],
)
def test_masters_equal_stock_zero3(device, make, dtype, accumulation, clip) -> None:
    model = make()
    batches = token_batches(device, 20 * accumulation)
    common = {"dtype": dtype, "gradient_clipping": clip, "accumulation": accumulation}
    ours = trained(copy.deepcopy(model), batches, block={"update_kernel": "deepspeed"}, **common)
    stock = trained(copy.deepcopy(model), batches, flag=False, **common)
    assert_same_bits(ours, stock)


@CPU_ONLY
def test_fp32_llama_differs_from_stock_in_one_order_of_additions(device, start) -> None:
    """Ours equals plain autograd; stock adds the three gradients at an RMS norm's input in another order.

    Stock wraps the inputs of every submodule in an autograd function of its own, so that the uses inside one submodule
    are added first. Plain autograd with a view in the same places is that order; what it changes is the floor.
    """
    model = llama()
    (ids,) = token_batches(device, 1)
    plain, viewed = copy.deepcopy(model), copy.deepcopy(model)
    for module in viewed.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.register_forward_pre_hook(lambda _module, args: (args[0].view_as(args[0]),))
    for which in (plain, viewed):
        causal_loss(which, ids).backward()
    floor = largest(differing(plain_gradients(viewed), plain_gradients(plain)))
    assert floor > 0
    found = {}
    for flag in (True, False):
        engine = start(copy.deepcopy(model), flag=flag)
        engine.backward(causal_loss(engine, ids))
        found[flag] = gradients(engine)
    assert_same_bits(found[True], plain_gradients(plain))
    assert largest(differing(found[False], found[True])) <= 2 * floor


def run_fifty(
    device: torch.device, settings: dict, *, delays: dict | None = None, accumulation: int, clip: float
) -> Any:
    torch.manual_seed(5)
    engine = initialize(
        Stack(*[Block() for _ in range(3)]),
        dtype=torch.bfloat16,
        gradient_accumulation_steps=accumulation,
        gradient_clipping=clip,
        block=settings,
    )
    if delays:
        engine.runtime.streams.delays_s.update(delays)
    for ids in token_batches(device, 50 * accumulation):
        engine.backward(engine(ids))
        engine.step()
    found = state(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(("clip", "finite_check"), [(0.0, False), (0.0, True), (0.5, False), (0.5, True)])
def test_normal_mode_equals_synchronous_mode(device, accumulation, clip, finite_check) -> None:
    common = {"accumulation": accumulation, "clip": clip}
    settings = {"finite_check": finite_check}
    synchronous = run_fifty(device, {**settings, "synchronous": True}, **common)
    assert_same_bits(run_fifty(device, settings, **common), synchronous)


@pytest.mark.parametrize("delays", [{"h2d": 0.0015}, {"d2h": 0.0015}, {"h2d": 0.0004, "d2h": 0.0015}], ids=str)
@pytest.mark.parametrize("finite_check", [True, False])
def test_late_copies_change_no_bit(device, delays, finite_check) -> None:
    common = {"accumulation": 1, "clip": 0.0}
    settings = {"finite_check": finite_check}
    synchronous = run_fifty(device, {**settings, "synchronous": True}, **common)
    assert_same_bits(run_fifty(device, settings, delays=delays, **common), synchronous)


@pytest.mark.parametrize("finite_check", [True, False])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_slow_host_update_changes_no_bit(device, finite_check, accumulation) -> None:
    """Updates that take far longer than a forward are waited for, unit by unit."""
    found = []
    for delay_s in (0.0, 0.01):
        torch.manual_seed(5)
        engine = initialize(
            Stack(),
            gradient_accumulation_steps=accumulation,
            block={"finite_check": finite_check},
            dtype=torch.bfloat16,
        )
        update = engine.runtime.pipeline.kernel.update

        def slow(update: Any = update, delay_s: float = delay_s, **operands: Any) -> None:
            time.sleep(delay_s)
            update(**operands)

        engine.runtime.pipeline.kernel.update = slow
        for ids in token_batches(device, 6 * accumulation):
            engine.backward(engine(ids))
            engine.step()
        found.append(state(engine))
        engine.destroy()
    assert_same_bits(found[1], found[0])


def slow_passes(engine: Any, *, seconds: dict[UpdatePart, float]) -> list[UpdatePart]:
    """Make the passes of the host update slow; the list returned grows by the part of every pass."""
    kernel, parts = engine.runtime.pipeline.kernel, []
    update = kernel.update

    def slow(*, part: UpdatePart, **operands: Any) -> None:
        parts.append(part)
        time.sleep(seconds.get(part, 0.0))
        update(part=part, **operands)

    kernel.update = slow
    return parts


def run_deferred(device: torch.device, *, accumulation: int, deferred: bool) -> tuple[Tensors, list[UpdatePart]]:
    """State after eight steps, the fourth on gradients that are not finite."""
    torch.manual_seed(5)
    engine = initialize(
        Stack(),
        gradient_accumulation_steps=accumulation,
        gradient_clipping=0.5,
        block={"defer_moments": deferred, "synchronous": not deferred},
        dtype=torch.bfloat16,
    )
    parts = slow_passes(engine, seconds={UpdatePart.MOMENTS: 0.01})
    engine.runtime.pipeline.deferral.choose = frozenset
    for index, ids in enumerate(token_batches(device, 8 * accumulation)):
        loss = engine(ids)
        engine.backward(loss * float("inf") if index // accumulation == 3 else loss)
        engine.step()
    found = state(engine)
    engine.destroy()
    return found, parts


@pytest.mark.parametrize("accumulation", [1, 3])
def test_deferred_moments_change_no_bit(device, accumulation) -> None:
    """Moments written late: no weight, moment or gradient of the next step comes too early or too late."""
    found, parts = run_deferred(device, accumulation=accumulation, deferred=True)
    expected, whole = run_deferred(device, accumulation=accumulation, deferred=False)
    assert set(parts) == {UpdatePart.WEIGHTS, UpdatePart.MOMENTS}
    assert set(whole) == {UpdatePart.ALL}
    assert_same_bits(found, expected)


def test_moments_are_deferred_where_a_forward_waits(device, start) -> None:
    engine = start(Stack(), gradient_clipping=1.0, dtype=torch.bfloat16)
    parts = slow_passes(engine, seconds=dict.fromkeys((UpdatePart.ALL, UpdatePart.WEIGHTS), 0.02))
    for ids in token_batches(device, 8):
        loss = engine(ids)
        # A backward that leaves the worker idle for long.
        time.sleep(0.2)
        engine.backward(loss)
        engine.step()
        if UpdatePart.MOMENTS in parts:
            break
    assert UpdatePart.WEIGHTS not in parts[:4]
    assert UpdatePart.MOMENTS in parts
