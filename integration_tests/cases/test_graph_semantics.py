"""Whatever escapes a block carries the gradient of plain PyTorch, in whatever order blocks run."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import nn
from torch.nn import functional as F

from integration_tests.cases.engines import (
    LR,
    Reference,
    assert_plain_gradients,
    assert_same_bits,
    assert_within,
    masters,
    state,
)
from integration_tests.cases.models import (
    KEEP_OR_RECOMPUTE,
    WIDTH,
    Block,
    Stack,
    WithAuxiliary,
    token_batches,
    with_loss,
)


@KEEP_OR_RECOMPUTE
def test_tensor_captured_by_a_hook(start, device, activations) -> None:
    class Captures(Stack):
        def __init__(self) -> None:
            super().__init__()
            for block in self.blocks:
                block.up.register_forward_hook(self.capture)

        def capture(self, _module: nn.Module, _args: Any, output: torch.Tensor) -> None:
            self.captured.append(output)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            self.captured: list[torch.Tensor] = []
            loss = super().forward(ids)
            assert len(self.captured) == 4
            return loss + sum(t.pow(2).mean() * (i + 1) for i, t in enumerate(self.captured))

    class Plain(Captures):
        def __deepcopy__(self, memo: dict) -> Captures:
            twin = Captures()
            twin.load_state_dict(self.state_dict())
            return twin

    engine = assert_plain_gradients(
        start, Plain(), with_loss(device), device=device, block={"activations": activations}
    )
    # Recomputing in backward called no hook again.
    assert len(engine.module.captured) == 4


@KEEP_OR_RECOMPUTE
def test_hook_that_replaces_an_output(start, device, activations) -> None:
    model = Stack()
    model.blocks[1].up.register_forward_hook(lambda _m, _a, output: output * 0.5)
    model.blocks[2].down.register_forward_pre_hook(lambda _m, args: (args[0] + 1.0,))
    assert_plain_gradients(start, model, with_loss(device), device=device, block={"activations": activations})


@KEEP_OR_RECOMPUTE
def test_auxiliary_loss_left_on_a_module(start, device, activations) -> None:
    class Model(Stack):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) + sum(block.auxiliary for block in self.blocks)

    model = Model(*[WithAuxiliary() for _ in range(4)])
    assert_plain_gradients(start, model, with_loss(device), device=device, block={"activations": activations})


@KEEP_OR_RECOMPUTE
def test_auxiliary_loss_alone(start, device, activations) -> None:
    """Blocks whose output the loss does not use still get the gradient of what they left behind."""

    class Model(Stack):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            super().forward(ids)
            return self.blocks[1].auxiliary + self.blocks[2].auxiliary

    model = Model(*[WithAuxiliary() for _ in range(4)])
    assert_plain_gradients(start, model, with_loss(device), device=device, block={"activations": activations})


@KEEP_OR_RECOMPUTE
def test_keyword_argument_requires_grad(start, device, activations) -> None:
    class Shifted(Block):
        def forward(self, hidden: torch.Tensor, *, shift: torch.Tensor, scales: tuple = ()) -> torch.Tensor:
            return super().forward(hidden * scales[1][0] + shift)

    class Model(Stack):
        def __init__(self) -> None:
            super().__init__(*[Shifted() for _ in range(4)])
            self.shift = nn.Parameter(torch.randn(WIDTH))
            self.scale = nn.Parameter(torch.randn(WIDTH))

        def middle(self, hidden: torch.Tensor) -> torch.Tensor:
            for position, block in enumerate(self.blocks):
                hidden = block(hidden, shift=self.shift * position, scales=(None, (self.scale,)))
            return hidden

    assert_plain_gradients(start, Model(), with_loss(device), device=device, block={"activations": activations})


@KEEP_OR_RECOMPUTE
def test_only_a_keyword_argument_requires_grad(start, device, activations) -> None:
    """No block input needs a gradient but one inside a dict: gradients still come, in every unit."""

    class Reads(Block):
        def forward(self, hidden: torch.Tensor, extras: dict) -> torch.Tensor:
            return super().forward(hidden) + extras["bias"]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Reads() for _ in range(3)])
            self.bias = nn.Parameter(torch.randn(WIDTH))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            hidden = F.one_hot(ids % WIDTH, WIDTH).float()
            return sum(block(hidden, {"bias": self.bias}).pow(2).mean() for block in self.blocks)

    assert_plain_gradients(start, Model(), with_loss(device), device=device, block={"activations": activations})


@KEEP_OR_RECOMPUTE
def test_tuples_in_and_out(start, device, activations) -> None:
    class Pair(Block):
        def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            left, right = pair
            return super().forward(right), left + self.up(left)[..., :WIDTH]

    class Model(Stack):
        def __init__(self) -> None:
            super().__init__(*[Pair() for _ in range(4)])

        def middle(self, hidden: torch.Tensor) -> torch.Tensor:
            pair = hidden, hidden.flip(0)
            for block in self.blocks:
                pair = block(pair)
            return pair[0] + pair[1]

    assert_plain_gradients(start, Model(), with_loss(device), device=device, block={"activations": activations})


@KEEP_OR_RECOMPUTE
def test_dict_that_a_later_block_reads_and_a_list_that_grows(start, device, activations) -> None:
    class Shares(Block):
        def forward(self, hidden: torch.Tensor, shared: dict, trail: list) -> torch.Tensor:
            if "first" not in shared:
                shared["first"] = self.up(hidden)[..., :WIDTH]
            trail.append(hidden)
            return super().forward(hidden) + shared["first"]

    class Model(Stack):
        def __init__(self) -> None:
            super().__init__(*[Shares() for _ in range(4)])

        def middle(self, hidden: torch.Tensor) -> torch.Tensor:
            self.trail, shared = [], {}
            for block in self.blocks:
                hidden = block(hidden, shared, self.trail)
            return hidden + sum(self.trail)

        def __deepcopy__(self, memo: dict) -> Model:
            twin = Model()
            twin.load_state_dict(self.state_dict())
            return twin

    engine = assert_plain_gradients(
        start, Model(), with_loss(device), device=device, block={"activations": activations}
    )
    assert len(engine.module.trail) == 4


@KEEP_OR_RECOMPUTE
def test_block_called_twice_and_reversed_order(start, device, activations) -> None:
    class Model(Stack):
        def middle(self, hidden: torch.Tensor) -> torch.Tensor:
            for position in (2, 0, 2, 3, 1, 1, 0):
                hidden = self.blocks[position](hidden)
            return hidden

    assert_plain_gradients(start, Model(), with_loss(device), device=device, block={"activations": activations})


@KEEP_OR_RECOMPUTE
def test_order_that_changes_each_time(start, device, activations) -> None:
    class Model(Stack):
        def middle(self, hidden: torch.Tensor) -> torch.Tensor:
            for position in torch.randperm(4).tolist():
                hidden = self.blocks[position](hidden)
            return hidden

    block = {"activations": activations, "weight_slots": 3}
    assert_plain_gradients(start, Model(), with_loss(device), device=device, rounds=5, block=block)


def skipping_model() -> Stack:
    class Model(Stack):
        skip = -1

        def middle(self, hidden: torch.Tensor) -> torch.Tensor:
            for position, block in enumerate(self.blocks):
                if position != self.skip:
                    hidden = block(hidden)
            return hidden

    return Model()


@pytest.mark.parametrize("clip", [0.0, 0.5])
@pytest.mark.parametrize("finite_check", [True, False])
def test_skipped_block_is_left_alone(start, device, clip, finite_check) -> None:
    """Neither an old gradient nor a moment's decay reaches a block that did not run; the others match plain PyTorch."""
    model = skipping_model()
    reference = Reference(copy.deepcopy(model).to(device), clip=clip)
    fused = functools.partial(torch.optim.AdamW, lr=LR, weight_decay=0.01, fused=True)
    kernel = functools.partial(DeepSpeedCPUAdam, lr=LR, weight_decay=0.01)
    makes = (None, fused, kernel, kernel) if device.type == "cpu" else (None, fused, None, fused)
    others = [Reference(copy.deepcopy(model).to(device), clip=clip, make=make) for make in makes]
    engine = start(model, gradient_clipping=clip, block={"finite_check": finite_check})
    for position, ids in enumerate(token_batches(device, 6)):
        skip = (-1, 2, 2, 0, -1, 3)[position]
        for which in (engine.module, reference.model, *(other.model for other in others)):
            which.skip = skip
        before = {name: value for name, value in state(engine).items() if f"blocks.{skip}." in name}
        engine.backward(engine(ids))
        engine.step()
        after = state(engine)
        assert_same_bits({name: after[name] for name in before}, before)
        for plain, rows in zip((reference, *others), (ids, ids.flip(0), ids, ids, ids.flip(0)), strict=True):
            plain.backward(plain.model(rows))
            plain.step()
    assert_within(masters(engine), reference.masters(), [other.masters() for other in others])
