"""What a forward hands to its caller: tensors apart from the graph's own.

DeepSpeed scales gradients by hooks on what the caller gets. Were that the very tensors of the graph, a loss computed
from the logits inside the model would be scaled at both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map

_COPIED_NUMEL = 1 << 12
"""Up to here a copy costs nothing. Trainer scales the loss in place, and writing a view in place drops its hooks."""


def hand_out(output: Any) -> Any:
    """Return an output, a nest of containers, with each tensor that has a graph copied or, if it is large, viewed."""
    return tree_map(_apart, output)


def _apart(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.grad_fn is None:
        return value
    return value.clone() if value.numel() <= _COPIED_NUMEL else value.view_as(value)
