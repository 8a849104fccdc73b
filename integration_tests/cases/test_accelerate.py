"""Accelerate with optimizer and schedule from the JSON: `DummyOptim` and `DummyScheduler` stand in for them."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from integration_tests.cases.engines import Tensors, ds_config, masters
from integration_tests.cases.models import gpt2, token_batches

STEPS, WARMUP, RATE = 6, 3, 1e-2


pytestmark = pytest.mark.usefixtures("forget_frameworks")


def train(device: torch.device, *, flag: bool) -> tuple[Tensors, list[float]]:
    """Masters after a few steps, and the learning rate of every step."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DeepSpeedPlugin, DummyOptim, DummyScheduler

    AcceleratorState._reset_state(True)
    torch.manual_seed(3)
    config = ds_config(
        flag=flag,
        gradient_clipping=1.0,
        optimizer={"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
        scheduler={
            "type": "WarmupLR",
            "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
        },
    )
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    model = gpt2()
    optimizer = DummyOptim(model.parameters(), lr=RATE, weight_decay=0.01)
    scheduler = DummyScheduler(optimizer, total_num_steps=STEPS, warmup_num_steps=WARMUP)
    loader = DataLoader(torch.cat(token_batches(device, STEPS, rows=1)).cpu(), batch_size=1)  # type: ignore[arg-type]
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    assert type(model).__name__ == ("MegaTrainEngine" if flag else "DeepSpeedEngine")
    rates = []
    for ids in loader:
        accelerator.backward(model(input_ids=ids, labels=ids, use_cache=False).loss)
        rates.append(model.get_lr()[0])
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert model.global_steps == STEPS
    found = masters(model)
    model.destroy()
    return found, rates


def test_dummies_are_replaced_by_what_the_json_names(device, monkeypatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    ours, rates = train(device, flag=True)
    stock, expected = train(device, flag=False)
    assert rates == expected
    assert max(rates) == pytest.approx(RATE)
    assert rates[0] < rates[-1]
    differences = {name: (ours[name] - stock[name]).abs().max().item() for name in stock}
    assert max(differences.values()) < 1e-3 * RATE * STEPS
