"""FSDP2 (fully_shard) with CPU offload: fp32 masters on the host, bf16 compute, fused AdamW on the host."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from comparisons.systems import Settings, SilentSystem


class Fsdp2System(SilentSystem):
    """One rank, sharded over itself, offloaded."""

    name = "fsdp2"

    def __init__(self, model: Any, settings: Settings) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

        use_cuda = torch.cuda.is_available()
        if not dist.is_initialized():
            # Clipping reduces norms of host tensors, which needs a host backend beside NCCL.
            dist.init_process_group("cpu:gloo,cuda:nccl" if use_cuda else "gloo")
        model = model.float()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        mesh = init_device_mesh("cuda" if use_cuda else "cpu", (1,))
        shared: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        }
        if use_cuda:
            shared["offload_policy"] = CPUOffloadPolicy()
        for block in model.model.layers:
            fully_shard(block, **shared)
        fully_shard(model, **shared)
        self.model, self.clip = model, settings.clip
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Forward, backward, clip, step."""
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if self.clip > 0.0:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def build(model: Any, settings: Settings) -> Fsdp2System:
    """The sharded model."""
    return Fsdp2System(model, settings)
