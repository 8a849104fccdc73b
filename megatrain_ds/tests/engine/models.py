"""A model whose parameters fill whole pages, and engines over it in this process."""

from __future__ import annotations

import threading
from typing import Any

import deepspeed
import torch
from torch import nn

import megatrain_ds  # noqa: F401  (activates the plugin where it is not installed)

WIDTH = 64
NUM_BLOCKS = 3
# Per matrix 64 x 64 elements: 8192 bytes in bf16, two pages exactly.
MATRIX = WIDTH * WIDTH


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)
        self.outer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.outer(torch.tanh(self.inner(hidden)))


class Net(nn.Module):
    """Embedding, blocks, head; returns the loss. `order` says which blocks run."""

    def __init__(self, num_blocks: int = NUM_BLOCKS) -> None:
        super().__init__()
        self.embed = nn.Embedding(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, ids: torch.Tensor, order: tuple[int, ...] | None = None) -> torch.Tensor:
        hidden = self.embed(ids)
        for index in range(len(self.layers)) if order is None else order:
            hidden = self.layers[index](hidden)
        logits = self.head(hidden).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.roll(1, -1).flatten())


def make_model(num_blocks: int = NUM_BLOCKS) -> Net:
    torch.manual_seed(0)
    return Net(num_blocks)


def make_engine(
    model: nn.Module | None = None, *, bf16: bool = False, block: dict | None = None, lr: float = 1e-2, **keys: Any
) -> Any:
    """`deepspeed.initialize` with the flag; `block` extends the megatrain block, `keys` the configuration."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": lr}},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}},
        "bf16": {"enabled": bf16},
        "gradient_clipping": 0.0,
        "steps_per_print": 1000000,
        "offload_engine": "megatrain",
        "megatrain": {"update_kernel": "torch", **(block or {})},
        **keys,
    }
    return deepspeed.initialize(model=make_model() if model is None else model, config=config)[0]


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, WIDTH, (2, 8), generator=torch.Generator().manual_seed(step))


def train(engine: Any, steps: range, **inputs: Any) -> list[float]:
    losses = []
    for step in steps:
        loss = engine(batch(step), **inputs)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def state(engine: Any) -> dict[str, torch.Tensor]:
    """Copies of the shown weights, the masters and the moments."""
    found = {name: value.detach().clone() for name, value in engine.module.state_dict().items()}
    for entry in (entry for group in engine.optimizer.parameters for entry in group):
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            found[f"{entry.name}:{kind}"] = entry.view(kind).clone()
    return found


def differing(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    assert first.keys() == second.keys()
    return [key for key in first if not torch.equal(first[key], second[key])]


_ignored: set[threading.Thread] = set()


def ignore_threads(threads: list[threading.Thread]) -> None:
    """Leave these threads out of `engine_threads`."""
    _ignored.clear()
    _ignored.update(threads)


def engine_threads() -> list[str]:
    """Names of engines' threads that live now and are not ignored."""
    alive = set(threading.enumerate()) - _ignored
    return sorted(thread.name for thread in alive if thread.name.startswith("megatrain"))
