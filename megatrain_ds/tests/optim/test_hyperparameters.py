"""Which optimizers are served, what their live groups say, and what is refused by name."""

from __future__ import annotations

import pytest
import torch
from deepspeed.ops.adam import FusedAdam
from torch import nn

from megatrain_ds.errors import UnsupportedOptimizerError
from megatrain_ds.optim.adam import AdamStep
from megatrain_ds.optim.hyperparameters import adam_mode, make_holder, read_group


def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2))]


@pytest.mark.parametrize(
    ("optimizer", "decoupled"),
    [
        (torch.optim.AdamW(weights()), True),
        (torch.optim.Adam(weights()), False),
        (torch.optim.Adam(weights(), fused=True), False),
    ],
)
def test_adam_and_adamw_are_told_apart(optimizer, decoupled):
    assert adam_mode(optimizer) is decoupled


class MyAdam(torch.optim.Adam):
    """A subclass may compute something else."""


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop, MyAdam, torch.optim.NAdam])
def test_other_optimizers_are_refused_by_name(kind):
    with pytest.raises(UnsupportedOptimizerError, match=rf"{kind.__qualname__}.*no exact host update.*supported are"):
        adam_mode(kind(weights(), lr=0.1))


@pytest.mark.parametrize("option", ["amsgrad", "maximize", "differentiable"])
def test_options_without_a_host_update_are_refused_with_their_group(option):
    groups = [{"params": weights()}, {"params": weights(), option: True}]
    with pytest.raises(UnsupportedOptimizerError, match=rf"param_groups\[1\]\['{option}'\] = True.*Set {option}=False"):
        adam_mode(torch.optim.AdamW(groups))


def test_a_group_is_read_as_it_is_now():
    optimizer = torch.optim.AdamW(weights(), lr=0.5, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    (group,) = optimizer.param_groups
    expected = AdamStep(
        lr=0.5,
        beta1=0.8,
        beta2=0.95,
        eps=1e-6,
        weight_decay=0.1,
        decoupled=True,
        bias_correction=True,
        step=1,
        grad_scale=0.25,
    )
    assert read_group(group, decoupled=True, grad_scale=0.25) == expected
    group["lr"] = torch.tensor(0.125)
    group["bias_correction"] = False
    changed = read_group(group, decoupled=True, grad_scale=1.0)
    assert (changed.lr, changed.bias_correction, changed.grad_scale) == (0.125, False, 1.0)


@pytest.mark.parametrize(
    ("name", "settings", "decoupled"),
    [
        ("AdamW", {}, True),
        ("adam", {}, True),  # DeepSpeed reads "Adam" as AdamW
        ("Adam", {"adam_w_mode": False}, False),
        ("AdamW", {"adam_w_mode": False}, True),
        ("ADAMW", {"torch_adam": True, "fused": True, "fp32_optimizer_states": True}, True),
    ],
)
def test_the_block_of_the_configuration_becomes_a_holder(name, settings, decoupled):
    given = {"lr": 0.5, "betas": [0.8, 0.9], **settings}
    holder = make_holder(name, weights(), given)
    assert adam_mode(holder) is decoupled
    assert given == {"lr": 0.5, "betas": [0.8, 0.9], **settings}  # the caller's block is left alone
    assert read_group(holder.param_groups[0], decoupled=decoupled, grad_scale=1.0).beta1 == 0.8


def test_bias_correction_of_the_block_reaches_every_group():
    groups = [{"params": weights()}, {"params": weights(), "lr": 0.25}]
    holder = make_holder("AdamW", groups, {"lr": 0.5, "bias_correction": False})
    assert [(group["lr"], group["bias_correction"]) for group in holder.param_groups] == [(0.5, False), (0.25, False)]


def test_unknown_types_and_options_of_the_block_are_refused():
    with pytest.raises(UnsupportedOptimizerError, match="optimizer.type = 'Lion'.*supported are Adam and AdamW"):
        make_holder("Lion", weights(), {})
    with pytest.raises(UnsupportedOptimizerError, match=r"optimizer\.params = .*momentum.*Remove the option"):
        make_holder("AdamW", weights(), {"momentum": 0.9})


def test_deepspeeds_adam_is_served_by_its_own_mode():
    # FusedAdam builds its operator when constructed; only its type and its mode are read here.
    optimizer = FusedAdam.__new__(FusedAdam)
    torch.optim.Optimizer.__init__(optimizer, weights(), {"lr": 0.1})
    for mode in (1, 0):
        optimizer.adam_w_mode = mode
        assert adam_mode(optimizer) is bool(mode)


def test_auto_that_nobody_filled_in_is_refused_by_key() -> None:
    with pytest.raises(UnsupportedOptimizerError, match=r"optimizer\.params\.lr = 'auto'.*Set a number"):
        make_holder("AdamW", [torch.nn.Parameter(torch.zeros(2))], {"lr": "auto"})
