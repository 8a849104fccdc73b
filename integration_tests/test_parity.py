"""With the flag, a program trains as it does on stock ZeRO-3 offload, within a floor measured in the same test run.

The floor is stock ZeRO-3 against itself with another attention implementation and with the rows of each batch reversed:
the same mathematics, other orders of additions. Every route runs in fp32 and bf16 (fp16 on a GPU), with
one and four micro-batches in a step, and with clipping on and off; nothing is tolerated beyond twice the floor.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from integration_tests.harness import Program
from megatrain_ds.cli.curves import worst_excess

STEPS = 50
ACCUMULATIONS = ("1", "4")
CLIPS = ("0.0", "1.0")
COMBINATIONS = tuple(itertools.product(ACCUMULATIONS, CLIPS))
# One combination per route and precision runs by default; together the two routes cover every pair of settings.
QUICK = {
    ("trainer", "fp32"): ("4", "0.0"),
    ("trainer", "bf16"): ("1", "1.0"),
    ("trainer", "fp16"): ("4", "1.0"),
    ("accelerate", "fp32"): ("1", "1.0"),
    ("accelerate", "bf16"): ("4", "0.0"),
    ("accelerate", "fp16"): ("4", "1.0"),
}
RunOnce = Callable[[Program], list[dict]]

pytestmark = pytest.mark.timeout(900)


def precision_params() -> list:
    """fp32 and bf16 anywhere; fp16 where there is a CUDA device."""
    no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="fp16 needs a CUDA device")
    return [pytest.param("fp32"), pytest.param("bf16"), pytest.param("fp16", marks=[pytest.mark.gpu, no_gpu])]


def route_params() -> list:
    """Every combination of the one-run routes; those outside QUICK are slow."""
    params = []
    for route, precision in itertools.product(("trainer", "accelerate"), precision_params()):
        name = precision.values[0]
        for combination in COMBINATIONS:
            marks = [*precision.marks, *([] if QUICK[route, name] == combination else [pytest.mark.slow])]
            params.append(pytest.param(route, name, *combination, marks=marks))
    return params


def assert_same_training(flag: dict, stock: dict, reordered: list[dict]) -> None:
    """The flag's run has stock's learning rates, and its losses and norms within the floor."""
    assert len(flag["losses"]) == STEPS
    assert flag["learning_rates"] == stock["learning_rates"]
    curves = ["losses"]
    if stock["clip"] and None not in (*stock["grad_norms"], *flag["grad_norms"]):
        curves.append("grad_norms")
    for curve in curves:
        excess = worst_excess(flag[curve], stock[curve], [draw[curve] for draw in reordered])
        assert excess.ratio <= 1.0, (
            f"{curve} differ by {excess.difference:.3g} at step {excess.step}, the measured floor allows "
            f"{excess.allowed:.3g}"
        )


def pick(records: list[dict], **labels: object) -> dict:
    """The one record that carries all of `labels`."""
    (record,) = [r for r in records if all(r[key] == value for key, value in labels.items())]
    return record


def stock_and_floor(run_once: RunOnce, route: str, options: tuple[str, ...]) -> tuple[dict, list[dict]]:
    """One combination on stock ZeRO-3, and its two other, equivalent orders of additions."""
    orders = (("sdpa",), ("eager",), ("sdpa", "--reverse-rows"))
    runs = [run_once(Program(route, False, (*options, "--attention", *order))) for order in orders]
    (stock,), *reordered = runs
    return stock, [draw for (draw,) in reordered]


def raw_sweep(run_once: RunOnce, precision: str, flag: bool, *extra: str) -> list[dict]:
    """All combinations of one precision in one process; stock in its plain order also with the other attention."""
    attentions = ("sdpa",) if flag or extra else ("sdpa", "eager")
    options = ("--steps", str(STEPS), "--precision", precision, "--grad-accum", *ACCUMULATIONS, "--clip", *CLIPS)
    return run_once(Program("raw", flag, (*options, "--attention", *attentions, *extra)))


def raw_stock_and_floor(run_once: RunOnce, precision: str, **labels: object) -> tuple[dict, list[dict]]:
    """The same out of two sweeps of the raw route."""
    plain, reverse = (raw_sweep(run_once, precision, False, *extra) for extra in ((), ("--reverse-rows",)))
    stock, eager = (pick(plain, attention=attention, **labels) for attention in ("sdpa", "eager"))
    return stock, [eager, pick(reverse, **labels)]


@pytest.mark.parametrize(("grad_accum", "clip"), COMBINATIONS)
@pytest.mark.parametrize("precision", precision_params())
def test_raw_loop(run_once: RunOnce, precision: str, grad_accum: str, clip: str) -> None:
    labels = {"grad_accum": int(grad_accum), "clip": float(clip)}
    stock, reordered = raw_stock_and_floor(run_once, precision, **labels)
    assert_same_training(pick(raw_sweep(run_once, precision, True), **labels), stock, reordered)


@pytest.mark.parametrize("precision", precision_params())
def test_floor_tells_wrong_training_from_right(run_once: RunOnce, precision: str) -> None:
    """Forgotten clipping, the subtlest of the settings above, must lie far outside the floor."""
    clipped, reordered = raw_stock_and_floor(run_once, precision, grad_accum=1, clip=1.0)
    unclipped = pick(raw_sweep(run_once, precision, False), attention="sdpa", grad_accum=1, clip=0.0)
    draws = [draw["losses"] for draw in reordered]
    assert worst_excess(unclipped["losses"], clipped["losses"], draws).ratio > 3.0


@pytest.mark.parametrize(("route", "precision", "grad_accum", "clip"), route_params())
def test_one_run_routes(run_once: RunOnce, route: str, precision: str, grad_accum: str, clip: str) -> None:
    options = ("--steps", str(STEPS), "--precision", precision, "--grad-accum", grad_accum, "--clip", clip)
    stock, reordered = stock_and_floor(run_once, route, options)
    (flag,) = run_once(Program(route, True, (*options, "--attention", "sdpa")))
    assert_same_training(flag, stock, reordered)


def test_deepspeed_launcher(run_once: RunOnce) -> None:
    """The `deepspeed` launcher starts the same program; it must give exactly what a direct start gives."""
    options = ("--steps", "10", "--precision", "bf16", "--clip", "1.0")
    (launched,) = run_once(Program("launcher", True, options))
    (direct,) = run_once(Program("raw", True, options))
    assert launched["losses"] == direct["losses"]


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2", "qwen2"])
@pytest.mark.parametrize("precision", precision_params())
def test_tied_heads(run_once: RunOnce, precision: str, model: str) -> None:
    """A head that shares the embedding's weight, with biases (Qwen2) and with fused projections (GPT-2)."""
    options = ("--model", model, "--steps", str(STEPS), "--precision", precision)
    stock, reordered = stock_and_floor(run_once, "raw", options)
    (flag,) = run_once(Program("raw", True, (*options, "--attention", "sdpa")))
    assert_same_training(flag, stock, reordered)
