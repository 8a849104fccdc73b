"""No offload and no optimizer: forward and backward with recompute on the device, the ceiling."""

from __future__ import annotations

from typing import Any

import torch

from comparisons.systems import Settings, SilentSystem, compile_layers


class ResidentSystem(SilentSystem):
    """The whole model on the device; gradients are dropped."""

    name = "resident"

    def __init__(self, model: Any, settings: Settings) -> None:
        self.model = model.to("cuda" if torch.cuda.is_available() else "cpu")
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if settings.compiled()[0]:
            compile_layers(self.model)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Forward and backward."""
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self.model.zero_grad(set_to_none=True)
        return loss.detach()


def build(model: Any, settings: Settings) -> ResidentSystem:
    """The model on the device; options: {"compile": true}."""
    return ResidentSystem(model, settings)
