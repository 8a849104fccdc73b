"""The systems that are compared, one module each.

A module offers `build(model, settings) -> System`; what it needs is imported there, so that a missing package is a
result of that system and of no other.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Protocol

import torch

SYSTEMS = {
    "megatrain": "this engine, pure streaming",
    "zero3": "DeepSpeed ZeRO-3, parameters and optimizer offloaded, buckets tuned",
    "zero3_default": "the same with DeepSpeed's default buckets",
    "zero3_optimizer": "ZeRO-3, optimizer offloaded only",
    "zero3_superoffload": "ZeRO-3 with super_offload",
    "fsdp2": "FSDP2 with CPU offload and fused AdamW",
    "resident": "no offload and no optimizer: forward and backward with recompute, the ceiling",
    "plain": "plain PyTorch with fp32 masters and AdamW on the device: the reference for losses",
    "reference": "the paper authors' code, from a path that the user gives",
}


@dataclass(frozen=True)
class Settings:
    """What every system of a comparison shares.

    Attributes:
        batch: sequences a step.
        sequence: tokens a sequence.
        clip: gradient clipping; 0 for none.
        learning_rate: AdamW's.
        weight_decay: AdamW's.
        betas: AdamW's.
        options: options of one system (the megatrain block, for instance).
        reference_path: where the paper authors' code lies, for the system "reference".
        steps_before_breakdown: steps to leave out before a breakdown is recorded: warm-up and timed ones.
    """

    batch: int
    sequence: int
    clip: float
    learning_rate: float
    weight_decay: float
    betas: tuple[float, float]
    options: dict[str, Any]
    reference_path: str | None = None
    steps_before_breakdown: int = 0

    def compiled(self) -> tuple[bool, dict[str, Any]]:
        """Whether `options` asks for compiled layers ({"compile": true}), and the other options."""
        options = dict(self.options)
        return bool(options.pop("compile", False)), options


class System(Protocol):
    """One system with a model in it.

    Attributes:
        name: what ran, for the record.
        breakdown_steps: untimed steps that `breakdown` needs after `Settings.steps_before_breakdown`.
    """

    name: str
    breakdown_steps: int

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """One optimizer step on tokens [batch, sequence] (int64, on the device); returns the loss (0-d, detached)."""
        ...

    def drain(self) -> None:
        """Wait for work that outlives `step` and that synchronising the device does not cover."""

    def report(self) -> dict[str, Any]:
        """What the system says of its own memory."""
        ...

    def breakdown(self) -> list[dict[str, Any]]:
        """Where the time of untimed steps went, an entry a step; empty for a system that does not tell."""
        ...


class SilentSystem:
    """What a system says that leaves nothing behind a step and counts nothing."""

    name: str
    breakdown_steps = 0

    def drain(self) -> None:
        """Nothing is under way."""

    def report(self) -> dict[str, Any]:
        """Nothing of its own."""
        return {}

    def breakdown(self) -> list[dict[str, Any]]:
        """Not told."""
        return []


def compile_layers(model: Any) -> None:
    """Compile each block of a decoder in place, one graph for all (inside recompute)."""
    for block in model.model.layers:
        block.compile()


def load(name: str) -> Any:
    """The module of a system.

    Raises:
        ValueError: no such system.
        ImportError: a package it needs is missing.
    """
    if name not in SYSTEMS:
        raise ValueError(f"system = {name!r}: no such system. Choose from {', '.join(SYSTEMS)}.")
    return importlib.import_module(f"comparisons.systems.{name}")
