"""A small tied, partly frozen model with buffers, and engines over it in this process."""

from __future__ import annotations

import deepspeed
import torch
from torch import nn

import megatrain_ds  # noqa: F401  (activates the plugin where it is not installed)

VOCABULARY, WIDTH = 16, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.outer(torch.tanh(self.inner(hidden)))


class Net(nn.Module):
    """Returns the loss of predicting `ids` from themselves; `skip` leaves one block out."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.layers[0].requires_grad_(False)

    def forward(self, ids: torch.Tensor, skip: int = -1) -> torch.Tensor:
        hidden = self.embed(ids)
        for index, layer in enumerate(self.layers):
            if index != skip:
                hidden = layer(hidden)
        logits = self.head(hidden).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.roll(1, -1).flatten())


def make_model(seed: int = 0, num_blocks: int = 3) -> Net:
    torch.manual_seed(seed)
    return Net(num_blocks)


def config(*, flag: bool = True, bf16: bool = True, sub_group_size: int = 300, accumulation: int = 1) -> dict:
    result = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
            "sub_group_size": sub_group_size,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "bf16": {"enabled": bf16},
        "steps_per_print": 1000000,
    }
    if flag:
        result["offload_engine"] = "megatrain"
        result["megatrain"] = {"update_kernel": "torch"}
    return result


def make_engine(model: nn.Module | None = None, *, scheduler: bool = True, lr: float = 1e-2, **settings):  # noqa: ANN003, ANN201
    """An engine with two parameter groups and, by request, a scheduler."""
    model = make_model() if model is None else model
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in params if param.ndim > 1], "weight_decay": 0.1},
        {"params": [param for param in params if param.ndim == 1], "weight_decay": 0.0, "lr": 2 * lr},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr)
    made = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20) if scheduler else None
    ds_config = {**config(**settings), "zero_force_ds_cpu_optimizer": False}
    return deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=made, config=ds_config)[0]


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(step))


def train(engine, steps: range, **inputs: int) -> list[float]:  # noqa: ANN001
    losses = []
    for step in steps:
        loss = engine(batch(step), **inputs)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def state_of(engine) -> dict[str, torch.Tensor]:  # noqa: ANN001
    """Copies of every value that a checkpoint holds."""
    found = {key: value.detach().clone() for key, value in engine.module.state_dict().items()}
    for entry in (entry for group in engine.optimizer.parameters for entry in group):
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            found[f"{entry.name}:{kind}"] = entry.view(kind).clone()
        found[f"{entry.name}:step"] = torch.tensor(entry.step)
    for index, group in enumerate(engine.optimizer.param_groups):
        found[f"lr{index}"] = torch.tensor(group["lr"])
    found["global_steps"] = torch.tensor(engine.global_steps)
    if engine.lr_scheduler is not None:
        found["epoch"] = torch.tensor(engine.lr_scheduler.last_epoch)
    return found


def differing(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    assert first.keys() == second.keys()
    return [key for key in first if not torch.equal(first[key], second[key])]
