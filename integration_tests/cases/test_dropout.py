"""Random numbers under recompute: the gradients and the generator of a standard checkpoint."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from integration_tests.cases.engines import assert_same_bits, gradients, plain_gradients
from integration_tests.cases.models import VOCABULARY, Block, Stack, causal_loss, gpt2, llama, token_batches


class StochasticDepth(Block):
    """Dropout on attention-like and residual paths, and a block that is left out at random."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.training and torch.rand(()) < 0.3:
            return hidden
        inner = F.dropout(self.up(self.norm(hidden)), 0.1, self.training)
        return hidden + F.dropout(self.down(F.gelu(inner)), 0.1, self.training)


class Model(Stack):
    """Runs its blocks as they are, or each under a standard checkpoint."""

    checkpointed = False

    def middle(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.checkpointed else block(hidden)
        return hidden


def generator_state(device: torch.device) -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    return states + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])


def run(model: Any, backward: Any, loss_of: Any, device: torch.device) -> list[torch.Tensor]:
    """One forward and backward with the generator used in between; returns the generator's state afterwards."""
    torch.manual_seed(11)
    loss = loss_of(model)
    torch.rand(7)
    torch.rand(7, device=device)
    backward(loss)
    return generator_state(device)


def compare(start: Any, device: torch.device, model: nn.Module, twin: nn.Module, loss_of: Any, **block: Any) -> None:
    engine = start(model, block=block)
    for _ in range(2):
        expected = run(twin, torch.Tensor.backward, loss_of, device)
        actual = run(engine, engine.backward, loss_of, device)
        assert_same_bits(gradients(engine), plain_gradients(twin))
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
        engine.reset_iteration()
        twin.zero_grad()


@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize("layers", [4, 5])
def test_stochastic_depth(start, device, activations, layers) -> None:
    model = Model(*[StochasticDepth() for _ in range(layers)])
    twin = copy.deepcopy(model).to(device)
    twin.checkpointed = True
    (ids,) = token_batches(device, 1)
    compare(start, device, model, twin, lambda which: which(ids), activations=activations)


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_hugging_face_dropout(start, device, activations) -> None:
    model = gpt2(resid_pdrop=0.1, attn_pdrop=0.1, embd_pdrop=0.1)
    twin = copy.deepcopy(model).to(device)
    (ids,) = token_batches(device, 1)
    compare(start, device, model, twin, lambda which: causal_loss(which, ids), activations=activations)


@pytest.mark.parametrize("activations", ["recompute", "keep"])
def test_hugging_face_layer_drop(start, device, activations) -> None:
    """The model itself leaves whole blocks out at random: they get no gradient, the others the right one."""
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=48,
        num_hidden_layers=6,
        num_attention_heads=4,
        max_position_embeddings=64,
        dropout=0.1,
        layerdrop=0.5,
    )
    model = OPTForCausalLM(config)
    twin = copy.deepcopy(model).to(device)
    ran = []
    for block in twin.model.decoder.layers:
        block.register_forward_hook(lambda module, _args, _output: ran.append(module))
    (ids,) = token_batches(device, 1)
    compare(start, device, model, twin, lambda which: causal_loss(which, ids), activations=activations)
    assert 0 < len(set(ran)) < 6


def test_llama_attention_dropout_with_checkpointing(start, device) -> None:
    model = llama(attention_dropout=0.1)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    twin = copy.deepcopy(model).to(device)
    (ids,) = token_batches(device, 1)
    compare(start, device, model, twin, lambda which: causal_loss(which, ids))


def test_autocast_of_the_user(start, device) -> None:
    """The recompute runs under the forward's autocast, not under backward's."""
    model = Stack(*[Block() for _ in range(4)])
    twin = copy.deepcopy(model).to(device)
    (ids,) = token_batches(device, 1)

    def loss_of(which: Any) -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return which(ids)

    compare(start, device, model, twin, loss_of)
