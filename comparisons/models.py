"""The models that systems are compared on: random weights that depend on a seed alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch


def build_model(path: Path, device: torch.device, seed: int = 0) -> Any:
    """A bf16 model on the host with weights that depend on the seed alone.

    Weights are drawn on the device (billions of normals take minutes on a host) and copied parameter by parameter.
    """
    model = build_skeleton(path)
    model.to_empty(device="cpu")
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.dim() < 2:
                param.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                values = torch.empty(param.shape, dtype=param.dtype, device=device)
                param.copy_(values.normal_(0.0, 0.02, generator=generator))
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name == "rotary_emb":
                setattr(module, name, type(child)(config=model.config))
    return model.train()


def build_skeleton(path: Path) -> Any:
    """The model of a configuration file, bf16, on the meta device: shapes without memory.

    Args:
        path: JSON with "model_type" and what that type's configuration class takes.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**json.loads(path.read_text()))
    config.use_cache = False
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
