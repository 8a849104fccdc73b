"""LoRA on a frozen base: only adapters move, and nothing is spent on what is frozen."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from integration_tests.cases.engines import (
    assert_same_bits,
    gradients,
    plain_gradients,
    train,
)
from integration_tests.cases.models import causal_loss, llama, token_batches

EAGER = {"attn_implementation": "eager"}
BOTH = pytest.mark.parametrize("activations", ["recompute", "keep"])


def lora(base: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj"],
        modules_to_save=["lm_head"],
        layers_to_transform=[0, 1, 3],
        layers_pattern="layers",
        lora_dropout=0.0,
        init_lora_weights=False,
    )
    return get_peft_model(base, settings, autocast_adapter_dtype=True)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_lora(start, device, accumulation) -> None:
    """bf16 base, fp32 adapters, a trained copy of the head, one layer without any adapter, frozen embedding."""
    model = lora(llama().to(torch.bfloat16))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    twin = copy.deepcopy(model).to(device)
    frozen = {name: param.clone() for name, param in model.named_parameters() if not param.requires_grad}
    engine = start(
        model,
        bf16=None,
        gradient_accumulation_steps=accumulation,
        model_parameters=[param for param in model.parameters() if param.requires_grad],
    )
    copied: list[int] = []
    copy_once = engine.runtime.streams.copy

    def counted(flow: str, pairs: Any, **kwargs: Any) -> Any:
        copied.extend(target.numel() * target.element_size() for target, _ in pairs if flow == "d2h")
        return copy_once(flow, pairs, **kwargs)

    engine.runtime.streams.copy = counted
    for ids in token_batches(device, 1):
        twin(input_ids=ids, labels=ids).loss.backward()
        engine.backward(engine(input_ids=ids, labels=ids).loss, scale_wrt_gas=False)
        assert_same_bits(gradients(engine), plain_gradients(twin))
    trainable = [param for param in twin.parameters() if param.requires_grad]
    assert 0 < sum(copied) <= 1.1 * sum(param.numel() * param.element_size() for param in trainable) + 256 * 16
    engine.is_gradient_accumulation_boundary()
    engine.set_gradient_accumulation_boundary(True)
    engine.step()
    changed = [n for n, p in engine.module.named_parameters() if not torch.equal(p, dict(twin.named_parameters())[n])]
    assert changed
    assert not set(changed) & set(frozen)
    assert_same_bits({n: p.detach() for n, p in engine.module.named_parameters() if n in frozen}, frozen)
    state_numel = sum(layout.state_numel for layout in engine.runtime.layouts)
    count = sum(param.numel() for param in trainable)
    assert state_numel <= 1.1 * count + 64 * len(trainable)


def test_lora_adapter_loads_in_plain_peft(start, device, tmp_path) -> None:
    from peft import PeftModel

    base = llama()
    untouched = copy.deepcopy(base)
    engine = start(lora(base))
    ids = token_batches(device, 1)[0]
    train(engine, [ids] * 2, causal_loss)
    engine.module.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(untouched, tmp_path).to(device).eval()
    engine.eval()
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, engine.module(input_ids=ids).logits)
