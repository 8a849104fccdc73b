"""Plain PyTorch: bf16 model with recompute, fp32 masters and torch AdamW beside it: the reference for losses."""

from __future__ import annotations

from typing import Any

import torch

from comparisons.systems import Settings, SilentSystem, compile_layers


class PlainSystem(SilentSystem):
    """Everything on the device."""

    name = "plain"

    def __init__(self, model: Any, settings: Settings) -> None:
        self.model = model.to("cuda" if torch.cuda.is_available() else "cpu")
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if settings.compiled()[0]:
            compile_layers(self.model)
        self.parameters = [param for param in self.model.parameters() if param.requires_grad]
        self.masters = [torch.nn.Parameter(param.detach().float()) for param in self.parameters]
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=settings.learning_rate, betas=settings.betas, weight_decay=settings.weight_decay
        )
        self.clip = settings.clip

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Forward, backward, clip, AdamW on the masters, round to the model."""
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        for param, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None if param.grad is None else param.grad.float()
            param.grad = None
        if self.clip > 0.0:
            torch.nn.utils.clip_grad_norm_(self.masters, self.clip)
        self.optimizer.step()
        with torch.no_grad():
            for param, master in zip(self.parameters, self.masters, strict=True):
                param.copy_(master)
        return loss.detach()


def build(model: Any, settings: Settings) -> PlainSystem:
    """The model on the device, with masters beside it; options: {"compile": true}."""
    return PlainSystem(model, settings)
