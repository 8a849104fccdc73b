"""On CUDA: the overlapped engine gives the bits of the synchronous one, and ZeRO-3's losses."""

from __future__ import annotations

import gc

import pytest
import torch

from integration_tests.gpu.tools import Run, batches, engine_of, same_bits, small_model, train

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("precision", "accumulation", "clip"),
    [("fp32", 1, 1.0), ("bf16", 1, 1.0), ("bf16", 3, 1.0), ("bf16", 1, 0.0), ("fp16", 1, 1.0), ("fp16", 3, 0.0)],
)
def test_overlapped_equals_synchronous_after_50_steps(precision: str, accumulation: int, clip: float) -> None:
    settings = {"steps": 50, "accumulation": accumulation, "clip": clip}
    overlapped = train(precision, block={}, **settings)
    assert overlapped.engine_class == "MegaTrainEngine"
    assert same_bits(overlapped, train(precision, block={"synchronous": True}, **settings))
    assert same_bits(overlapped, train(precision, block={"activations": "keep"}, **settings))
    if clip == 0.0 and precision != "fp16":
        assert same_bits(overlapped, train(precision, block={"finite_check": False}, **settings))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_losses_agree_with_zero3_within_twice_its_own_floor(precision: str) -> None:
    ours = train(precision, steps=50, block={})
    stock = train(precision, steps=50, block=None)
    assert stock.engine_class == "DeepSpeedEngine"
    # The floor: ZeRO-3 against itself with attention computed in another, equivalent order.
    reordered = train(precision, steps=50, block=None, attention="eager")
    floor = largest_difference(stock, reordered)
    assert floor > 0.0
    assert largest_difference(ours, stock) <= 2 * floor


def largest_difference(a: Run, b: Run) -> float:
    return max(abs(x - y) for x, y in zip(a.losses, b.losses, strict=True))


@pytest.mark.parametrize("flow", ["h2d", "d2h"])
def test_a_slow_flow_changes_no_bit(flow: str) -> None:
    expected = train("bf16", steps=12, block={})
    engine = engine_of(small_model(), "bf16", block={})
    engine.runtime.streams.delays_s[flow] = 0.005
    losses = []
    for tokens in batches(12):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    assert [float(loss) for loss in losses] == expected.losses
    weights = engine._zero3_consolidated_16bit_state_dict()
    assert all(torch.equal(weights[name], expected.weights[name]) for name in weights)
    engine.destroy()
    gc.collect()


def test_runs_on_a_side_stream() -> None:
    expected = train("bf16", steps=12, block={})
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        on_side = train("bf16", steps=12, block={})
    assert same_bits(on_side, expected)
