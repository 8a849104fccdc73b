"""What every update kernel does besides its formula: conversions, sums, memory, threads, refusals."""

from __future__ import annotations

import mmap
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatrain_ds.optim.kernel import UpdatePart, default_num_threads, load_kernel
from megatrain_ds.tests.optim.kernel_cases import (
    BASE,
    DTYPES,
    HALF_DTYPES,
    MOMENTS,
    NUMEL,
    native,
    random_state,
    same_bits,
)

# Above the size from which the compute copy bypasses the caches, with a remainder.
LARGE_NUMEL = (1 << 20) + 4096 + 5


@pytest.fixture(params=["native", "torch"])
def kernel(request):
    loaded = load_kernel(request.param, num_threads=2)
    assert loaded.name == request.param
    return loaded


def clone(state):
    return {name: tensor.clone() for name, tensor in state.items()}


def all_patterns(dtype):
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)


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


# ---- an update in two passes ----


@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("copy_dtype", [None, *HALF_DTYPES])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_weights_and_then_moments_are_the_bits_of_one_pass(kernel, grad_dtype, copy_dtype, weight_decay):
    _compare_two_passes_with_one(kernel, NUMEL, grad_dtype, copy_dtype, weight_decay)


@pytest.mark.parametrize("copy_dtype", [None, *HALF_DTYPES])
def test_two_passes_over_large_tensors_are_the_bits_of_one(kernel, copy_dtype):
    _compare_two_passes_with_one(kernel, LARGE_NUMEL, torch.bfloat16, copy_dtype, 0.1)


def _compare_two_passes_with_one(kernel, numel, grad_dtype, copy_dtype, weight_decay):
    whole, parts = random_state(numel), random_state(numel)
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(3)).to(grad_dtype)
    copies = [None if copy_dtype is None else torch.zeros(numel, dtype=copy_dtype) for _ in range(2)]
    hyper = replace(BASE, weight_decay=weight_decay, step=3, grad_scale=0.5)
    kernel.update(**whole, grad=grad, compute=copies[0], hyper=hyper)
    kernel.update(**parts, grad=grad, compute=copies[1], hyper=hyper, part=UpdatePart.WEIGHTS)
    assert same_bits(parts["master"], whole["master"])
    assert all(same_bits(parts[name], random_state(numel)[name]) for name in MOMENTS)
    kept = clone(parts)
    kernel.update(**parts, grad=grad, compute=copies[1], hyper=hyper, part=UpdatePart.MOMENTS)
    assert same_bits(parts["master"], kept["master"])
    assert all(same_bits(parts[name], whole[name]) for name in MOMENTS)
    if copy_dtype is not None:
        assert same_bits(*copies)


@pytest.mark.parametrize("part", [UpdatePart.WEIGHTS, UpdatePart.MOMENTS])
def test_l2_decay_is_not_split(kernel, part):
    state = random_state(NUMEL)
    hyper = replace(BASE, decoupled=False)
    with pytest.raises(ValueError, match=f"part = '?{part.name}'?: L2 decay.*Pass ALL"):
        kernel.update(**state, grad=torch.zeros(NUMEL), compute=None, hyper=hyper, part=part)
    assert all(same_bits(tensor, random_state(NUMEL)[name]) for name, tensor in state.items())


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
    monkeypatch.setattr("megatrain_ds.optim.kernel.usable_cpus", lambda: cpus)
    assert default_num_threads() == threads
