"""What the recorder of `megatrain-ds compare` notes about real engines of both kinds, in this process."""

from __future__ import annotations

import json
import sys
import time

import deepspeed
import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from megatrain_ds.plugin import compare_recorder
from megatrain_ds.plugin.compare_record import count_tokens
from megatrain_ds.plugin.compare_recorder import Recorder
from megatrain_ds.plugin.compare_spec import CompareSpec
from megatrain_ds.plugin.selection import COMPARE_VARIABLE
from megatrain_ds.tests.engine.models import NUM_BLOCKS, batch, make_engine, make_model

WRAPPED = ((DeepSpeedEngine, ("forward", "backward", "scale", "step", "__init__")), (torch.Tensor, ("backward",)))


class EndedError(Exception):
    """Stands for the end of the process."""


@pytest.fixture
def spec(tmp_path) -> CompareSpec:
    return CompareSpec(name="run", flag=True, num_steps=4, num_warmup=1, folder=str(tmp_path))


@pytest.fixture
def recorder(spec, monkeypatch):
    """A recorder as `install` makes it; what it wraps is itself again after the test, and the end is an exception."""
    for owner, names in WRAPPED:
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(compare_recorder.atexit, "register", lambda function: function)
    for name, value in spec.publish().items():
        monkeypatch.setenv(name, value)

    def end() -> None:
        raise EndedError

    monkeypatch.setattr(compare_recorder, "end_process", end)
    made = compare_recorder.install(DeepSpeedEngine)
    # Here each engine's own configuration says what it is.
    monkeypatch.delenv(COMPARE_VARIABLE)
    return made


@pytest.fixture
def start(recorder):
    """`start(kind, **keys)` builds an engine that is destroyed after the test."""
    started = []

    def factory(kind: str = "megatrain", **keys):
        started.append(make_engine(**keys) if kind == "megatrain" else make_stock(**keys))
        return started[-1]

    yield factory
    for engine in started:
        engine.destroy()


def make_stock(**keys):
    """An engine of DeepSpeed's own, in the model's precision, stepped by torch."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 3},
        "steps_per_print": 1000000,
        **keys,
    }
    model = make_model()
    return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), 1e-2), config=config)[0]


def told(spec: CompareSpec, kind: str) -> list[dict]:
    lines = [json.loads(line) for line in spec.events.read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


def record_of(spec: CompareSpec) -> dict:
    return json.loads(spec.record.read_text())


def train_to_the_end(
    engine, step=lambda engine, loss: engine.backward(loss), num_micro_batches: int = 1
) -> list[float]:
    """Train until the recorder ends the program; returns each micro-batch's loss as the model gave it."""
    losses: list[float] = []

    def train() -> None:
        for index in range(100):
            loss = engine(batch(index))
            losses.append(loss.item())
            step(engine, loss)
            engine.step()

    pytest.raises(EndedError, train)
    assert len(losses) % num_micro_batches == 0
    return losses


ROUTES = {
    "engine.backward": lambda engine, loss: engine.backward(loss),
    "divided by the caller": lambda engine, loss: engine.backward(loss / 2, scale_wrt_gas=False),
    "by position": lambda engine, loss: engine.backward(loss / 2, False, False),
    "loss.backward": lambda engine, loss: loss.backward(),
    "engine.scale": lambda engine, loss: engine.scale(loss).backward(),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", ["megatrain", "stock"])
def test_a_steps_loss_is_the_mean_over_its_micro_batches(kind, route, start, spec):
    losses = train_to_the_end(start(kind, gradient_accumulation_steps=2), ROUTES[route], 2)
    means = [(first + second) / 2 for first, second in zip(losses[::2], losses[1::2], strict=True)]
    found = record_of(spec)
    assert found["losses"] == pytest.approx(means, rel=1e-6)
    assert (found["complete"], found["engine"]) == (True, {"megatrain": "MegaTrainEngine"}.get(kind, "DeepSpeedEngine"))
    assert [event["loss"] for event in told(spec, "step")] == pytest.approx(means, rel=1e-6)
    assert [event["step"] for event in told(spec, "step")] == [1, 2, 3, 4]
    assert len(found["step_times_s"]) == 3
    assert found["peak_host_bytes"] >= found["resident_bytes"] > 2**20


def test_a_loss_scale_is_left_out(start, recorder, spec):
    def step(engine, loss) -> None:
        recorder.around_scale(lambda engine, loss: loss * 16, engine, loss).backward()

    losses = train_to_the_end(start(), step)
    assert record_of(spec)["losses"] == pytest.approx(losses, rel=1e-6)


def test_a_loss_that_the_script_writes_to_later_is_kept_as_it_was(start, spec):
    def step(engine, loss) -> None:
        engine.backward(loss, scale_wrt_gas=False)
        loss.data.zero_()

    losses = train_to_the_end(start(), step)
    assert record_of(spec)["losses"] == pytest.approx(losses, rel=1e-6)


def test_the_clock_waits_for_updates_that_outlive_the_last_step(start, spec):
    engine = start(gradient_clipping=1.0)
    kernel, update_s = engine.runtime.pipeline.kernel, 0.1
    original = kernel.update

    def slow(**values) -> None:
        time.sleep(update_s)
        original(**values)

    kernel.update = slow
    train_to_the_end(engine)
    found = record_of(spec)
    left = found["mean_step_s"] * 3 - sum(found["step_times_s"])
    assert left > update_s * NUM_BLOCKS / 2
    assert found["drained"] is True


def test_forwards_that_train_nothing_count_no_tokens(start, recorder, spec):
    engine = start()
    seen: list = []
    recorder.around_forward(lambda *_: None, engine, {"input_ids": batch(0)})
    engine.eval()
    recorder.around_forward(seen.append, engine)
    engine.train()
    with torch.no_grad():
        recorder.around_forward(lambda *_: None, engine, {"input_ids": batch(0)})
    assert seen == [engine]
    (record,) = recorder._records
    assert record._window_tokens == [16]


@pytest.mark.parametrize(
    ("args", "kwargs", "count"),
    [
        ((), {"input_ids": torch.ones(2, 8)}, 16),
        (({"input_ids": torch.ones(2, 8)},), {}, 16),
        ((), {"input_ids": torch.ones(2, 3), "attention_mask": torch.tensor([[1, 1, 0], [1, 0, 0]])}, 3),
        ((), {"input_ids": torch.ones(2, 3), "attention_mask": torch.ones(2, 1, 3, 3)}, 6),
        ((torch.ones(2, 8),), {}, None),
        ((), {"pixels": torch.ones(2)}, None),
    ],
)
def test_tokens_are_counted_without_padding_where_that_is_known(args, kwargs, count):
    assert count_tokens(args, kwargs) == count


def test_a_script_that_ends_before_leaves_what_there_is(start, recorder, spec):
    engine = start()
    losses = []
    for step in range(3):
        loss = engine(batch(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert not spec.record.exists()
    recorder.end()
    found = record_of(spec)
    assert (found["complete"], found["drained"], len(found["step_times_s"])) == (False, False, 2)
    assert found["losses"] == pytest.approx(losses)
    assert told(spec, "end")


def test_a_script_without_a_step_leaves_no_record(start, recorder, spec):
    start()
    recorder.end()
    assert not spec.record.exists()
    assert [event["trained"] for event in told(spec, "engine")] == [True]


def test_an_engine_without_an_optimizer_is_said_to_train_nothing(start, spec):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine = deepspeed.initialize(model=model, config={"train_batch_size": 1, "steps_per_print": 1000000})[0]
    engine.destroy()
    assert [event["trained"] for event in told(spec, "engine")] == [False]


def test_of_two_engines_the_one_that_gets_there_is_recorded(start, spec):
    first, second = start(), start()

    def train() -> None:
        for step in range(8):
            for engine in (first, second)[: 1 + step % 2]:
                engine.backward(engine(batch(step)))
                engine.step()

    pytest.raises(EndedError, train)
    found = record_of(spec)
    assert (found["num_trained_engines"], len(found["losses"]), found["complete"]) == (2, 4, True)
    assert [event["step"] for event in told(spec, "step")] == [1, 2, 3, 4]


def test_other_ranks_write_nothing(spec, monkeypatch):
    monkeypatch.setattr(compare_recorder, "_rank", lambda: 1)
    Recorder(spec).tell("deepspeed")
    assert not spec.events.exists()


def test_the_port_is_told_with_every_event(recorder, spec, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "4711")
    recorder.tell("engine")
    assert told(spec, "engine")[-1]["master_port"] == "4711"


def test_an_error_that_nobody_catches_is_told_in_its_own_words(recorder, spec, capsys):
    error = ValueError("no such batch")
    sys.excepthook(ValueError, error, None)
    assert [event["text"] for event in told(spec, "error")] == ["ValueError: no such batch"]
    assert "ValueError: no such batch" in capsys.readouterr().err
