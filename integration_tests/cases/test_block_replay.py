"""What a forward does happens once, though it is recomputed; several backward passes add up."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from integration_tests.cases.engines import (
    assert_plain_gradients,
    assert_same_bits,
    gradients,
    plain_gradients,
)
from integration_tests.cases.models import KEEP_OR_RECOMPUTE, WIDTH, Block, Stack, ids_of, token_batches, with_loss


@KEEP_OR_RECOMPUTE
def test_running_statistics_change_once(start, device, activations) -> None:
    class Normed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.batch_norm = nn.BatchNorm1d(WIDTH)
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(self.batch_norm(hidden.flatten(0, 1)).view_as(hidden))

    model = Stack(*[Normed() for _ in range(3)])
    twin = copy.deepcopy(model).to(device)
    engine = start(model, block={"activations": activations})
    for ids in token_batches(device, 3):
        twin.zero_grad()
        twin(ids).backward()
        engine.backward(engine(ids))
        assert_same_bits(gradients(engine), plain_gradients(twin))
        assert_same_bits(dict(engine.module.named_buffers()), dict(twin.named_buffers()))
        engine.reset_iteration()
    assert int(engine.module.blocks[0].calls) == 3


@KEEP_OR_RECOMPUTE
def test_spectral_norm_buffers(start, device, activations) -> None:
    """A parametrization changes its buffers in forward, under no_grad, and the weight depends on them."""
    blocks = [Block() for _ in range(3)]
    for block in blocks:
        nn.utils.spectral_norm(block.up)
    model = Stack(*blocks)
    twin = copy.deepcopy(model).to(device)
    engine = start(model, block={"activations": activations})
    for ids in token_batches(device, 3):
        twin.zero_grad()
        twin(ids).backward()
        engine.backward(engine(ids))
        assert_same_bits(gradients(engine), plain_gradients(twin))
        engine.reset_iteration()


@KEEP_OR_RECOMPUTE
def test_retain_graph_and_two_backwards(start, device, activations) -> None:
    model = Stack()
    twin = copy.deepcopy(model).to(device)
    engine = start(model, gradient_accumulation_steps=2, block={"activations": activations})
    ids = ids_of(device)
    loss = twin(ids)
    loss.backward(retain_graph=True)
    (loss * 3).backward()
    loss = engine(ids)
    engine.backward(loss, retain_graph=True, scale_wrt_gas=False)
    engine.backward(loss * 3, scale_wrt_gas=False)
    assert_same_bits(gradients(engine), plain_gradients(twin))


@KEEP_OR_RECOMPUTE
def test_two_losses_of_one_forward_without_planned_accumulation(start, device, activations) -> None:
    model = Stack()
    twin = copy.deepcopy(model).to(device)
    engine = start(model, block={"activations": activations})
    ids = ids_of(device)
    loss = twin(ids)
    loss.backward(retain_graph=True)
    (loss * 3).backward()
    loss = engine(ids)
    engine.backward(loss, retain_graph=True)
    with pytest.warns(RuntimeWarning, match="gradient_accumulation_steps"):
        engine.backward(loss * 3)
    assert_same_bits(gradients(engine), plain_gradients(twin))


@KEEP_OR_RECOMPUTE
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("around", ["inside", "outside"])
def test_user_checkpoint(start, device, activations, use_reentrant, around) -> None:
    class Inside(Block):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, hidden, use_reentrant=use_reentrant)

    class Outside(Stack):
        def middle(self, hidden: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                hidden = checkpoint(block, hidden, use_reentrant=use_reentrant)
            return hidden

    model = Outside() if around == "outside" else Stack(*[Inside() for _ in range(4)])
    assert_plain_gradients(start, model, with_loss(device), device=device, block={"activations": activations})


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_user_checkpoint_around_two_blocks(start, device, use_reentrant) -> None:
    class Model(Stack):
        def middle(self, hidden: torch.Tensor) -> torch.Tensor:
            for first in (0, 2):
                hidden = checkpoint(self.pair, first, hidden, use_reentrant=use_reentrant)
            return hidden

        def pair(self, first: int, hidden: torch.Tensor) -> torch.Tensor:
            return self.blocks[first + 1](self.blocks[first](hidden))

    assert_plain_gradients(start, Model(), with_loss(device), device=device)


@KEEP_OR_RECOMPUTE
def test_parameter_hooks(start, device, activations) -> None:
    """`register_hook` on a parameter sees and may replace its gradient, streamed or not."""
    model = Stack()
    twin = copy.deepcopy(model).to(device)
    seen: dict[str, list[torch.Tensor]] = {"engine": [], "twin": []}
    for name, which in (("twin", twin), ("engine", model)):
        for param in (which.blocks[1].up.weight, which.head.weight):
            param.register_hook(lambda grad, name=name: (seen[name].append(grad.clone()), grad * 2)[1])
    engine = start(model, block={"activations": activations})
    ids = ids_of(device)
    twin(ids).backward()
    engine.backward(engine(ids))
    assert_same_bits(gradients(engine), plain_gradients(twin))
    assert len(seen["engine"]) == len(seen["twin"]) == 2
    assert all(torch.equal(a, b) for a, b in zip(seen["engine"], seen["twin"], strict=True))


def test_parameter_hooks_registered_after_the_engine(start, device) -> None:
    model = Stack()
    twin = copy.deepcopy(model).to(device)
    engine = start(model)
    for which in (twin, model):
        which.blocks[2].down.weight.register_hook(lambda grad: grad * 3)
        which.head.weight.register_hook(lambda grad: grad * 5)
    ids = ids_of(device)
    twin(ids).backward()
    engine.backward(engine(ids))
    assert_same_bits(gradients(engine), plain_gradients(twin))


class WritesItsInput(Block):
    """Changes what it is given before it uses it."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden += 0.5
        return super().forward(hidden)


@KEEP_OR_RECOMPUTE
def test_block_that_writes_its_input_in_place(start, device, activations) -> None:
    model = Stack(*[WritesItsInput() for _ in range(4)])
    assert_plain_gradients(start, model, with_loss(device), device=device, block={"activations": activations})
