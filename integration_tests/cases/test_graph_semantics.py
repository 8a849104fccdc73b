"""Whatever escapes a block carries the gradient of plain PyTorch, and what a forward does happens once."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from integration_tests.cases.engines import (
    LR,
    Reference,
    assert_plain_gradients,
    assert_same_bits,
    assert_within,
    gradients,
    initialize,
    masters,
    plain_gradients,
    state,
    train,
)
from integration_tests.cases.models import WIDTH, Block, Stack, token_batches

KEEP_OR_RECOMPUTE = pytest.mark.parametrize("activations", ["recompute", "keep"])


def ids_of(device: torch.device) -> torch.Tensor:
    return token_batches(device, 1)[0]


def with_loss(device: torch.device):
    ids = ids_of(device)
    return lambda model: model(ids)


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


class WithAuxiliary(Block):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = self.up(hidden)
        self.auxiliary = inner.pow(2).mean()
        return hidden + self.down(F.gelu(inner))


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
