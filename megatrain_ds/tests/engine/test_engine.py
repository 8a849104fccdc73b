"""The whole engine on the CPU: bits against its synchronous mode, overlap, flat memory, threads, recovery."""

from __future__ import annotations

import copy
import gc
import threading
import time
from pathlib import Path

import pytest
import torch

from megatrain_ds.errors import StateError
from megatrain_ds.memory.streams import D2H, H2D
from megatrain_ds.tests.engine.models import (
    NUM_BLOCKS,
    batch,
    differing,
    engine_threads,
    make_engine,
    make_model,
    state,
    train,
)
from megatrain_ds.tests.releases import COLLECTABLE_ENGINES

THREADS = ["megatrain-d2h", "megatrain-h2d", "megatrain-host"]


def delayed(start, delays_s, *, update_s: float = 0.0, **settings):
    """An engine with slow flows and a slow update kernel."""
    engine = start(make_model(), **settings)
    engine.runtime.streams.delays_s.update(delays_s)
    kernel = engine.runtime.pipeline.kernel
    original = kernel.update

    def slow(**kwargs):
        time.sleep(update_s)
        original(**kwargs)

    kernel.update = slow
    return engine


def run(engine, accumulation: int = 1) -> list[float]:
    losses = []
    for step in range(4 * accumulation):
        loss = engine(batch(step), order=(0, 2, 1) if step == 2 else None)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("block", [{}, {"finite_check": False}, {"activations": "keep", "weight_slots": 3}])
def test_slow_flows_and_a_slow_update_give_the_bits_of_the_synchronous_mode(start, block, accumulation):
    keys = {"bf16": True, "gradient_accumulation_steps": accumulation}
    reference = start(make_model(), block={**block, "synchronous": True}, **keys)
    losses, expected = run(reference, accumulation), state(reference)
    for delays_s, update_s in (
        ({H2D: 0.002}, 0.0),
        ({D2H: 0.002}, 0.0),
        ({}, 0.003),
        ({H2D: 0.001, D2H: 0.002}, 0.001),
    ):
        engine = delayed(start, delays_s, update_s=update_s, block=block, **keys)
        assert run(engine, accumulation) == losses
        assert differing(state(engine), expected) == []


def test_training_agrees_with_plain_torch(start):
    twin, engine = make_model(), start(make_model())
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    losses = []
    for step in range(5):
        optimizer.zero_grad()
        loss = twin(batch(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert train(engine, range(5)) == pytest.approx(losses, rel=1e-5)


def test_steps_overlap_what_the_synchronous_mode_does_one_after_another(start):
    def seconds(*, synchronous: bool) -> float:
        engine = delayed(start, {H2D: 0.06, D2H: 0.06}, update_s=0.06, block={"synchronous": synchronous})
        train(engine, range(1))
        begin = time.perf_counter()
        train(engine, range(1, 4))
        engine.runtime.pipeline.wait_all()
        return time.perf_counter() - begin

    assert seconds(synchronous=False) < 0.9 * seconds(synchronous=True)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_resident_memory_arenas_and_threads_stay_flat(start):
    engine = start(block={"weight_slots": 2}, gradient_accumulation_steps=5)
    train(engine, range(20))

    def sizes():
        runtime = engine.runtime
        return len(runtime.store.arenas), runtime.store.num_bytes, runtime.pool.num_bytes, threading.active_count()

    before, resident = sizes(), resident_bytes()
    train(engine, range(20, 70))  # 50 micro-batches, 10 optimizer steps
    assert engine.global_steps == 14
    assert sizes() == before
    assert resident_bytes() <= 1.01 * resident


def test_destroy_ends_the_threads_and_gives_the_model_back(start):
    model = make_model()
    engine = start(model)
    assert engine_threads() == THREADS
    train(engine, range(2))
    shown = {name: param.detach().clone() for name, param in model.named_parameters()}
    loss = engine(batch(9)).item()
    engine.destroy()
    engine.destroy()
    assert engine_threads() == []
    for name, param in model.named_parameters():
        assert type(param) is torch.nn.Parameter
        assert torch.equal(param.detach(), shown[name])
    assert not any("forward" in vars(module) for module in model.modules())
    assert model(batch(9)).item() == loss
    with pytest.raises(RuntimeError, match=r"engine used after destroy\(\): call deepspeed.initialize again"):
        _ = engine.runtime


@COLLECTABLE_ENGINES
@pytest.mark.parametrize("steps", [0, 2])
def test_threads_end_when_the_engine_is_collected_without_destroy(steps):
    engine, model = make_engine(model := make_model()), model
    assert engine_threads() == THREADS
    train(engine, range(steps))
    del engine, model
    gc.collect()
    assert engine_threads() == []


def test_backward_after_destroy_raises_instead_of_waiting(start):
    engine = start()
    loss = engine(batch(0))
    engine.destroy()
    with pytest.raises(StateError, match="allowed from a live engine, but the state is destroyed"):
        loss.backward()


def test_two_engines_live_beside_each_other(start):
    first, second = start(make_model(), bf16=True), start(make_model())
    alone = start(make_model(), bf16=True)
    expected = train(alone, range(3))
    losses = []
    for step in range(3):
        losses += train(first, range(step, step + 1))
        train(second, range(step, step + 1))
    assert losses == expected
    assert len(engine_threads()) == 9


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_in_a_block_costs_the_step_and_nothing_else(start, where):
    engine, other = start(make_model()), start(make_model())
    calls: list[int] = []
    fails_at = {"forward": 1, "backward": 2}[where]

    def fail(module, _args):
        calls.append(1)
        module.num_calls = len(calls)  # a hook that changes its module runs in the recompute too
        if len(calls) == fails_at:
            raise ZeroDivisionError("in the block")

    train(engine, range(1))
    hook = engine.module.layers[1].inner.register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError, match="in the block"):
        engine.backward(engine(batch(1)))
    hook.remove()
    train(engine, range(1, 3))
    train(other, range(3))
    assert [slot.users for slot in engine.runtime.pool.slots] == [0, 0]
    assert differing(state(engine), state(other)) == []


def test_evaluation_between_steps_changes_nothing(start):
    engine, other = start(make_model()), start(make_model())
    for step in range(3):
        train(engine, range(step, step + 1))
        with torch.no_grad():
            evaluated = engine.module(batch(7)).item()  # the raw module, as Trainer does
        assert evaluated == pytest.approx(engine(batch(7)).item())
        engine.module(batch(8))  # a graph that is dropped
    train(other, range(3))
    assert differing(state(engine), state(other)) == []


def write_in_place(model):
    with torch.no_grad():
        model.layers[1].inner.weight.fill_(0.25)
        model.head.weight.fill_(0.5)


def write_by_data(model):
    model.layers[1].inner.weight.data = torch.full((64, 64), 0.25)
    model.head.weight.data = torch.full((64, 64), 0.5)


def write_by_loading(model):
    values = {name: value.clone() for name, value in model.state_dict().items()}
    values["layers.1.inner.weight"].fill_(0.25)
    values["head.weight"].fill_(0.5)
    model.load_state_dict(values)


@pytest.mark.parametrize("write", [write_in_place, write_by_data, write_by_loading])
@pytest.mark.parametrize("bf16", [False, True])
def test_user_writes_reach_the_next_forward_and_the_masters(start, write, bf16):
    engine = start(make_model(), bf16=bf16, lr=0.0)
    train(engine, range(2))
    write(engine.module)
    loss = train(engine, range(2, 3))
    plain = make_model().to(torch.bfloat16 if bf16 else torch.float32)
    plain.load_state_dict({name: value.clone() for name, value in engine.module.state_dict().items()})
    assert loss == [plain(batch(2)).item()]
    for entry in engine.optimizer.parameters[0]:
        expected = {"layers.1.inner.weight": 0.25, "head.weight": 0.5}.get(entry.name)
        if expected is not None:
            assert entry.view("master").unique().tolist() == [expected]


def test_copies_of_the_model_are_plain_and_independent(start):
    engine = start(make_model())
    train(engine, range(2))
    copied = copy.deepcopy(engine.module)
    assert {type(param) for param in copied.parameters()} == {torch.nn.Parameter}
    with torch.no_grad():
        expected = engine.module(batch(3)).item()
        assert copied(batch(3)).item() == expected
        copied.layers[0].inner.weight.zero_()
        assert engine.module(batch(3)).item() == expected
    assert {type(value) for value in engine.module.state_dict().values()} == {torch.Tensor}


def test_state_read_right_after_a_step_is_that_steps(start):
    engine = delayed(start, {}, update_s=0.02)
    before = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.backward(engine(batch(0)))
    engine.step()
    after = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.runtime.pipeline.wait_all()
    assert len(differing(before, after)) == 2 * NUM_BLOCKS + 2
    assert differing(after, engine.module.state_dict()) == []
