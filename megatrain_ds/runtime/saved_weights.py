"""Keeps activations but not weights: what autograd saves of a slot becomes a placeholder.

The policy "keep": no recompute, activations stay on the device, and a placeholder's first unpack in backward fetches
the unit's weights again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from megatrain_ds.runtime.executor import Executor, UnitCall


@dataclass(frozen=True)
class _Placeholder:
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    byte_offset: int


class SavedWeights(torch.autograd.graph.saved_tensors_hooks):
    """Saved-tensor hooks for one forward of a unit.

    Args:
        call: the forward.
        views: the unit's weights in the slot it runs on.
        executor: fetches the weights again in backward.
    """

    def __init__(self, call: UnitCall, views: Sequence[torch.Tensor], executor: Executor) -> None:
        slot = views[0].untyped_storage().data_ptr() if views else 0

        def pack(tensor: torch.Tensor) -> Any:
            if tensor.layout != torch.strided or tensor.untyped_storage().data_ptr() != slot:
                return tensor
            offset = int(tensor.storage_offset()) * tensor.element_size()
            return _Placeholder(tensor.dtype, tuple(tensor.size()), tuple(tensor.stride()), offset)

        def unpack(packed: Any) -> torch.Tensor:
            if not isinstance(packed, _Placeholder):
                return packed
            storage = executor.backward_weights(call)[0].untyped_storage()
            flat = torch.empty(0, dtype=packed.dtype, device=storage.device)
            return flat.set_(storage, packed.byte_offset // packed.dtype.itemsize, packed.size, packed.stride)

        super().__init__(pack, unpack)
