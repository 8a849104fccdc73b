"""Several forwards and backwards make one step: the sum is plain PyTorch's however it is cut."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from integration_tests.cases.engines import (
    Reference,
    assert_same_bits,
    assert_within,
    cast,
    differing,
    gradients,
    largest,
    masters,
    plain_gradients,
)
from integration_tests.cases.models import Block, Stack, gpt2, llama, token_batches
from megatrain_ds.tests.releases import LOSS_SCALED_BY_BACKWARD

BOTH = pytest.mark.parametrize("activations", ["recompute", "keep"])


def log_likelihood(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    return torch.gather(logits.log_softmax(-1), 2, ids[:, 1:, None]).sum((1, 2))


def preference_loss(model: Any, reference: Any, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """The shape of DPO: two policy forwards, two reference forwards without gradients, one loss."""
    policy = log_likelihood(model, chosen), log_likelihood(model, rejected)
    with torch.no_grad():
        fixed = log_likelihood(reference, chosen), log_likelihood(reference, rejected)
    return -F.logsigmoid(0.1 * ((policy[0] - fixed[0]) - (policy[1] - fixed[1]))).mean()


@BOTH
@pytest.mark.parametrize("make", [llama, gpt2], ids=lambda make: make.__name__)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_two_forwards_one_backward(start, device, make, activations, checkpointing) -> None:
    model, fixed = make(), make()
    twin, fixed_twin = copy.deepcopy(model).to(device), copy.deepcopy(fixed).to(device)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # The reference model is an engine without optimizer, as TRL makes it.
    reference = start(fixed, optimizer_block=None)
    engine = start(model, gradient_accumulation_steps=2, block={"activations": activations})
    chosen, rejected = token_batches(device, 2)
    preference_loss(twin, fixed_twin, chosen, rejected).backward()
    engine.backward(preference_loss(engine, reference, chosen, rejected), scale_wrt_gas=False)
    assert_same_bits(gradients(engine), plain_gradients(twin))


@BOTH
def test_policy_is_its_own_reference(start, device, activations) -> None:
    """Adapters off, no_grad: forwards of the same model between a training forward and its backward."""
    model = llama()
    twin = copy.deepcopy(model).to(device)
    engine = start(model, gradient_accumulation_steps=2, block={"activations": activations})
    chosen, rejected = token_batches(device, 2)
    for which, backward in ((twin, torch.Tensor.backward), (engine, lambda loss: engine.backward(loss, False, False))):
        loss = preference_loss(which, which, chosen, rejected) * 3 + log_likelihood(which, rejected).mean()
        which.eval()
        with torch.no_grad():
            log_likelihood(which, chosen)
        which.train()
        backward(loss)
    assert_same_bits(gradients(engine), plain_gradients(twin))


def test_backwards_of_two_forwards_in_either_order(start, device) -> None:
    model = Stack()
    twin = copy.deepcopy(model).to(device)
    engine = start(model, gradient_accumulation_steps=2)
    first, second = token_batches(device, 2)
    for which, backward in ((twin, torch.Tensor.backward), (engine, lambda loss: engine.backward(loss, False, False))):
        losses = which(first), which(second)
        backward(losses[0])
        backward(losses[1])
    assert_same_bits(gradients(engine), plain_gradients(twin))


def test_forward_whose_graph_is_dropped(start, device) -> None:
    """A loss that is never used leaves nothing behind: no gradient, no slot, no buffer."""
    model = Stack()
    twin = copy.deepcopy(model).to(device)
    engine = start(model)
    first, second = token_batches(device, 2)
    for _ in range(4):
        engine(first)
    twin(second).backward()
    engine.backward(engine(second))
    assert_same_bits(gradients(engine), plain_gradients(twin))
    assert len(engine.runtime.pool.slots) == 2


def unequal_rows(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels [8, 200] with 3 to 200 valid tokens a row; -100 marks the rest."""
    ids = torch.randint(0, 40, (8, 200), generator=torch.Generator().manual_seed(4))
    labels = ids.clone()
    for row, valid in enumerate((3, 200, 17, 90, 5, 150, 41, 64)):
        labels[row, valid:] = -100
    return ids.to(device), labels.to(device)


def summed_loss(model: Any, ids: torch.Tensor, labels: torch.Tensor, total: int) -> torch.Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    loss = F.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )
    return loss / total


def run_cut(start: Any, device: torch.device, dtype: torch.dtype, rows: int, backwards: int) -> tuple[Any, float]:
    """One step over the eight rows, `rows` a backward and `backwards` of them a micro-step."""
    torch.manual_seed(7)
    ids, labels = unequal_rows(device)
    total = int((labels[:, 1:] != -100).sum())
    micro_steps = 8 // (rows * backwards)
    engine = start(
        llama(max_position_embeddings=256), dtype=dtype, gradient_accumulation_steps=micro_steps, gradient_clipping=0.5
    )
    for micro in range(micro_steps):
        for part in range(backwards):
            at = slice((micro * backwards + part) * rows, (micro * backwards + part + 1) * rows)
            engine.backward(summed_loss(engine, ids[at], labels[at], total), scale_wrt_gas=False)
        assert engine.is_gradient_accumulation_boundary() == (micro == micro_steps - 1)
        engine.step()
    assert engine.global_steps == 1
    return engine, float(engine.get_global_grad_norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cut_of_a_batch_does_not_matter(start, device, dtype) -> None:
    """8 rows at once, one by one, and two backward calls in each of two micro-steps: one step, one norm."""

    def plain(rows: int) -> Reference:
        torch.manual_seed(7)
        ids, labels = unequal_rows(device)
        total = int((labels[:, 1:] != -100).sum())
        reference = Reference(llama(max_position_embeddings=256).to(device), dtype=dtype, clip=0.5)
        for first in range(0, 8, rows):
            at = slice(first, first + rows)
            reference.backward(summed_loss(reference.model, ids[at], labels[at], total))
        return reference

    references = {rows: plain(rows) for rows in (8, 1, 2, 4)}
    norms = {rows: reference.step() for rows, reference in references.items()}
    floor = [references[rows].masters() for rows in (1, 2, 4)]
    spread = max(norms.values()) - min(norms.values())
    for rows, backwards in ((8, 1), (1, 1), (2, 2)):
        engine, norm = run_cut(start, device, dtype, rows, backwards)
        assert_within(masters(engine), references[8].masters(), floor)
        assert abs(norm - norms[8]) <= 2 * spread + 1e-6 * norms[8]


@pytest.mark.parametrize("accumulation_dtype", ["fp32", "bf16"])
def test_small_increments(start, device, accumulation_dtype) -> None:
    """One large gradient and 63 small ones: bf16 sums lose them, fp32 sums, the default, do not."""
    engine = start(
        Stack(),
        dtype=torch.bfloat16,
        gradient_accumulation_steps=64,
        data_types=None if accumulation_dtype == "fp32" else {"grad_accum_dtype": "bf16"},
    )
    (ids,) = token_batches(device, 1)
    for micro in range(64):
        engine.backward(engine(ids) * (1.0 if micro == 0 else 2.0**-10), scale_wrt_gas=False)
        if micro == 0:
            once = {name: grad.float() for name, grad in gradients(engine).items()}
        if micro < 63:
            engine.step()
    summed = {name: grad.float() for name, grad in gradients(engine).items()}
    exact = {name: grad * (1 + 63 * 2.0**-10) for name, grad in once.items()}
    error = largest(differing(summed, exact)) / max(grad.abs().max().item() for grad in exact.values())
    assert error < 1e-6 if accumulation_dtype == "fp32" else error > 1e-3


def test_the_users_own_backward(start, device) -> None:
    """`loss.backward()` divides by the accumulation count as ZeRO-3 does, and counts as a micro-batch."""
    model = Stack()
    twin = copy.deepcopy(model).to(device)
    engine = start(model, gradient_accumulation_steps=2)
    for ids in token_batches(device, 2):
        (twin(ids) / 2).backward()
        engine(ids).backward()
        if engine.micro_steps == 1:
            assert_same_bits(gradients(engine), plain_gradients(twin))
        engine.step()
    assert engine.global_steps == 1


class LossAndLogits(Stack):
    """Returns its loss, and logits of more elements than are copied for the caller."""

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.norm(self.middle(self.embed(ids)))
        logits = self.head(hidden).repeat(1, 8, 1)
        return logits.float().pow(2).mean(), logits


def scaled_loss(outputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The model's own loss, scaled in place as Trainer does it."""
    loss, _ = outputs
    loss *= 3.0
    return loss


def loss_of_logits(outputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """A loss from logits that were divided in place by a temperature."""
    _, logits = outputs
    assert logits.numel() > 2**12
    return logits.div_(0.7).logsumexp(-1).mean()


@pytest.mark.parametrize(
    ("loss_of", "own_backward"),
    [(scaled_loss, False), (scaled_loss, True), *([(loss_of_logits, False)] if LOSS_SCALED_BY_BACKWARD else [])],
)
def test_an_output_that_is_written_in_place(start, device, loss_of, own_backward) -> None:
    """Gradients are divided by the accumulation count all the same, and DeepSpeed's timers stay in step."""
    model = LossAndLogits()
    twin = copy.deepcopy(model).to(device)
    engine = start(model, gradient_accumulation_steps=2, wall_clock_breakdown=True)
    for ids in token_batches(device, 2):
        (loss_of(twin(ids)) / 2).backward()
        loss = loss_of(engine(ids))
        if own_backward:
            loss.backward()
        else:
            engine.backward(loss)
        if engine.micro_steps == 1:
            assert_same_bits(gradients(engine), plain_gradients(twin))
        engine.step()
    assert engine.global_steps == 1
    assert engine.get_wall_clock_timers()["bwd"] > 0.0


def test_scale_wrt_gas(start, device) -> None:
    model = Stack()
    (ids,) = token_batches(device, 1)
    found = []
    for scale in (True, False):
        engine = start(copy.deepcopy(model), gradient_accumulation_steps=4)
        engine.backward(engine(ids), scale_wrt_gas=scale)
        found.append({name: grad * (4 if scale else 1) for name, grad in gradients(engine).items()})
    assert_same_bits(found[0], found[1])


@pytest.mark.parametrize("clip", [0.0, 0.01])
@pytest.mark.parametrize("finite_check", [True, False])
def test_final_partial_accumulation(start, device, clip, finite_check) -> None:
    """7 micro-batches at 4 a step: a boundary set by hand, as Accelerate sets it, steps on the last three."""
    batches = token_batches(device, 7)
    model = Stack()
    reference = Reference(copy.deepcopy(model).to(device), clip=clip)
    other = Reference(copy.deepcopy(model).to(device), clip=clip)
    engine = start(model, gradient_accumulation_steps=4, gradient_clipping=clip, block={"finite_check": finite_check})
    for number, ids in enumerate(batches):
        boundary = number in (3, 6)
        engine.set_gradient_accumulation_boundary(is_boundary=boundary)
        engine.backward(engine(ids))
        reference.backward(reference.model(ids) / 4)
        other.backward(other.model(ids.flip(0)) / 4)
        if boundary:
            engine.step()
            reference.step()
            other.step()
    assert engine.global_steps == 2
    assert largest(differing(masters(engine), reference.masters())) <= floor_of(reference, other)


def floor_of(reference: Reference, other: Reference) -> float:
    """Twice what another order of rows changes, and at least the rounding of the largest weight twice over."""
    rounding = max(value.abs().max().item() for value in reference.masters().values()) * 2.0**-23
    return 2 * max(largest(differing(other.masters(), reference.masters())), rounding)


def test_micro_batches_that_use_different_blocks(start, device) -> None:
    """A block used in one micro-batch of two gets that one's gradient alone, not an earlier step's."""

    class Model(Stack):
        skip = -1

        def middle(self, hidden: torch.Tensor) -> torch.Tensor:
            for position, block in enumerate(self.blocks):
                if position != self.skip:
                    hidden = block(hidden)
            return hidden

    model = Model(*[Block() for _ in range(4)])
    twin = copy.deepcopy(model).to(device)
    engine = start(model, gradient_accumulation_steps=2)
    for step in range(3):
        twin.zero_grad()
        for micro, ids in enumerate(token_batches(device, 2, seed=step)):
            engine.module.skip = twin.skip = (0, 1, 2, 2, 3, -1)[2 * step + micro]
            twin(ids).backward()
            engine.backward(engine(ids), scale_wrt_gas=False)
            if micro == 0:
                engine.step()
        assert_same_bits(gradients(engine), plain_gradients(twin))
        engine.step()
        twin.load_state_dict(engine.module.state_dict())


@BOTH
def test_evaluation_between_micro_steps(start, device, activations) -> None:
    model = cast(llama(), torch.float32)
    twin = copy.deepcopy(model).to(device)
    engine = start(model, gradient_accumulation_steps=3, block={"activations": activations})
    for micro, ids in enumerate(token_batches(device, 3)):
        twin(input_ids=ids, labels=ids).loss.backward()
        engine.backward(engine(input_ids=ids, labels=ids).loss, scale_wrt_gas=False)
        if micro < 2:
            engine.step()
        with torch.no_grad():
            assert torch.equal(engine.module(input_ids=ids).logits, twin(input_ids=ids).logits)
    assert_same_bits(gradients(engine), plain_gradients(twin))
