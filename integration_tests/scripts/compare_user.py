"""A training script with everything that a comparison must leave behind in order: workers, saves, a final block.

Its options make it misbehave in one way, by looking at the engine as no ordinary script does. Run it with the
`deepspeed` launcher.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import deepspeed
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 32


class Block(nn.Module):
    """One residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden` float32[batch, WIDTH] to the same."""
        return hidden + torch.tanh(self.layer(hidden))


def main() -> None:
    """Trains for 100 steps and saves after every one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser = deepspeed.add_config_arguments(parser)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--wrong", choices=["losses", "raises"], help="what differs with the flag")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    engine = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())[0]
    ours = type(engine).__name__ == "MegaTrainEngine"
    data = TensorDataset(torch.randn(200, WIDTH))
    try:
        for step, (rows,) in enumerate(DataLoader(data, batch_size=2, num_workers=1, persistent_workers=True)):
            if ours and step == 2 and args.wrong == "raises":
                raise RuntimeError("no such thing\nas this engine")
            loss = engine(rows).square().mean() * (1.01 if ours and args.wrong == "losses" else 1.0)
            engine.backward(loss)
            engine.step()
            engine.save_checkpoint(args.folder / type(engine).__name__)
    finally:
        (args.folder / "final").touch()


if __name__ == "__main__":
    main()
