"""The kernels' Adam step: against DeepSpeedCPUAdam, and torch's operations against the native kernel."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatrain_ds.optim.kernel import load_kernel
from megatrain_ds.tests.optim.kernel_cases import (
    BASE,
    BODY,
    DTYPES,
    HALF_DTYPES,
    MOMENTS,
    NUMEL,
    max_ulps,
    native,
    random_state,
    same_bits,
)

# ---- against DeepSpeedCPUAdam ----


def assert_one_step_matches(stock, parameter, grad, hyper):
    """Run one step of both from the state that the stock optimizer is in, and compare."""
    moments = stock.state[parameter]
    state = {"master": parameter.data.clone()}
    for name in MOMENTS:
        state[name] = moments[name].clone() if moments else torch.zeros(NUMEL)
    parameter.grad = grad.float() * hyper.grad_scale
    stock.step()
    native().update(**state, grad=grad, compute=None, hyper=hyper)
    expected = {"master": parameter.data, **{name: stock.state[parameter][name] for name in MOMENTS}}
    for name, tensor in state.items():
        assert tensor.isfinite().all()
        assert max_ulps(tensor[:BODY], expected[name][:BODY]) <= 2, (name, hyper)
        # DeepSpeed's scalar remainder fuses other products than its vectors do: where terms cancel, it differs from
        # them (and from us) by more than 2 ulp of the result, but not of the terms.
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(tensor[BODY:], expected[name][BODY:], rtol=1e-6, atol=1e-6 * scale)


def run_beside_stock(steps, dtype, hyper, magnitudes):
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    parameter = torch.nn.Parameter(random_state(NUMEL)["master"])
    stock = DeepSpeedCPUAdam(
        [parameter], lr=hyper.lr, weight_decay=hyper.weight_decay, eps=hyper.eps, adamw_mode=hyper.decoupled
    )
    generator = torch.Generator().manual_seed(1)
    for step in range(1, steps + 1):
        grad = (torch.randn(NUMEL, generator=generator) * magnitudes[step % len(magnitudes)]).to(dtype)
        assert_one_step_matches(stock, parameter, grad, replace(hyper, step=step))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("grad_scale", [1.0, 0.37])
def test_a_step_is_within_2_ulp_of_deepspeed(dtype, decoupled, weight_decay, grad_scale):
    hyper = replace(BASE, decoupled=decoupled, weight_decay=weight_decay, grad_scale=grad_scale)
    run_beside_stock(10, dtype, hyper, magnitudes=(1e-2, 1e-22, 1e-7, 1.0, 1e4))


def test_bias_correction_follows_deepspeed_for_1000_steps():
    ours, stock, empty = native(), load_kernel("deepspeed"), torch.empty(0)
    for step in range(1, 1001):
        hyper = replace(BASE, lr=3e-2, step=step)
        if step not in (1, 2, 3, 10, 50, 100, 317, 500, 999, 1000):
            # Only advances DeepSpeed's running powers of the betas.
            stock.update(master=empty, exp_avg=empty, exp_avg_sq=empty, grad=empty, compute=None, hyper=hyper)
            continue
        states, grad = [random_state(BODY, seed=step), random_state(BODY, seed=step)], torch.randn(BODY)
        for kernel, state in zip((ours, stock), states, strict=True):
            kernel.update(**state, grad=grad, compute=None, hyper=hyper)
        assert max(max_ulps(states[0][name], states[1][name]) for name in states[0]) <= 2, step


def test_the_deepspeed_kernel_repeats_stock_over_several_buffers_bit_by_bit():
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    parameters = [torch.nn.Parameter(random_state(NUMEL + i, seed=i)["master"]) for i in range(3)]
    stock = DeepSpeedCPUAdam(parameters, lr=BASE.lr, weight_decay=BASE.weight_decay)
    ours = load_kernel("deepspeed")
    states = [{"master": p.data.clone(), **{m: torch.zeros(p.numel()) for m in MOMENTS}} for p in parameters]
    computes = [torch.empty(p.numel(), dtype=torch.bfloat16) for p in parameters]
    for step in range(1, 31):
        for parameter, state, compute in zip(parameters, states, computes, strict=True):
            grad = torch.randn(parameter.numel())
            parameter.grad = grad * 0.3
            kept = grad.clone()
            ours.update(**state, grad=grad, compute=compute, hyper=replace(BASE, step=step, grad_scale=0.3))
            assert torch.equal(grad, kept)
        stock.step()
    for parameter, state, compute in zip(parameters, states, computes, strict=True):
        assert torch.equal(state["master"], parameter.data)
        assert torch.equal(compute, parameter.data.bfloat16())
        assert all(torch.equal(state[name], stock.state[parameter][name]) for name in MOMENTS)


def test_deepspeed_kernels_and_decay_modes_do_not_share_running_powers():
    def step_all(kernels_and_states, step):
        for kernel, state, decoupled in kernels_and_states:
            hyper = replace(BASE, lr=3e-2, step=step, decoupled=decoupled)
            kernel.update(**state, grad=state["master"].sin(), compute=None, hyper=hyper)

    first, second = load_kernel("deepspeed"), load_kernel("deepspeed")
    together = [(kernel, random_state(BODY), mode) for kernel in (first, second) for mode in (True, False)]
    alone = [(load_kernel("deepspeed"), random_state(BODY), mode) for mode in (True, False)]
    for step in range(1, 31):
        step_all(together[:2], step)
        if step > 10:  # a later start: its steps are not those of the first
            step_all(together[2:], step - 10)
        step_all(alone, step)
    first.close()
    for step in range(21, 31):
        step_all(together[2:], step)
    for (_, state, _), (_, expected, _) in zip(together, alone * 2, strict=True):
        assert all(torch.equal(state[name], expected[name]) for name in state)


# ---- native against torch ----


@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("compute_dtype", [None, *HALF_DTYPES])
@pytest.mark.parametrize(("decoupled", "weight_decay"), [(True, 0.0), (True, 0.1), (False, 0.1)])
def test_torch_is_within_2_ulp_of_native(grad_dtype, compute_dtype, decoupled, weight_decay):
    numel = 300_000 + 7  # two chunks of the torch kernel
    hyper = replace(BASE, decoupled=decoupled, weight_decay=weight_decay, step=3, grad_scale=0.25)
    grad = torch.randn(numel).to(grad_dtype)
    grad[5::1000], grad[6::1000], grad[7::1000] = float("inf"), float("nan"), 0.0
    results = []
    for kernel in (native(), load_kernel("torch")):
        state = random_state(numel)
        compute = None if compute_dtype is None else torch.zeros(numel, dtype=compute_dtype)
        kernel.update(**state, grad=grad, compute=compute, hyper=hyper)
        assert compute is None or same_bits(compute, state["master"].to(compute_dtype))
        results.append(state)
    for name, tensor in results[0].items():
        assert max_ulps(tensor, results[1][name]) <= 2, name


def test_a_resumed_run_takes_the_bits_of_an_uninterrupted_one():
    from megatrain_ds.optim import adam

    uninterrupted = [adam.adam_scalars(replace(BASE, step=step)) for step in range(1, 400)]
    adam._powers.clear()
    assert adam.adam_scalars(replace(BASE, step=399)) == uninterrupted[-1]
    assert adam.adam_scalars(replace(BASE, step=7)) == uninterrupted[6]
    assert adam.adam_scalars(replace(BASE, step=10**9)).step_size == pytest.approx(-BASE.lr)
