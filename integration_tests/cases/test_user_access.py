"""User code reads and writes weights, gradients and optimizer state between steps as if they were plain."""

from __future__ import annotations

import copy
import time
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from torch import nn

from integration_tests.cases.engines import (
    LR,
    assert_same_bits,
    gradients,
    masters,
    plain_gradients,
    state,
    train,
)
from integration_tests.cases.models import Stack, causal_loss, llama, token_batches

PLACES = pytest.mark.parametrize("place", ["blocks.1.up.weight", "blocks.0.norm.bias", "head.weight"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def slow_updates(engine: Any, delay_s: float = 0.03) -> None:
    update = engine.runtime.pipeline.kernel.update

    def slow(**operands: Any) -> None:
        time.sleep(delay_s)
        update(**operands)

    engine.runtime.pipeline.kernel.update = slow


def one_step(engine: Any, device: torch.device, seed: int = 1) -> None:
    (ids,) = token_batches(device, 1, seed=seed)
    engine.backward(engine(ids))
    engine.step()


def parameter(engine: Any, place: str) -> nn.Parameter:
    return dict(engine.module.named_parameters())[place]


@PLACES
@DTYPES
@pytest.mark.parametrize("finite_check", [True, False])
def test_read_right_after_step(start, device, place, dtype, finite_check) -> None:
    """However it is read, the value is the updated one: never the old one, never half of each."""
    readers = [
        lambda param: param.detach().clone(),
        lambda param: param.data.clone(),
        lambda param: param + 0,
        lambda param: torch.stack([param])[0],
        lambda param: param.cpu().clone(),
        lambda param: torch.tensor(param.tolist(), dtype=dtype),
        lambda param: torch.from_numpy(param.detach().float().cpu().numpy().copy()).to(dtype),
        lambda param: copy.deepcopy(param),
    ]
    engine = start(Stack(), dtype=dtype, block={"finite_check": finite_check})
    slow_updates(engine, 0.004)
    for seed, read in enumerate(readers):
        param = parameter(engine, place)
        before = param.detach().clone()
        one_step(engine, device, seed)
        seen = read(param).detach().to(device)
        assert torch.equal(seen, safe_get_full_fp32_param(param).to(device, dtype))
        assert not torch.equal(seen, before.to(device))


def write_data_copy(param: nn.Parameter, value: torch.Tensor) -> None:
    param.data.copy_(value)


def write_no_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    with torch.no_grad():
        param.copy_(value)


def write_in_place_operations(param: nn.Parameter, value: torch.Tensor) -> None:
    with torch.no_grad():
        param.zero_()
        param += value.to(param.device)


def write_slices(param: nn.Parameter, value: torch.Tensor) -> None:
    with torch.no_grad():
        for row in range(len(param)):
            param[row] = value[row]


def write_assignment(param: nn.Parameter, value: torch.Tensor) -> None:
    param.data = value.clone()


def write_alias_kept_from_before(param: nn.Parameter, value: torch.Tensor) -> None:
    alias = param.data
    alias.view(-1).copy_(value.view(-1))


def write_gathered(param: nn.Parameter, value: torch.Tensor) -> None:
    with deepspeed.zero.GatheredParameters(param, modifier_rank=0), torch.no_grad():
        param.copy_(value)


def write_master(param: nn.Parameter, value: torch.Tensor) -> None:
    safe_set_full_fp32_param(param, value.float())


WRITERS = [
    write_data_copy,
    write_no_grad,
    write_in_place_operations,
    write_slices,
    write_assignment,
    write_alias_kept_from_before,
    write_gathered,
    write_master,
]


@PLACES
@DTYPES
@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_write_reaches_forward_and_master(start, device, place, dtype, write) -> None:
    """Right after a step whose update is still running; the next forward and the next update start from the value."""
    engine = start(Stack(), dtype=dtype)
    slow_updates(engine, 0.002)
    one_step(engine, device)
    param = parameter(engine, place)
    value = torch.randn(param.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    write(param, value.to(param.device))
    assert torch.equal(param.detach().cpu(), value)
    assert torch.equal(safe_get_full_fp32_param(param).cpu(), value.float())
    (ids,) = token_batches(device, 1, seed=9)
    twin = copy.deepcopy(engine.module).to(device)
    assert torch.equal(dict(twin.named_parameters())[place].detach().cpu(), value)
    loss = engine(ids)
    assert torch.equal(loss, twin(ids))
    engine.backward(loss)
    twin(ids).backward()
    assert_same_bits(gradients(engine), {n: g.float() for n, g in plain_gradients(twin).items()})
    engine.step()
    moved = (safe_get_full_fp32_param(param).cpu() - value.float()).abs().max()
    assert 0 < moved <= 20 * LR


@DTYPES
def test_load_state_dict_between_steps(start, device, dtype) -> None:
    other = Stack().to(dtype).state_dict()
    engine = start(Stack(), dtype=dtype)
    slow_updates(engine, 0.002)
    one_step(engine, device)
    engine.module.load_state_dict(other)
    assert_same_bits({name: value.detach() for name, value in engine.module.state_dict().items()}, other)
    # A master that already rounded to the loaded value keeps its bits.
    assert_same_bits({name: value.to(dtype) for name, value in masters(engine).items()}, other)


@PLACES
def test_optimizer_state_and_gradient_are_written(start, device, place) -> None:
    engine, expected = start(Stack()), start(Stack())
    engine.module.load_state_dict(expected.module.state_dict())
    for which in (engine, expected):
        one_step(which, device)
    param, other = parameter(engine, place), parameter(expected, place)
    for key in ("exp_avg", "exp_avg_sq"):
        safe_set_full_optimizer_state(param, torch.full(param.shape, 0.5), key)
        assert torch.equal(safe_get_full_optimizer_state(param, key).cpu(), torch.full(param.shape, 0.5))
    (ids,) = token_batches(device, 1, seed=2)
    for which in (engine, expected):
        which.backward(which(ids))
    doubled = safe_get_full_grad(param) * 2
    safe_set_full_grad(param, doubled)
    assert torch.equal(safe_get_full_grad(param), doubled)
    engine.step()
    expected.step()
    beta1 = 0.9
    moment = safe_get_full_optimizer_state(param, "exp_avg").cpu()
    assert torch.allclose(moment, 0.5 * beta1 + (1 - beta1) * doubled.cpu(), rtol=1e-6, atol=1e-7)
    assert not torch.equal(param, other)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_written_gradient_counts_in_the_norm(start, device, accumulation) -> None:
    engine = start(Stack(), gradient_accumulation_steps=accumulation, gradient_clipping=1.0)
    for ids in token_batches(device, accumulation):
        engine.backward(engine(ids))
        if not engine.is_gradient_accumulation_boundary():
            engine.step()
    for param in engine.module.parameters():
        safe_set_full_grad(param, torch.zeros(param.shape, device=device))
    head = engine.module.head.weight
    safe_set_full_grad(head, torch.full(head.shape, 3.0, device=device))
    engine.step()
    expected = 3.0 * head.numel() ** 0.5
    assert float(engine.get_global_grad_norm()) == pytest.approx(expected, rel=1e-6)


def test_gradients_written_all_at_once(start, device) -> None:
    vectorized = pytest.importorskip("deepspeed.utils.tensor_fragment").__dict__.get("safe_update_full_grad_vectorized")
    if vectorized is None:
        pytest.skip("this DeepSpeed has no vectorized update")
    engine = start(Stack())
    (ids,) = token_batches(device, 1)
    engine.backward(engine(ids))
    before = gradients(engine)
    vectorized(list(engine.module.parameters()), lambda grad, _param: grad * 0.5)
    assert_same_bits(gradients(engine), {name: grad * 0.5 for name, grad in before.items()})


def test_moving_average_over_parameters(start, device) -> None:
    """An EMA kept by user code, and swapped in for evaluation and out again, leaves training untouched."""
    engine, plain = start(Stack()), start(Stack())
    plain.module.load_state_dict(engine.module.state_dict())
    slow_updates(engine, 0.002)
    average = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
    (held_out,) = token_batches(device, 1, seed=99)
    for seed in range(4):
        one_step(engine, device, seed)
        one_step(plain, device, seed)
        with torch.no_grad():
            for name, param in engine.module.named_parameters():
                average[name].lerp_(param, 0.1)
        kept = {name: param.detach().clone() for name, param in engine.module.named_parameters()}
        engine.module.load_state_dict(average)
        with torch.no_grad():
            loss = engine.module(held_out)
        assert not torch.equal(loss, plain.module(held_out))
        engine.module.load_state_dict(kept)
    assert_same_bits(state(engine), state(plain))


def test_swap_of_weights_keeps_master_bits(start, device) -> None:
    """In bf16 a write of the very values that are there costs the master nothing of its precision."""
    engine = start(Stack(), dtype=torch.bfloat16)
    one_step(engine, device)
    before = masters(engine)
    kept = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.module.load_state_dict(kept)
    assert_same_bits(masters(engine), before)
    assert any(not torch.equal(value, value.bfloat16().float()) for value in before.values())


def test_deep_copy_computes_by_itself(start, device) -> None:
    engine = start(Stack())
    slow_updates(engine, 0.002)
    one_step(engine, device)
    twin = copy.deepcopy(engine.module).to(device)
    assert_same_bits(dict(twin.named_parameters()), dict(engine.module.named_parameters()))
    (ids,) = token_batches(device, 1)
    before = {name: param.detach().clone() for name, param in twin.named_parameters()}
    one_step(engine, device, 5)
    assert_same_bits({name: param.detach() for name, param in twin.named_parameters()}, before)
    twin(ids).backward()
    assert all(type(param) is nn.Parameter and param.grad is not None for param in twin.parameters())
    with torch.no_grad():
        for param in twin.parameters():
            param.zero_()
    assert engine.module.head.weight.abs().sum() > 0


def test_module_identity_and_generate(start, device) -> None:
    model = llama()
    twin = copy.deepcopy(model)
    engine = start(model)
    assert engine.module is model
    (ids,) = token_batches(device, 1)
    train(engine, [ids] * 2, causal_loss)
    twin.load_state_dict(engine.module.state_dict())
    twin.to(device).eval()
    engine.eval()
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(engine.module.generate(ids, **options), twin.generate(ids, **options))
    assert torch.equal(engine.generate(ids, **options), twin.generate(ids, **options))
    engine.train()
    train(engine, [ids], causal_loss)
    assert engine.global_steps == 3


def test_optimizer_groups_are_live(start, device) -> None:
    """A rate set by hand is the rate of the next step; zero moves nothing, and `lr` may be a tensor."""
    engine = start(Stack(), optimizer_block={"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.0}})
    one_step(engine, device)
    for rate in (0.0, torch.tensor(0.0)):
        engine.optimizer.param_groups[0]["lr"] = rate
        before = masters(engine)
        one_step(engine, device, 2)
        assert_same_bits(masters(engine), before)
    engine.optimizer.param_groups[0]["lr"] = 1.0
    one_step(engine, device, 3)
    assert (masters(engine)["head.weight"] - before["head.weight"]).abs().max() > 0.1


def test_pickle_and_save_of_parameters(start, device, tmp_path) -> None:
    engine = start(Stack())
    slow_updates(engine, 0.002)
    one_step(engine, device)
    torch.save(engine.module.state_dict(), tmp_path / "weights.pt")
    loaded = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert_same_bits(loaded, {name: value.detach() for name, value in engine.module.state_dict().items()})
    twin = Stack()
    twin.load_state_dict(loaded)
