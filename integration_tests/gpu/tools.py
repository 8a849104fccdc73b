"""Engines and runs for the CUDA tests."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM


@dataclass
class Run:
    """What a run left behind: losses, final weights, and the engine's own report."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    report: dict[str, Any] = field(default_factory=dict)
    engine_class: str = ""


def small_model(layers: int = 6, hidden: int = 256, attention: str = "sdpa") -> torch.nn.Module:
    """A Llama decoder whose weights depend on nothing but its size."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        use_cache=False,
    )
    config._attn_implementation = attention
    return LlamaForCausalLM(config)


def engine_of(
    model: torch.nn.Module, precision: str, *, accumulation: int = 1, clip: float = 1.0, block: dict[str, Any] | None
) -> Any:
    """An engine with the flag and this block, or stock ZeRO-3 offload for None."""
    offload = {"device": "cpu", "pin_memory": True}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": 3, "offload_optimizer": offload, "offload_param": offload},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    if block is not None:
        config |= {"offload_engine": "megatrain", "megatrain": block}
    return deepspeed.initialize(model=model, config=config)[0]


def batches(count: int, rows: int = 4, length: int = 32) -> list[torch.Tensor]:
    """Token batches on the device, the same in every run."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 256, (rows, length), generator=generator).cuda() for _ in range(count)]


def train(
    precision: str,
    *,
    steps: int,
    accumulation: int = 1,
    clip: float = 1.0,
    block: dict[str, Any] | None,
    attention: str = "sdpa",
) -> Run:
    """Train the small model and take the engine down."""
    engine = engine_of(small_model(attention=attention), precision, accumulation=accumulation, clip=clip, block=block)
    losses = []
    for tokens in batches(steps * accumulation):
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    run = Run(
        losses=[float(loss) for loss in losses],
        weights=engine._zero3_consolidated_16bit_state_dict(),
        report=engine.memory_report() if block is not None else {},
        engine_class=type(engine).__name__,
    )
    engine.destroy()
    gc.collect()
    return run


def same_bits(a: Run, b: Run) -> bool:
    """Whether losses and every final weight agree to the bit."""
    return a.losses == b.losses and all(torch.equal(a.weights[name], b.weights[name]) for name in a.weights)
