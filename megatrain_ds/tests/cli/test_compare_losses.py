"""When the losses of two runs agree: the limits from both sides, and what is no number or is missing."""

from __future__ import annotations

import math

import pytest

from megatrain_ds.cli.compare_losses import NUM_EQUAL_STEPS, compare_losses, tolerance_for

FALLING = [5.0 - 0.05 * step for step in range(60)]


def record(precision: str, loss_dtype: str | None) -> dict:
    return {"precision": precision, "loss_dtype": loss_dtype}


def shifted(step: int, relative: float) -> list[float]:
    """FALLING with one loss (step counts from 1) moved by a relative distance."""
    return [loss * (1 + relative * (index == step)) for index, loss in enumerate(FALLING, 1)]


def test_equal_losses_agree():
    found = compare_losses(FALLING, FALLING, 1e-5)
    assert (found.agree, found.max_abs_diff, found.num_compared) == (True, 0.0, 60)
    assert found.verdict.startswith("agree: ")


@pytest.mark.parametrize("step", [1, 20, 60])
def test_the_limit_holds_from_both_sides_and_grows_after_twenty_steps(step):
    allowed = 1e-4 * max(1, step / NUM_EQUAL_STEPS)
    assert compare_losses(shifted(step, 0.99 * allowed), FALLING, 1e-4).agree is True
    found = compare_losses(shifted(step, -1.01 * allowed), FALLING, 1e-4)
    assert (found.agree, found.worst_step) == (False, step)
    assert f"DIFFER: at step {step} they lie {1.01 * allowed:.1e} apart, relative, and {allowed:.1e}" in found.verdict
    assert "Run the command twice without the flag to tell." in found.verdict


def test_the_worst_step_is_the_one_furthest_over_its_own_limit():
    ours = shifted(60, 2.5e-4)
    ours[0] *= 1 + 2e-4
    found = compare_losses(ours, FALLING, 1e-4)
    assert (found.worst_step, found.max_rel_diff) == (1, pytest.approx(2.5e-4))


@pytest.mark.parametrize("ours", [[math.nan, 4.0], [4.0, math.nan], [math.inf, 4.0]])
def test_what_is_no_number_never_agrees(ours):
    assert compare_losses(ours, [4.0, 4.0], 1e-3).agree is False
    assert compare_losses([4.0, 4.0], ours, 1e-3).agree is False
    assert compare_losses(ours, ours, 1e-3).agree is False


def test_a_loss_near_nought_is_measured_against_the_largest():
    assert compare_losses([1.0, 1e-9], [1.0, 0.0], 1e-4).agree is True
    assert compare_losses([1.0, 1e-5], [1.0, 0.0], 1e-4).agree is False


@pytest.mark.parametrize(("ours", "theirs"), [([1.0, None], [1.0, 1.0]), ([1.0], [None]), ([], [1.0])])
def test_a_missing_loss_is_said_and_never_agreement(ours, theirs):
    found = compare_losses(ours, theirs, 1e-3)
    assert found.agree is None
    assert found.verdict.startswith("unknown: ")


def test_only_common_steps_are_compared():
    assert compare_losses([1.0, 2.0], [1.0, 2.0, 9.0], 1e-3).num_compared == 2


def test_the_tolerance_follows_the_coarser_run_and_the_type_of_the_losses():
    assert tolerance_for([record("fp32", "float32")] * 2) == 2.0**-15
    assert tolerance_for([record("fp32", "float32"), record("bf16", "float32")]) == 2.0**-11
    assert tolerance_for([record("bf16", "bfloat16")] * 2) == 2.0**-6
    assert tolerance_for([record("fp16", None)] * 2) == 2.0**-11
