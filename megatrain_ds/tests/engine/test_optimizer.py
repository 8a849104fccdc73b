"""The step: its order, what it skips, and what reaches the caller."""

from __future__ import annotations

import time
import warnings

import pytest
import torch

from megatrain_ds.errors import StateError
from megatrain_ds.tests.engine.models import batch, differing, make_model, state, train


def record_updates(engine) -> list[str]:
    """The names of units in the order in which their updates are queued from now on."""
    names = [unit.name.removeprefix("root: ") for unit in engine.runtime.units]
    queued: list[str] = []
    pipeline = engine.runtime.pipeline
    original = pipeline.update

    def update(unit, hyper, arrived, **deferral):
        if any(engine.runtime.store.units[unit].received):
            queued.append(names[unit])
        original(unit, hyper, arrived, **deferral)

    pipeline.update = update
    return queued


def test_updates_go_in_the_order_of_the_next_forward_over_three_steps(start):
    engine = start()
    queued = record_updates(engine)
    order = (2, 0, 1)
    train(engine, range(3), order=order)
    # The embedding is needed before any block, and the head shares its unit.
    assert queued == ["embed.weight...", "layers.2", "layers.0", "layers.1"] * 3


def test_a_root_unit_used_last_is_updated_last(start):
    model = make_model()
    model.embed.weight.requires_grad_(False)
    engine = start(model)
    runtime = engine.runtime
    (root,) = [unit.index for unit in runtime.units if unit.is_root]
    runtime.roots._first_use[root] = 3
    assert runtime.update_order() == [0, 1, 2, root]
    train(engine, range(1))
    runtime.roots._first_use[root] = 1
    assert runtime.update_order() == [0, root, 1, 2]


def test_without_clipping_and_check_updates_start_newest_first_in_backward(start):
    engine = start(block={"finite_check": False})
    queued = record_updates(engine)
    for step in range(3):
        engine.backward(engine(batch(step)))
        # The blocks while backward runs; the root unit when it is over, in step().
        assert queued == ["layers.2", "layers.1", "layers.0"]
        engine.step()
        assert queued == ["layers.2", "layers.1", "layers.0", "embed.weight..."]
        queued.clear()


def test_early_and_late_updates_give_the_same_bits(start):
    early, late = start(block={"finite_check": False}), start()
    train(early, range(4))
    train(late, range(4))
    assert differing(state(early), state(late)) == []


def test_hyperparameters_changed_after_early_updates_began_are_told(start):
    engine = start(block={"finite_check": False})
    engine.backward(engine(batch(0)))
    engine.optimizer.param_groups[0]["lr"] = 0.5
    with pytest.warns(RuntimeWarning, match="changed between backward.. and step.*earlier values"):
        engine.step()


def test_a_gradient_that_is_not_finite_leaves_every_byte(start):
    engine = start(bf16=True)
    train(engine, range(2))
    before = state(engine)
    queued = record_updates(engine)
    engine.backward(engine(batch(2)) * float("inf"))
    engine.step()
    assert engine.optimizer.overflow
    assert engine.skipped_steps == 1
    assert differing(state(engine), before) == []
    assert queued == []
    assert [entry.step for entry in engine.optimizer.parameters[0]] == [2] * 8
    train(engine, range(2, 3))
    assert not engine.optimizer.overflow
    assert len(differing(state(engine), before)) > 0


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_norm_and_clipping_follow_the_plain_formula(start, clip):
    twin = make_model()
    engine = start(make_model(), gradient_clipping=clip)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        twin(batch(step)).backward()
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), clip or float("inf"))
        optimizer.step()
        train(engine, range(step, step + 1))
        assert float(engine.get_global_grad_norm()) == pytest.approx(norm.item(), rel=1e-4)
    for name, param in twin.named_parameters():
        torch.testing.assert_close(engine.module.get_parameter(name).detach(), param.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("finite_check", [True, False])
def test_a_skipped_block_is_not_stepped_and_keeps_its_count(start, finite_check):
    engine = start(block={"finite_check": finite_check})
    train(engine, range(2))
    before = state(engine)
    train(engine, range(2, 3), order=(0, 2))
    changed = differing(state(engine), before)
    assert not [name for name in changed if name.startswith("layers.1.")]
    assert {name.split(".")[1] for name in changed if name.startswith("layers.")} == {"0", "2"}
    assert [entry.step for entry in engine.optimizer.parameters[0]] == [3, 3, 3, 2, 2, 3, 3, 3]


def test_a_second_backward_before_the_step_is_added(start):
    engine, twin = start(make_model()), make_model()
    engine.backward(engine(batch(0)))
    loss = engine(batch(1))
    with pytest.warns(RuntimeWarning, match="a second gradient of .* arrived before step"):
        engine.backward(loss)
    engine.step()
    for step in range(2):
        twin(batch(step)).backward()
    expected = torch.stack([param.grad.norm() for param in twin.parameters()]).norm()
    assert float(engine.get_global_grad_norm()) == pytest.approx(expected.item(), rel=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for step in range(2, 4):
            engine.backward(engine(batch(step)))
        engine.step()


def test_a_second_backward_after_early_updates_is_refused(start):
    engine = start(block={"finite_check": False})
    engine.backward(engine(batch(0)))
    loss = engine(batch(1))
    with pytest.raises(StateError, match='gradient of layers.2: .*state is update begun.*set "finite_check": true'):
        engine.backward(loss)


def test_zero_grad_keeps_what_backward_gave(start):
    engine, other = start(make_model()), start(make_model())
    for one, clear in ((engine, True), (other, False)):
        one.backward(one(batch(0)))
        if clear:
            one.zero_grad()
        one.step()
    assert differing(state(engine), state(other)) == []


def test_reset_iteration_drops_the_gradients_and_says_so(start):
    engine = start()
    before = state(engine)
    engine.backward(engine(batch(0)))
    assert engine.optimizer.holds_gradients
    with pytest.warns(
        RuntimeWarning, match=r"reset_iteration\(\) was called; the gradients .* are dropped. Run the whole"
    ):
        engine.reset_iteration()
    assert not engine.optimizer.holds_gradients
    engine.step()
    assert differing(state(engine), before) == []


def test_the_learning_rate_is_read_at_every_step(start):
    engine = start()
    before = state(engine)
    engine.optimizer.param_groups[0]["lr"] = 0.0
    train(engine, range(1))
    changed = differing(state(engine), before)
    assert not [name for name in changed if name.endswith((":master", "weight"))]
    engine.optimizer.param_groups[0]["lr"] = 0.1
    train(engine, range(1, 2))
    assert len([name for name in differing(state(engine), before) if name.endswith(":master")]) == 8


def test_a_failing_update_reaches_the_next_calls_within_seconds_with_the_units_name(start):
    engine = start()
    train(engine, range(1))
    engine.runtime.pipeline.wait_all()

    def fail(**_):
        raise ArithmeticError("broken update")

    engine.runtime.pipeline.kernel.update = fail
    start_s = time.perf_counter()
    engine.backward(engine(batch(1)))
    engine.step()
    with pytest.raises(ArithmeticError, match="broken update") as caught:
        engine(batch(2))
    notes = getattr(caught.value, "__notes__", ["the optimizer step of root: embed.weight..."])
    assert any("the optimizer step of root: embed.weight..." in note for note in notes)
    for call in (lambda: engine(batch(2)), engine.module.state_dict, lambda: engine.optimizer.state):
        with pytest.raises(ArithmeticError, match="broken update"):
            call()
    engine.destroy()
    assert time.perf_counter() - start_s < 5.0


def test_a_closure_and_a_destroyed_engine_are_refused(start):
    engine = start()
    with pytest.raises(ValueError, match="closure given to step"):
        engine.optimizer.step(lambda: None)
    optimizer = engine.optimizer
    engine.destroy()
    with pytest.raises(StateError, match="allowed from a live engine, but the state is destroyed"):
        optimizer.step()
