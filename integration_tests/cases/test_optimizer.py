"""Groups, schedules, clipping and kinds of Adam follow plain PyTorch with fp32 masters; the rest is refused."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import nn

from integration_tests.cases.engines import (
    LR,
    Reference,
    assert_same_bits,
    assert_within,
    differing,
    largest,
    masters,
    state,
)
from integration_tests.cases.models import Stack, token_batches
from megatrain_ds.errors import UnsupportedOptimizerError

STEPS = 200


def three_groups(model: nn.Module, parameters: list[nn.Parameter] | None = None) -> list[dict[str, Any]]:
    """Decayed matrices, undecayed vectors, and a head with ten times the rate.

    Args:
        model: names the parameters.
        parameters: stand-ins in the model's order, for masters outside the model.
    """
    groups: dict[str, list[nn.Parameter]] = {"decay": [], "plain": [], "head": []}
    for (name, _), param in zip(model.named_parameters(), parameters or list(model.parameters()), strict=True):
        groups["head" if name.startswith("head") else "decay" if param.ndim > 1 else "plain"].append(param)
    return [
        {"params": groups["decay"], "weight_decay": 0.1},
        {"params": groups["plain"], "weight_decay": 0.0},
        {"params": groups["head"], "weight_decay": 0.1, "lr": LR, "betas": (0.8, 0.95)},
    ]


def cosine(step: int) -> float:
    return min(1.0, (step + 1) / 10) * 0.5 * (1 + math.cos(math.pi * min(step, STEPS) / STEPS))


@pytest.mark.parametrize(("dtype", "scheduler"), [(torch.float32, "object"), (torch.bfloat16, "callable")])
def test_two_hundred_steps(start, device, dtype, scheduler) -> None:
    """Three groups, warm-up and cosine, clipping: losses and rates of plain PyTorch over the whole run."""
    model = Stack()
    batches = [batch for batch in token_batches(device, 10, rows=4) for _ in range(STEPS // 10)]

    def reference_run(optimizer: Any, flip: bool) -> tuple[list[float], list[list[float]]]:
        plain = copy.deepcopy(model).to(device)
        reference = Reference(
            plain, dtype=dtype, clip=1.0, make=lambda p: optimizer(three_groups(plain, p), lr=LR / 10)
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(reference.optimizer, cosine)
        losses, rates = [], []
        for ids in batches:
            loss = reference.model(ids.flip(0) if flip else ids)
            rates.append([group["lr"] for group in reference.optimizer.param_groups])
            reference.backward(loss)
            reference.step()
            schedule.step()
            losses.append(loss.item())
        return losses, rates

    fused = functools.partial(torch.optim.AdamW, fused=True)
    expected, expected_rates = reference_run(torch.optim.AdamW, False)
    draws = [
        reference_run(optimizer, flip)[0]
        for optimizer, flip in ((torch.optim.AdamW, True), (fused, False), (fused, True))
    ]
    optimizer = torch.optim.AdamW(three_groups(model), lr=LR / 10)
    make = functools.partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=cosine)
    engine = start(
        model,
        dtype=dtype,
        optimizer=optimizer,
        gradient_clipping=1.0,
        lr_scheduler=make(optimizer) if scheduler == "object" else make,
    )
    losses, rates = [], []
    for ids in batches:
        loss = engine(ids)
        rates.append(engine.get_lr())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert rates == expected_rates
    floor = max(abs(a - b) for draw in draws for a, b in zip(draw, expected, strict=True))
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) <= 2 * floor
    assert min(losses) < 0.75 * losses[0]


def test_schedule_from_json(start, device) -> None:
    settings = {"total_num_steps": 20, "warmup_num_steps": 5, "cos_min_ratio": 0.1}
    engine = start(Stack(), scheduler={"type": "WarmupCosineLR", "params": settings})
    rates = []
    for ids in token_batches(device, 20):
        before = masters(engine)
        rates.append(engine.get_lr()[0])
        assert engine.optimizer.param_groups[0]["lr"] == rates[-1]
        engine.backward(engine(ids))
        engine.step()
        # At the first steps of Adam no weight moves by more than its rate and decay.
        assert largest(differing(masters(engine), before)) <= rates[-1] * 4 + 1e-7
    assert rates[5] == max(rates)
    assert rates[-1] < 0.3 * max(rates)


@pytest.mark.parametrize("rate", [1e-6, 1e-3])
def test_masters_move_at_a_tiny_rate(start, device, rate) -> None:
    """bf16 weights alone would not move by 1e-6; the masters move by what plain PyTorch moves."""
    model = Stack().to(torch.bfloat16)
    first = {name: param.detach().float().clone() for name, param in model.named_parameters()}

    def reference(**options: Any) -> Reference:
        plain = copy.deepcopy(model).to(device)
        return Reference(
            plain, dtype=torch.bfloat16, make=lambda p: torch.optim.AdamW(p, lr=rate, weight_decay=0, **options)
        )

    runs = [reference(), reference(fused=True), reference()]
    settings = {"type": "AdamW", "params": {"lr": rate, "weight_decay": 0}}
    engine = start(model, dtype=torch.bfloat16, optimizer_block=settings)
    for ids in token_batches(device, 5, rows=4):
        engine.backward(engine(ids))
        engine.step()
        for position, run in enumerate(runs):
            run.backward(run.model(ids.flip(0) if position == 2 else ids))
            run.step()
    assert_within(masters(engine), runs[0].masters(), [run.masters() for run in runs[1:]])
    for name, value in masters(engine).items():
        assert 0.5 * rate < (value.cpu() - first[name]).abs().max() < 6 * rate + 1e-7


KINDS = {
    "json AdamW": ({"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.1}}, None, True),
    "json Adam": ({"type": "Adam", "params": {"lr": LR, "weight_decay": 0.1}}, None, True),
    "json Adam with L2": (
        {"type": "Adam", "params": {"lr": LR, "weight_decay": 0.1, "adam_w_mode": False}},
        None,
        False,
    ),
    "torch AdamW": (None, lambda p: torch.optim.AdamW(p, lr=LR, weight_decay=0.1), True),
    "torch Adam": (None, lambda p: torch.optim.Adam(p, lr=LR, weight_decay=0.1), False),
    "cpu AdamW": (None, lambda p: DeepSpeedCPUAdam(p, lr=LR, weight_decay=0.1), True),
    "cpu Adam": (None, lambda p: DeepSpeedCPUAdam(p, lr=LR, weight_decay=0.1, adamw_mode=False), False),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("callable_", [False, True])
def test_kinds_of_adam(start, device, kind, callable_) -> None:
    block, make, decoupled = KINDS[kind]
    if callable_ and make is None:
        pytest.skip("a JSON optimizer is no callable")
    model = Stack()
    plain_kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    runs = [
        Reference(
            copy.deepcopy(model).to(device), make=functools.partial(plain_kind, lr=LR, weight_decay=0.1, **options)
        )
        for options in ({}, {"fused": True}, {})
    ]
    wrong = Reference(
        copy.deepcopy(model).to(device),
        make=functools.partial(torch.optim.Adam if decoupled else torch.optim.AdamW, lr=LR, weight_decay=0.1),
    )
    optimizer = None if make is None else make if callable_ else make(list(model.parameters()))
    engine = start(model, optimizer=optimizer, **({"optimizer_block": block} if block else {}))
    assert isinstance(engine.optimizer, torch.optim.Optimizer)
    for ids in token_batches(device, 5, rows=4):
        engine.backward(engine(ids))
        engine.step()
        for position, run in enumerate([*runs, wrong]):
            run.backward(run.model(ids.flip(0) if position == 2 else ids))
            run.step()
    kernel_rounding = {name: value * (1 + 2.0**-22) for name, value in runs[0].masters().items()}
    floor = [*(run.masters() for run in runs[1:]), kernel_rounding]
    assert_within(masters(engine), runs[0].masters(), floor)
    distance = largest(differing(wrong.masters(), runs[0].masters()))
    assert distance > 4 * max(largest(differing(draw, runs[0].masters())) for draw in floor)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda p: torch.optim.SGD(p, lr=LR), "SGD"),
        (lambda p: torch.optim.Adafactor(p, lr=LR), "Adafactor"),
        (lambda p: torch.optim.RMSprop(p, lr=LR), "RMSprop"),
        (lambda p: torch.optim.AdamW(p, lr=LR, amsgrad=True), "amsgrad"),
        (lambda p: torch.optim.AdamW(p, lr=LR, maximize=True), "maximize"),
    ],
    ids=["SGD", "Adafactor", "RMSprop", "amsgrad", "maximize"],
)
def test_unsupported_optimizers_are_refused_by_name(start, make, words) -> None:
    model = Stack()
    before = {name: param.clone() for name, param in model.named_parameters()}
    with pytest.raises(UnsupportedOptimizerError, match=words):
        start(model, optimizer=make(list(model.parameters())), zero_allow_untested_optimizer=True)
    # The model is as it was, and can be given to another engine.
    assert all(type(param) is nn.Parameter for param in model.parameters())
    assert_same_bits({name: param.detach() for name, param in model.named_parameters()}, before)
    start(model)


@pytest.mark.parametrize("kind", ["SGD", "Lion", "Lamb"])
def test_unsupported_json_optimizers_are_refused_by_name(start, kind) -> None:
    with pytest.raises(UnsupportedOptimizerError, match=f"(?i){kind}"):
        start(Stack(), optimizer_block={"type": kind, "params": {"lr": LR}}, zero_allow_untested_optimizer=True)


def test_optimizer_over_a_part_of_the_model(start, device) -> None:
    """Parameters that no group holds are left alone, though they require gradients."""
    model = Stack()
    engine = start(model, optimizer=torch.optim.AdamW(model.blocks[1].parameters(), lr=LR))
    before = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    for ids in token_batches(device, 2):
        engine.backward(engine(ids))
        engine.step()
    after = dict(engine.module.named_parameters())
    changed = {name for name, value in before.items() if not torch.equal(value, after[name].detach())}
    assert changed == {name for name in before if name.startswith("blocks.1.")}


def test_step_counts_agree_with_moments(start, device) -> None:
    engine = start(Stack())
    for count, ids in enumerate(token_batches(device, 3), start=1):
        engine.backward(engine(ids))
        engine.step()
        assert {entry["step"] for entry in engine.optimizer.state.values()} == {count}
    assert len(state(engine)) == 4 * len(list(engine.module.parameters()))
