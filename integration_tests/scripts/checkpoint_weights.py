"""What the checkpoint programs share: one hash of a model's weights."""

from __future__ import annotations

import hashlib

import torch


def hash_weights(state: dict[str, torch.Tensor]) -> str:
    """One hash over every tensor of a state dict, whatever the order of the names."""
    found = hashlib.sha256()
    for name in sorted(state):
        found.update(name.encode())
        found.update(state[name].detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
