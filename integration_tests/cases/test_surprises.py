"""What users do that nobody plans for: plain PyTorch's gradients or a refusal by name, never a silent difference."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from integration_tests.cases.engines import assert_plain_gradients
from integration_tests.cases.models import WIDTH, Block, Stack, ids_of, token_batches
from megatrain_ds.errors import StateError, UnsupportedModelError, UnsupportedOptimizerError


def test_submodule_shared_by_two_blocks(start, device) -> None:
    model = Stack()
    model.blocks[3].norm = model.blocks[1].norm
    assert_plain_gradients(start, model, lambda m: m(ids_of(device)), device=device)


class Random(Block):
    """Skips itself by Python's generator and scales by NumPy's."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        scale = float(np.random.rand()) + 0.5  # noqa: NPY002 - the global generator is the point
        return super().forward(hidden) * scale if random.random() < 0.7 else hidden * scale


def test_python_and_numpy_randomness_is_replayed(start, device) -> None:
    def run(model: nn.Module) -> torch.Tensor:
        random.seed(3)
        np.random.seed(3)  # noqa: NPY002 - see above
        loss = model(ids_of(device))
        # Consumed elsewhere before backward, as a data loader would.
        random.random()
        np.random.rand()  # noqa: NPY002 - see above
        return loss

    assert_plain_gradients(start, Stack(*[Random() for _ in range(4)]), run, device=device)


class Memory(Block):
    """Reads what its last call left in a plain attribute, and counts in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: torch.Tensor | None = None
        self.log: list[int] = []

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = super().forward(hidden if self.memory is None else hidden + self.memory)
        self.memory = (0.5 * hidden).detach()
        self.log.append(len(self.log))
        return out * (1.0 + 0.1 * len(self.log))


def test_state_in_plain_attributes(start, device) -> None:
    assert_plain_gradients(start, Stack(*[Memory() for _ in range(4)]), lambda m: m(ids_of(device)), device=device)


class WritesAttribute(Block):
    """Decays a tensor that is no buffer, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = torch.ones(WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.decay.mul_(0.9)
        return super().forward(hidden * self.decay.to(hidden.device))


def test_attribute_written_in_place_is_refused(start, device) -> None:
    engine = start(Stack(*[WritesAttribute() for _ in range(2)]))
    with pytest.raises(UnsupportedModelError, match="attribute decay.*Register it as a buffer"):
        engine(ids_of(device))


class SharedOffset(Stack):
    """Gives every block one tensor that it changes between them; a sum saves nothing, so plain PyTorch allows it."""

    def middle(self, hidden: torch.Tensor) -> torch.Tensor:
        offset = torch.zeros(1, device=hidden.device)
        for block in self.blocks:
            offset += 1.0
            hidden = block(hidden, offset)
        return hidden


class Offset(Block):
    """A block with a second input."""

    def forward(self, hidden: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(hidden + offset)


def test_input_written_after_the_block_ran_is_refused(start, device) -> None:
    engine = start(SharedOffset(*[Offset() for _ in range(3)]))
    loss = engine(ids_of(device))
    with pytest.raises(UnsupportedModelError, match="written in place after the block ran"):
        engine.backward(loss)


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_double_backward_is_refused(start, device, activations) -> None:
    engine = start(Stack(), block={"activations": activations})
    loss = engine(ids_of(device))
    with pytest.raises(UnsupportedModelError, match="create_graph"):
        loss.backward(create_graph=True)


def test_weight_written_between_forward_and_backward_is_refused(start, device) -> None:
    model = Stack()
    engine = start(model)
    loss = engine(ids_of(device))
    with torch.no_grad():
        model.blocks[1].up.weight.mul_(2.0)
    with pytest.raises(StateError, match=r"blocks\.1\.up\.weight"):
        engine.backward(loss)


def test_functional_call_uses_the_given_tensors(start, device) -> None:
    model = Stack()
    start(model)
    generator = torch.Generator().manual_seed(0)
    given = {
        name: (0.1 * torch.randn(param.shape, generator=generator)).to(device)
        for name, param in model.named_parameters()
    }
    plain = Stack().to(device)
    with torch.no_grad():
        expected = torch.func.functional_call(plain, given, (ids_of(device),))
        assert torch.equal(torch.func.functional_call(model, given, (ids_of(device),)), expected)


def test_parameters_that_come_late_are_refused(start, device) -> None:
    model = Stack()
    engine = start(model)
    engine.backward(engine(ids_of(device)))
    engine.step()
    model.head = nn.Linear(WIDTH, 40, bias=False).to(device)
    with pytest.raises(UnsupportedModelError, match=r"head\.weight.*after deepspeed\.initialize"):
        engine(ids_of(device))
    with pytest.raises(UnsupportedOptimizerError, match="groups are fixed"):
        engine.optimizer.add_param_group({"params": []})


def test_requires_grad_changed_late_warns(start, device) -> None:
    model = Stack()
    engine = start(model)
    model.blocks[0].up.weight.requires_grad_(False)
    with pytest.warns(UserWarning, match=r"blocks\.0\.up\.weight\.requires_grad"):
        engine(ids_of(device))


def test_nothing_to_train_is_refused(start) -> None:
    model = Stack().requires_grad_(False)
    with pytest.raises(UnsupportedOptimizerError, match="nothing to train"):
        start(model)


class WithLogits(Stack):
    """Returns its loss and the logits that the loss was computed from, as Transformers' models do."""

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        logits = self.head(self.norm(self.middle(self.embed(ids))))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


@pytest.mark.parametrize("by_user", [False, True])
def test_accumulation_scales_once_whoever_calls_backward(start, device, by_user) -> None:
    model = WithLogits()
    batches = token_batches(device, 4)
    twin = WithLogits().to(device)
    twin.load_state_dict(model.state_dict())
    for ids in batches:
        (twin(ids)["loss"] / 4).backward()
    grads = [param.grad for param in twin.parameters() if param.grad is not None]
    expected = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads]))
    engine = start(model, gradient_accumulation_steps=4)
    for ids in batches:
        loss = engine(ids)["loss"]
        if by_user:
            loss.backward()
        else:
            engine.backward(loss)
        engine.step()
    # Three additions in fp32 separate the two sums.
    assert float(engine.get_global_grad_norm()) == pytest.approx(float(expected), rel=2.0**-20)
