"""Failures reach the caller as what they are, soon, and name the block; what can go on goes on with the right bits."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.config import DeepSpeedConfigError

from integration_tests.cases.engines import assert_same_bits, ds_config, initialize, masters, state
from integration_tests.cases.failing_program import Fails
from integration_tests.cases.models import Block, Stack, token_batches
from megatrain_ds.cli.single_process import free_port, program_environment, rank_variables, remove_shared_buffers

ROOT = Path(__file__).resolve().parents[2]
SOON_S = 5.0


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


def failing_stack() -> Stack:
    return Stack(Block(), Block(), Block(), Fails())


@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    ("how", "kind"), [("forward", LookupError), ("backward", LookupError), ("interrupt", KeyboardInterrupt)]
)
def test_exception_then_another_batch(start, device, how, kind, activations, accumulation) -> None:
    """The original exception comes at once; the step is then run again and gives a fresh engine's bits."""
    model = failing_stack()
    block = {"activations": activations}
    engine = start(copy.deepcopy(model), gradient_accumulation_steps=accumulation, block=block)
    fresh = start(copy.deepcopy(model), gradient_accumulation_steps=accumulation, block=block)

    def run(which: Any, seed: int) -> None:
        for ids in token_batches(device, accumulation, seed=seed):
            which.backward(which(ids))
            which.step()

    for which in (engine, fresh):
        run(which, 1)
    engine.module.blocks[3].how = how
    started = time.monotonic()
    with pytest.raises(kind) as raised:
        run(engine, 2)
    assert time.monotonic() - started < SOON_S
    if how != "interrupt":
        assert "no such thing" in str(raised.value)
    if sys.version_info >= (3, 11):
        assert "blocks.3" in notes(raised.value)
    engine.module.blocks[3].how = "nothing"
    for which in (engine, fresh):
        run(which, 3)
        run(which, 4)
    assert_same_bits(state(engine), state(fresh))
    assert len(engine.runtime.pool.slots) == len(fresh.runtime.pool.slots)


def test_exception_in_second_micro_batch_drops_the_step_with_a_warning(start, device) -> None:
    engine = start(failing_stack(), gradient_accumulation_steps=2)
    first, second = token_batches(device, 2)
    engine.backward(engine(first))
    engine.step()
    engine.module.blocks[3].how = "backward"
    loss = engine(second)
    with pytest.raises(LookupError), pytest.warns(RuntimeWarning, match="dropped"):
        engine.backward(loss)


@pytest.mark.parametrize("finite_check", [True, False])
def test_exception_in_the_host_worker(start, device, finite_check) -> None:
    """The update's own exception is raised at the next call that needs it, naming the block, and again after that."""
    engine = start(Stack(), block={"finite_check": finite_check})

    def raises(**_: Any) -> None:
        raise LookupError("kernel failed")

    engine.runtime.pipeline.kernel.update = raises
    started = time.monotonic()
    batches = token_batches(device, 3)

    def run() -> None:
        for ids in batches:
            engine.backward(engine(ids))
            engine.step()

    with pytest.raises(LookupError, match="kernel failed") as raised:
        run()
    assert time.monotonic() - started < SOON_S
    if sys.version_info >= (3, 11):
        assert "blocks." in notes(raised.value) or "root" in notes(raised.value)
    with pytest.raises(LookupError):
        engine(batches[0])
    engine.destroy()
    assert not [thread for thread in threading.enumerate() if thread.name == "megatrain-host" and thread.is_alive()]


def test_no_thread_and_no_hook_outlives_an_engine(device) -> None:
    def threads() -> list[str]:
        return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("megatrain"))

    before = threads()
    model = Stack()
    engine = initialize(model)
    (ids,) = token_batches(device, 1)
    engine.backward(engine(ids))
    engine.step()
    assert device.type == "cuda" or threads() != before
    engine.destroy()
    engine.destroy()
    assert threads() == before
    assert all("forward" not in block.__dict__ for block in model.blocks)
    assert all(type(param) is torch.nn.Parameter for param in model.parameters())
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())
    model.to(device)(ids).backward()


def test_a_second_engine_on_the_same_model(start, device) -> None:
    """destroy() and a new initialize continue from the weights; the result is a fresh engine's."""
    model = Stack()
    batches = token_batches(device, 4)
    engine = start(model)
    for ids in batches[:2]:
        engine.backward(engine(ids))
        engine.step()
    engine.destroy()
    other = Stack()
    other.load_state_dict(model.state_dict())
    found = []
    for which in (model, other):
        engine = start(which)
        for ids in batches[2:]:
            engine.backward(engine(ids))
            engine.step()
        found.append(state(engine))
    assert_same_bits(*found)


def test_two_engines_at_once(start, device) -> None:
    models = [Stack() for _ in range(2)]
    together = [start(copy.deepcopy(model)) for model in models]
    for ids in token_batches(device, 3):
        losses = [engine(ids) for engine in together]
        for engine, loss in zip(together, losses, strict=True):
            engine.backward(loss)
        for engine in together:
            engine.step()
    alone = [start(copy.deepcopy(model)) for model in models]
    for engine in alone:
        for ids in token_batches(device, 3):
            engine.backward(engine(ids))
            engine.step()
    for one, other in zip(together, alone, strict=True):
        assert_same_bits(state(one), state(other))


def test_slow_worker_is_slow_but_right(start, device) -> None:
    model = Stack()
    engine, quick = start(copy.deepcopy(model)), start(copy.deepcopy(model))
    update, slept = engine.runtime.pipeline.kernel.update, []

    def slow(**operands: Any) -> None:
        if not slept:
            slept.append(time.sleep(3))
        update(**operands)

    engine.runtime.pipeline.kernel.update = slow
    started = time.monotonic()
    for which in (engine, quick):
        for ids in token_batches(device, 3):
            which.backward(which(ids))
            which.step()
    assert_same_bits(masters(engine), masters(quick))
    assert time.monotonic() - started >= 3


def test_misspelt_engine(start) -> None:
    import deepspeed

    with pytest.raises(DeepSpeedConfigError, match=r'(?s)megatrian.*"megatrain"'):
        deepspeed.initialize(model=Stack(), config={**ds_config(), "offload_engine": "megatrian"})


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"zero_optimization": {"stage": 1}}, "stage"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/tmp"}}},
            "offload_param",
        ),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}},
            "super_offload",
        ),
        ({"block": {"weight_slot": 3}}, "weight_slots"),
        ({"block": {"weight_slots": "auto"}}, "auto"),
        ({"block": {"weight_slots": 1}}, "weight_slots"),
    ],
    ids=str,
)
def test_refused_configuration(keys, words) -> None:
    """Each is refused by name; nothing was touched, and the same model then trains."""
    model = Stack()
    with pytest.raises((DeepSpeedConfigError, ValueError), match=words):
        initialize(model, **keys)
    assert all(type(param) is torch.nn.Parameter for param in model.parameters())
    initialize(model).destroy()


def program(*command: str, **variables: str) -> tuple[subprocess.CompletedProcess, float]:
    """Run a command with one rank's variables; returns it and its seconds."""
    port = int(variables.get("MASTER_PORT") or free_port())
    environment = {**program_environment(), **rank_variables(port), **variables, "PYTHONPATH": str(ROOT)}
    started = time.monotonic()
    try:
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=240)
    finally:
        remove_shared_buffers(port)
    return done, time.monotonic() - started


@pytest.mark.parametrize("how", ["forward", "backward", "worker", "interrupt"])
def test_uncaught_failure_ends_the_process(how, tmp_path) -> None:
    threads_file = tmp_path / "threads"
    done, _ = program(sys.executable, "-m", "integration_tests.cases.failing_program", how, str(threads_file))
    assert done.returncode != 0
    assert ("KeyboardInterrupt" if how == "interrupt" else "LookupError: no such thing") in done.stderr
    if sys.version_info >= (3, 11):
        assert "megatrain: raised in" in done.stderr
        assert ("optimizer step of " if how == "worker" else "blocks.3") in done.stderr
    assert threads_file.read_text() == "[]"


def test_missing_compiler_falls_back_to_torch() -> None:
    """The program trains, and the one warning carries what the system said about the compiler."""
    # DeepSpeed compiles its own CPU collectives first, with the real compiler.
    code = (
        "import os, deepspeed\n"
        "deepspeed.init_distributed()\n"
        "os.environ['CXX'] = '/nowhere/no-such-compiler'\n"
        "from integration_tests.cases.engines import initialize\n"
        "from integration_tests.cases.models import Stack, token_batches\n"
        "engine = initialize(Stack())\n"
        "for ids in token_batches(engine.device, 2):\n"
        "    engine.backward(engine(ids)); engine.step()\n"
        "print('kernel', engine.runtime.pipeline.kernel.name, 'steps', engine.global_steps)\n"
    )
    done, _ = program(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "kernel torch steps 2" in done.stdout
    assert "no-such-compiler" in done.stderr
    assert done.stderr.count("native update kernel is not available") == 1


def test_two_ranks_are_refused() -> None:
    port = str(free_port())
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", port]
    variables = {"LOCAL_SIZE": "2", "OMP_NUM_THREADS": "1", "MASTER_PORT": port}
    done, _ = program(*launch, "-m", "integration_tests.cases.failing_program", "nothing", os.devnull, **variables)
    assert done.returncode != 0
    assert "world size = 2" in done.stderr
