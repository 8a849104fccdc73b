"""When a row is void: losses against the reference's, and which record is the reference."""

from __future__ import annotations

from typing import Any

import pytest

from comparisons.losses import NUM_COMPARED, RELATIVE_TOLERANCE, check, choose_reference, describe


def record(system: str, losses: list[float], **more: Any) -> dict[str, Any]:
    return {"system": system, "label": system, "status": "ok", "losses": losses, **more}


REFERENCE = record("zero3", [4.0] * (NUM_COMPARED + 5))


def test_equal_losses_agree_and_say_how_many():
    assert check(record("megatrain", REFERENCE["losses"]), REFERENCE) == ""
    assert describe(record("megatrain", [4.0] * 7), REFERENCE) == "7 agree"
    assert describe(REFERENCE, REFERENCE) == "the reference"


@pytest.mark.parametrize(("factor", "void"), [(0.9, False), (1.1, True)])
@pytest.mark.parametrize("position", [0, NUM_COMPARED - 1])
def test_the_tolerance_holds_for_each_of_the_compared(position, factor, void):
    losses = [4.0] * NUM_COMPARED
    losses[position] *= 1.0 + factor * RELATIVE_TOLERANCE
    problem = check(record("megatrain", losses), REFERENCE)
    assert problem.endswith("void") == void
    assert (problem == "") != void


def test_losses_beyond_the_compared_do_not_count():
    assert check(record("megatrain", [4.0] * NUM_COMPARED + [9.0]), REFERENCE) == ""


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_losses_that_are_not_finite_are_void(value):
    assert check(record("megatrain", [4.0, value]), REFERENCE) == "losses are not finite: void"


def test_bf16_masters_are_said_to_drift():
    problem = check(record("reference", [4.0, 4.1]), REFERENCE)
    assert "bf16 masters drift" in problem
    assert problem.endswith("void")
    assert "drift" not in check(record("fsdp2", [4.0, 4.1]), REFERENCE)


def test_a_system_without_optimizer_is_held_to_its_first_loss():
    assert check(record("resident", [4.0, 7.0]), REFERENCE) == "no optimizer: first loss agrees"
    assert check(record("resident", [4.1, 4.0]), REFERENCE) == "first loss differs: void"


def test_without_a_reference_it_says_so():
    assert check(record("megatrain", [4.0]), None) == "no reference ran: unchecked"


def test_plain_pytorch_is_the_reference_where_it_ran():
    plain = record("plain", [4.0])
    assert choose_reference([REFERENCE, plain]) is plain
    assert choose_reference([record("megatrain", [4.0]), REFERENCE]) is REFERENCE
    assert choose_reference([record("megatrain", [4.0]), {**plain, "status": "failed"}]) is None
