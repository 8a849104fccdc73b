"""Blocks of unusual form, and weights that are used outside their block."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from integration_tests.cases.engines import (
    assert_plain_gradients,
    assert_same_bits,
    gradients,
    initialize,
    plain_gradients,
    state,
    train,
)
from integration_tests.cases.models import (
    KEEP_OR_RECOMPUTE,
    WIDTH,
    Block,
    Stack,
    WithAuxiliary,
    ids_of,
    token_batches,
    with_loss,
)


@KEEP_OR_RECOMPUTE
def test_block_returns_a_view_of_its_weight(start, device, activations) -> None:
    class Leaks(Block):
        def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return super().forward(hidden), self.up.weight[:WIDTH]

    class Model(Stack):
        def __init__(self) -> None:
            super().__init__(*[Leaks() for _ in range(4)])

        def middle(self, hidden: torch.Tensor) -> torch.Tensor:
            weights = []
            for block in self.blocks:
                hidden, weight = block(hidden)
                weights.append(weight)
            return hidden @ (sum(weights) / 4)

    assert_plain_gradients(start, Model(), with_loss(device), device=device, block={"activations": activations})


@KEEP_OR_RECOMPUTE
def test_weight_of_a_block_used_outside_it(start, device, activations) -> None:
    """An orthogonality loss, or a head that borrows a block's matrix, reads streamed weights outside any forward."""

    class Model(Stack):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            weight = self.blocks[1].up.weight
            return super().forward(ids) + (weight.T @ weight).pow(2).mean()

    assert_plain_gradients(start, Model(), with_loss(device), device=device, block={"activations": activations})


@KEEP_OR_RECOMPUTE
def test_submodule_of_a_block_called_from_outside(start, device, activations) -> None:
    class Model(Stack):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) + self.blocks[2].up(self.embed(ids)).pow(2).mean()

    assert_plain_gradients(start, Model(), with_loss(device), device=device, block={"activations": activations})


@KEEP_OR_RECOMPUTE
def test_zero_size_parameter(start, device, activations) -> None:
    blocks = [Block() for _ in range(3)]
    for block in blocks:
        block.empty = nn.Parameter(torch.empty(0, WIDTH))
    model = Stack(*blocks)
    model.also_empty = nn.Parameter(torch.empty(0))
    ids = ids_of(device)
    engine = start(model, block={"activations": activations})
    train(engine, [ids, ids], lambda engine, batch: engine(batch))
    assert engine.module.blocks[0].empty.shape == (0, WIDTH)
    assert engine.global_steps == 2
    assert engine.module.state_dict()["blocks.1.empty"].shape == (0, WIDTH)


@KEEP_OR_RECOMPUTE
def test_mixed_dtypes_in_one_block(start, device, activations) -> None:
    class Mixed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.up.to(torch.bfloat16)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            inner = self.up(self.norm(hidden).to(torch.bfloat16)).float()
            return hidden + self.down(F.gelu(inner))

    model = Stack(*[Mixed() for _ in range(3)])
    engine = assert_plain_gradients(start, model, with_loss(device), device=device, block={"activations": activations})
    assert engine.module.blocks[0].up.weight.dtype is torch.bfloat16
    assert engine.module.blocks[0].down.weight.dtype is torch.float32


def test_plain_sequential_of_blocks(start, device) -> None:
    model = nn.Sequential(nn.Embedding(40, WIDTH), nn.Sequential(*[Block() for _ in range(4)]), nn.Linear(WIDTH, 40))
    ids = ids_of(device)

    def run(which):
        return F.cross_entropy(which(ids).flatten(0, 1), ids.flatten())

    engine = assert_plain_gradients(start, model, run, device=device)
    streamed = [unit.name for unit in engine.runtime.units if not unit.is_root]
    assert streamed


def test_model_without_repeated_blocks_warns_and_works(start, device) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(hidden).tanh()).pow(2).mean()

    hidden = torch.randn(4, WIDTH).to(device)
    with pytest.warns(UserWarning, match="no repeated blocks"):
        engine = assert_plain_gradients(start, Model(), lambda model: model(hidden), device=device)
    train(engine, [hidden] * 3, lambda engine, batch: engine(batch))
    assert engine.global_steps == 3


@pytest.mark.parametrize(
    "block",
    [
        {"weight_slots": 2, "gradient_slots": 1},
        {"weight_slots": 3, "gradient_slots": 2},
        {"weight_slots": 5, "gradient_slots": 1},
        {"weight_slots": 5, "gradient_slots": 3, "activations": "keep"},
        {"activations": "keep"},
    ],
    ids=str,
)
def test_slots_and_activations_do_not_change_bits(device, block) -> None:
    results = []
    for settings in ({}, block):
        torch.manual_seed(3)
        engine = initialize(Stack(*[Block() for _ in range(6)]), block=settings, gradient_clipping=0.1)
        train(engine, token_batches(device, 5), lambda engine, batch: engine(batch))
        results.append(state(engine))
        engine.destroy()
    assert_same_bits(results[1], results[0])


@KEEP_OR_RECOMPUTE
def test_eval_mode_with_grad(start, device, activations) -> None:
    """`model.eval()` turns dropout off, not gradients."""
    model = Stack()
    model.blocks[1].up = nn.Sequential(nn.Dropout(0.5), model.blocks[1].up)
    twin = copy.deepcopy(model).to(device)
    engine = start(model, block={"activations": activations})
    engine.eval()
    twin.eval()
    ids = ids_of(device)
    twin(ids).backward()
    engine.backward(engine(ids))
    assert_same_bits(gradients(engine), plain_gradients(twin))


@KEEP_OR_RECOMPUTE
def test_inference_mode_between_steps(device, activations) -> None:
    """Evaluation under inference_mode leaves no trace in training."""
    results = []
    for evaluates in (False, True):
        torch.manual_seed(3)
        engine = initialize(Stack(), block={"activations": activations})
        for ids in token_batches(device, 4):
            if evaluates:
                with torch.inference_mode():
                    engine.module(ids)
                    engine(ids)
            loss = engine(ids)
            if evaluates:
                with torch.inference_mode():
                    engine.module(ids)
            engine.backward(loss)
            engine.step()
        results.append(state(engine))
        engine.destroy()
    assert_same_bits(results[1], results[0])


@KEEP_OR_RECOMPUTE
def test_input_that_requires_grad(start, device, activations) -> None:
    """The gradient of the model's own input is plain autograd's (adversarial training, soft prompts)."""

    class Model(Stack):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(self.middle(hidden))).pow(2).mean()

    model = Model()
    twin = copy.deepcopy(model).to(device)
    engine = start(model, block={"activations": activations})
    hidden = torch.randn(2, 6, WIDTH)
    inputs = [hidden.to(device).requires_grad_() for _ in range(2)]
    twin(inputs[0]).backward()
    engine.backward(engine(inputs[1]))
    assert torch.equal(inputs[0].grad, inputs[1].grad)


@KEEP_OR_RECOMPUTE
def test_gradient_of_a_part_by_autograd_grad(start, device, activations) -> None:
    """`torch.autograd.grad` for an input alone (a gradient penalty's first half) works and spares the parameters."""
    model = Stack()
    twin = copy.deepcopy(model).to(device)
    engine = start(model, block={"activations": activations})
    results = []
    for which in (twin, engine.module):
        hidden = torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
        (grad,) = torch.autograd.grad(which.middle(hidden).pow(2).mean(), hidden)
        results.append(grad)
    assert torch.equal(*results)
    ids = ids_of(device)
    twin(ids).backward()
    engine.backward(engine(ids))
    assert_same_bits(gradients(engine), plain_gradients(twin))


@KEEP_OR_RECOMPUTE
def test_hook_that_writes_in_place_and_returns_nothing(start, device, activations) -> None:
    def scale(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        output.mul_(0.5)

    model = Stack()
    for block in model.blocks:
        block.up.register_forward_hook(scale)
    assert_plain_gradients(start, model, with_loss(device), device=device, block={"activations": activations})


@KEEP_OR_RECOMPUTE
def test_counters_and_lists_on_a_module(start, device, activations) -> None:
    """A Python counter decides what a forward does, and a list on the module grows: both once a forward."""

    class Counts(Block):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.trail = 0, []

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.trail.append(self.calls)
            return super().forward(hidden * (2.0 if self.calls % 2 else 0.5))

    model = Stack(*[Counts() for _ in range(3)])
    engine = assert_plain_gradients(
        start, model, with_loss(device), device=device, rounds=3, block={"activations": activations}
    )
    assert [block.calls for block in engine.module.blocks] == [3, 3, 3]
    assert engine.module.blocks[0].trail == [1, 2, 3]


def test_mode_changed_between_forward_and_backward(start, device) -> None:
    """Dropout of the forward counts in the recompute although `eval()` came in between."""
    model = Stack()
    for block in model.blocks:
        block.up = nn.Sequential(nn.Dropout(0.5), block.up)
    twin = copy.deepcopy(model).to(device)
    engine = start(model)
    ids = ids_of(device)
    for which, backward in ((twin, torch.Tensor.backward), (engine, engine.backward)):
        which.train()
        torch.manual_seed(5)
        loss = which(ids)
        which.eval()
        backward(loss)
    assert not any(module.training for module in engine.module.modules())
    assert_same_bits(gradients(engine), plain_gradients(twin))


def test_reentrant_pass_inside_a_pass_whose_units_are_bound(start, device) -> None:
    """A unit stays bound while a reentrant checkpoint behind it runs a whole backward of its own."""

    class Model(Stack):
        def __init__(self) -> None:
            super().__init__(*[WithAuxiliary() for _ in range(6)])

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            hidden = self.embed(ids)
            hidden = self.blocks[0](hidden)
            inner = checkpoint(self.tail, self.blocks[0].auxiliary * hidden, use_reentrant=True)
            return self.head(self.norm(inner)).pow(2).mean()

        def tail(self, hidden: torch.Tensor) -> torch.Tensor:
            for block in self.blocks[1:]:
                hidden = block(hidden)
            return hidden

    assert_plain_gradients(start, Model(), with_loss(device), device=device)


def test_late_gradient_of_a_weight_used_outside_is_refused(start, device) -> None:
    """With updates in backward, a gradient that comes after its unit's update is an error, never a second step."""

    class Model(Stack):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            weight = self.blocks[3].up.weight
            return self.head(self.norm(self.middle(self.embed(ids) * (weight.T @ weight).mean()))).pow(2).mean()

    engine = start(Model(), block={"finite_check": False})
    engine.backward(engine(ids_of(device)))
    with pytest.raises(RuntimeError, match=r"blocks\.3.*finite_check"):
        engine.step()
