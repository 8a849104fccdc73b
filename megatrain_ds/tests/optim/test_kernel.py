"""Arithmetic of the update kernels: against DeepSpeedCPUAdam, against each other and against torch's conversions."""

from __future__ import annotations

import mmap
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatrain_ds.optim.kernel import AdamStep, default_num_threads, load_kernel

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HALF_DTYPES = (torch.bfloat16, torch.float16)
MOMENTS = ("exp_avg", "exp_avg_sq")
BASE = AdamStep(1e-3, 0.9, 0.999, 1e-8, 0.1, decoupled=True, bias_correction=True, step=1, grad_scale=1.0)

# Whole vectors of every width and span, then a remainder of 13.
BODY = 8 * 16 * 5 + 16 * 3
NUMEL = BODY + 13
# Above the size from which the compute copy bypasses the caches, with a remainder.
LARGE_NUMEL = (1 << 20) + 4096 + 5


@pytest.fixture(params=["native", "torch"])
def kernel(request):
    loaded = load_kernel(request.param, num_threads=2)
    assert loaded.name == request.param
    return loaded


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


def clone(state):
    return {name: tensor.clone() for name, tensor in state.items()}


def all_patterns(dtype):
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)


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


def test_two_deepspeed_kernels_and_both_decay_modes_keep_apart():
    first, second = load_kernel("deepspeed"), load_kernel("deepspeed")
    grad = torch.randn(NUMEL)
    for decoupled in (True, False):
        hyper = replace(BASE, decoupled=decoupled)
        states = [random_state(NUMEL), random_state(NUMEL), random_state(NUMEL)]
        for kernel, state in zip((first, second, native()), states, strict=True):
            kernel.update(**state, grad=grad, compute=None, hyper=hyper)
        first.close()
        assert torch.equal(states[0]["master"], states[1]["master"])
        assert max_ulps(states[0]["master"][:BODY], states[2]["master"][:BODY]) <= 2


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


@pytest.mark.parametrize("bias_correction", [True, False])
def test_updates_agree_with_torch_adamw(kernel, bias_correction):
    parameter = torch.nn.Parameter(random_state(NUMEL)["master"])
    state = {"master": parameter.data.clone(), **{m: torch.zeros(NUMEL) for m in MOMENTS}}
    reference = torch.optim.AdamW([parameter], lr=BASE.lr, weight_decay=BASE.weight_decay)
    for step in range(1, 11):
        parameter.grad = torch.randn(NUMEL)
        hyper = replace(BASE, step=step, bias_correction=bias_correction)
        kernel.update(**state, grad=parameter.grad, compute=state["master"], hyper=hyper)
        reference.step()
    close = torch.allclose(state["master"], parameter.data, rtol=1e-5, atol=1e-6)
    assert close == bias_correction


def test_a_resumed_run_takes_the_bits_of_an_uninterrupted_one():
    from megatrain_ds.optim import adam

    uninterrupted = [adam.adam_scalars(replace(BASE, step=step)) for step in range(1, 400)]
    adam._powers.clear()
    assert adam.adam_scalars(replace(BASE, step=399)) == uninterrupted[-1]
    assert adam.adam_scalars(replace(BASE, step=7)) == uninterrupted[6]
    assert adam.adam_scalars(replace(BASE, step=10**9)).step_size == pytest.approx(-BASE.lr)


# ---- conversions ----


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_the_compute_copy_rounds_every_fp32_pattern_like_torch(kernel, dtype):
    upper = torch.arange(1 << 16, dtype=torch.int64) << 16
    lower = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    patterns = (upper[:, None] | lower).flatten()
    master = torch.where(patterns >= 1 << 31, patterns - (1 << 32), patterns).to(torch.int32).view(torch.float32)
    kept, compute = master.clone(), torch.zeros(master.numel(), dtype=dtype)
    moments = {name: torch.zeros(master.numel()) for name in MOMENTS}
    still = replace(BASE, lr=0.0, weight_decay=0.0)
    kernel.update(master=master, **moments, grad=torch.zeros(master.numel()), compute=compute, hyper=still)
    assert same_bits(master, kept)
    assert same_bits(compute, kept.to(dtype))


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_every_16_bit_gradient_converts_like_torch(kernel, dtype):
    grad = all_patterns(dtype)
    accumulator = torch.ones(grad.numel())
    kernel.accumulate(accumulator=accumulator, grad=grad, overwrite=True)
    assert same_bits(accumulator, grad.float())


@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("numel", [0, 1, 15, 16, 1037, 70_001])
def test_accumulate_adds_like_torch(kernel, grad_dtype, wide, numel):
    accumulator_dtype = torch.float32 if wide else grad_dtype
    grad = torch.randn(numel).to(grad_dtype)
    accumulator = torch.randn(numel).to(accumulator_dtype)
    if numel > 20:
        grad[3], grad[17], accumulator[18] = float("inf"), float("nan"), float("-inf")
    expected = accumulator.clone().add_(grad)
    kernel.accumulate(accumulator=accumulator, grad=grad, overwrite=False)
    assert same_bits(accumulator, expected)
    kernel.accumulate(accumulator=accumulator, grad=grad, overwrite=True)
    assert same_bits(accumulator, grad.to(accumulator_dtype))


# ---- sum of squares ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 31, 1037, 200_003])
def test_sum_of_squares(kernel, dtype, numel):
    grad = (torch.randn(numel) * 100).to(dtype)
    expected = float(grad.double().square().sum())
    assert kernel.sum_of_squares(grad) == pytest.approx(expected, rel=1e-12)


def test_sum_of_squares_neither_overflows_nor_hides_a_bad_element(kernel):
    grad = torch.full((100_003,), 1e30)
    assert kernel.sum_of_squares(grad) == pytest.approx(100_003e60)
    grad[100_002] = float("-inf")
    assert kernel.sum_of_squares(grad) == float("inf")
    grad[7] = float("nan")
    assert kernel.sum_of_squares(grad) != kernel.sum_of_squares(grad)


# ---- position, threads, memory ----


def test_results_depend_on_neither_threads_nor_position():
    state, grad = random_state(LARGE_NUMEL), torch.randn(LARGE_NUMEL).bfloat16()
    whole, compute = clone(state), torch.zeros(LARGE_NUMEL, dtype=torch.bfloat16)
    native(2).update(**whole, grad=grad, compute=compute, hyper=BASE)
    assert same_bits(compute, whole["master"].bfloat16())
    for num_threads, shift in ((1, 0), (3, 1), (2, 7)):
        shifted = {name: tensor[shift:].clone() for name, tensor in state.items()}
        room = torch.zeros(LARGE_NUMEL + 1, dtype=torch.bfloat16)
        part = room[1 : 1 + LARGE_NUMEL - shift]  # not aligned to a vector
        native(num_threads).update(**shifted, grad=grad[shift:], compute=part, hyper=BASE)
        assert all(same_bits(shifted[name], whole[name][shift:]) for name in whole)
        assert same_bits(part, compute[shift:])
        assert room[0] == 0
        assert (room[1 + part.numel() :] == 0).all()
    assert native(1).sum_of_squares(grad) == native(3).sum_of_squares(grad)


def test_nothing_outside_the_slices_is_written(kernel):
    for numel in (1, 15, 17, 64, 1037):
        buffers = {name: torch.full((numel + 2,), 7.0) for name in ("master", *MOMENTS)}
        compute = torch.full((numel + 2,), 7.0, dtype=torch.float16)
        inner = {name: tensor[1:-1] for name, tensor in buffers.items()}
        grad = torch.ones(numel)
        kernel.update(**inner, grad=grad, compute=compute[1:-1], hyper=replace(BASE, lr=0.1))
        for buffer in (*buffers.values(), compute):
            assert buffer[0] == buffer[-1] == 7.0
            assert (buffer[1:-1] != 7.0).all()


def test_fp32_compute_is_the_master_itself(kernel):
    state, twin = random_state(NUMEL), random_state(NUMEL)
    grad = torch.randn(NUMEL)
    kernel.update(**state, grad=grad, compute=state["master"].view(-1), hyper=BASE)
    kernel.update(**twin, grad=grad, compute=None, hyper=BASE)
    assert torch.equal(state["master"], twin["master"])


@pytest.mark.parametrize("name", ["native", "torch", "deepspeed"])
def test_no_elements_is_no_work(name):
    kernel, empty = load_kernel(name), torch.empty(0)
    half = torch.empty(0, dtype=torch.bfloat16)
    kernel.update(master=empty, exp_avg=empty, exp_avg_sq=empty, grad=half, compute=half, hyper=BASE)
    kernel.prefault(torch.empty(0, dtype=torch.uint8))


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_prefault_makes_every_page_resident_and_keeps_contents(kernel):
    size = 64 << 20
    block = torch.frombuffer(mmap.mmap(-1, size + 4096), dtype=torch.uint8)[1 : size + 1]
    block[100], block[-1] = 5, 9
    before = resident_bytes()
    kernel.prefault(block)
    assert resident_bytes() - before > 0.95 * size
    assert int(block.sum()) == 14


def test_native_calls_release_the_interpreter_lock():
    state, grad, kernel = random_state(1 << 24), torch.zeros(1 << 24), native(1)
    ticks, stop = [], threading.Event()

    def tick():
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.0005)

    thread = threading.Thread(target=tick)
    thread.start()
    start = time.perf_counter()
    kernel.update(**state, grad=grad, compute=None, hyper=BASE)
    end = time.perf_counter()
    stop.set()
    thread.join()
    inside = [t for t in ticks if start + 0.1 * (end - start) < t < end - 0.1 * (end - start)]
    assert len(inside) >= 3, (end - start, len(ticks))


def test_torch_threads_are_left_alone():
    before = torch.get_num_threads()
    native(3).update(**random_state(NUMEL), grad=torch.randn(NUMEL), compute=None, hyper=BASE)
    assert torch.get_num_threads() == before


# ---- refusals ----


def wrong_arguments():
    good, half = torch.zeros(8), torch.zeros(8, dtype=torch.bfloat16)
    yield "master", half, TypeError, r"master\.dtype = torch\.bfloat16: must be torch\.float32"
    yield "exp_avg", torch.zeros(8, dtype=torch.float64), TypeError, r"exp_avg\.dtype = torch\.float64"
    yield "exp_avg_sq", torch.zeros(9), ValueError, r"exp_avg_sq\.numel\(\) = 9: must equal master\.numel\(\) = 8"
    yield "grad", torch.zeros(8, dtype=torch.int32), TypeError, r"grad\.dtype = torch\.int32"
    yield "grad", torch.zeros(7), ValueError, r"grad\.numel\(\) = 7: must equal"
    yield "grad", torch.zeros(16)[::2], ValueError, r"grad\.stride\(\) = \(2,\): must be contiguous"
    yield "grad", torch.zeros(2, 4), ValueError, r"grad\.shape = \(2, 4\): must have one dimension"
    yield "grad", torch.zeros(8, device="meta"), ValueError, r"grad\.device = 'meta': the update runs on the host"
    yield "grad", [0.0] * 8, TypeError, r"grad = 'list': must be a torch\.Tensor"
    yield "compute", good.clone(), TypeError, r"compute\.dtype = torch\.float32: must be torch\.bfloat16 or"
    yield "compute", half[:7], ValueError, r"compute\.numel\(\) = 7"


@pytest.mark.parametrize(("name", "value", "error", "message"), list(wrong_arguments()))
@pytest.mark.parametrize("kernel_name", ["native", "torch", "deepspeed"])
def test_a_wrong_tensor_is_refused_before_anything_is_written(kernel_name, name, value, error, message):
    arguments = {key: torch.ones(8) for key in ("master", "exp_avg", "exp_avg_sq", "grad")}
    arguments["compute"] = torch.ones(8, dtype=torch.bfloat16)
    arguments[name] = value
    kernel = load_kernel(kernel_name)
    with pytest.raises(error, match=message):
        kernel.update(**arguments, hyper=BASE)
    kept = [arguments[key] for key in ("master", "exp_avg", "exp_avg_sq", "compute") if key != name]
    assert all((tensor == 1).all() for tensor in kept)


def test_the_other_calls_refuse_wrong_tensors_too(kernel):
    with pytest.raises(
        TypeError, match=r"accumulator\.dtype = torch\.float16: must be torch\.float32 or torch\.bfloat16"
    ):
        kernel.accumulate(
            accumulator=torch.zeros(4, dtype=torch.float16), grad=torch.zeros(4, dtype=torch.bfloat16), overwrite=True
        )
    with pytest.raises(ValueError, match=r"grad\.numel\(\) = 5: must equal accumulator\.numel\(\) = 4"):
        kernel.accumulate(accumulator=torch.zeros(4), grad=torch.zeros(5), overwrite=False)
    with pytest.raises(TypeError, match=r"grad\.dtype = torch\.int64"):
        kernel.sum_of_squares(torch.zeros(4, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"block\.dtype = torch\.float32: must be torch\.uint8"):
        kernel.prefault(torch.zeros(4))


@pytest.mark.parametrize(("field", "value"), [("step", 0), ("beta1", 1.0), ("beta2", -0.1), ("beta2", float("nan"))])
def test_hyperparameters_without_meaning_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} = "):
        replace(BASE, **{field: value})


def test_load_kernel_refuses_unknown_names_and_thread_counts():
    with pytest.raises(ValueError, match="kernel = 'cuda': must be one of native, torch, deepspeed"):
        load_kernel("cuda")
    with pytest.raises(ValueError, match="num_threads = 0: must be 1 or more"):
        load_kernel("native", num_threads=0)


@pytest.mark.parametrize(("cpus", "threads"), [(1, 1), (2, 2), (3, 3), (4, 3), (32, 31)])
def test_one_of_four_or_more_cpus_is_left_to_the_launching_thread(monkeypatch, cpus, threads):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cpus)))
    assert default_num_threads() == threads
