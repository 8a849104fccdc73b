"""Small models of repeated blocks, and tiny random Hugging Face ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 16
VOCABULARY = 40


class Block(nn.Module):
    """A residual MLP."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(F.gelu(self.up(self.norm(hidden))))


class WithAuxiliary(Block):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inner = self.up(hidden)
        self.auxiliary = inner.pow(2).mean()
        return hidden + self.down(F.gelu(inner))


class Stack(nn.Module):
    """Embedding, blocks, norm, head; returns the mean cross-entropy of the next token."""

    def __init__(self, *blocks: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(blocks or [Block(width) for _ in range(4)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def middle(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(self.middle(self.embed(ids))))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def token_batches(
    device: torch.device, count: int, *, seed: int = 1, rows: int = 2, length: int = 12
) -> list[torch.Tensor]:
    """`count` batches of random tokens, int64 [rows, length]."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCABULARY, (rows, length), generator=generator).to(device) for _ in range(count)]


def llama(layers: int = 4, **changes: Any) -> nn.Module:
    """A random Llama with eager attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "attn_implementation": "eager",
        "tie_word_embeddings": False,
        **changes,
    }
    return LlamaForCausalLM(LlamaConfig(**settings))


def gpt2(layers: int = 4, **changes: Any) -> nn.Module:
    """A random GPT-2: tied head, layer norms, fused projections, dropout off."""
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = {
        "vocab_size": VOCABULARY,
        "n_embd": 32,
        "n_layer": layers,
        "n_head": 4,
        "n_positions": 64,
        "attn_implementation": "eager",
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        **changes,
    }
    return GPT2LMHeadModel(GPT2Config(**settings))


def causal_loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """A Hugging Face causal model's own loss, without a cache."""
    return model(input_ids=ids, labels=ids, use_cache=False).loss


KEEP_OR_RECOMPUTE = pytest.mark.parametrize("activations", ["recompute", "keep"])


def ids_of(device: torch.device) -> torch.Tensor:
    """One batch of tokens."""
    return token_batches(device, 1)[0]


def with_loss(device: torch.device) -> Callable[[nn.Module], torch.Tensor]:
    """`run(model)`: the loss of one batch."""
    ids = ids_of(device)
    return lambda model: model(ids)
