"""Models that were built under a bare `deepspeed.zero.Init()`: their parameters become full tensors again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import deepspeed
import torch

if TYPE_CHECKING:
    from torch import nn


def gather_partitioned(model: nn.Module) -> None:
    """Gather every partitioned parameter to the host and strip what partitioning left on it.

    Args:
        model: a module; parameters without `ds_id` are left alone.
    """
    for param in model.parameters():
        if not hasattr(param, "ds_id"):
            continue
        with deepspeed.zero.GatheredParameters([param]):
            full = param.data.detach().to("cpu", copy=True)
        for name in [name for name in vars(param) if name.startswith("ds_")]:
            delattr(param, name)
        for name in ("all_gather", "partition", "reduce_gradients_at_owner", "partition_gradients"):
            vars(param).pop(name, None)
        with torch.no_grad():
            param.data = full
