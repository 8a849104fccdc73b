"""Which optimizers have a host update, and what their groups say now.

The optimizer object that the user, Accelerate or the configuration made is kept as the holder of live groups:
schedulers write to it, and every step reads it. Its own `step` is never called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from megatrain_ds.errors import UnsupportedOptimizerError, explain
from megatrain_ds.optim.kernel import AdamStep

if TYPE_CHECKING:
    from collections.abc import Mapping

_REFUSED_OPTIONS = ("amsgrad", "maximize", "differentiable")


def adam_mode(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer decouples weight decay (AdamW) or not (Adam).

    Args:
        optimizer: the user's optimizer.

    Returns:
        True for AdamW, False for Adam with L2.

    Raises:
        UnsupportedOptimizerError: any other type, or an option without a host update.
    """
    kind = type(optimizer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind is torch.optim.AdamW:
        decoupled = True
    elif kind is torch.optim.Adam:
        decoupled = bool(optimizer.defaults.get("decoupled_weight_decay", False))
    elif name in ("deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam", "deepspeed.ops.adam.fused_adam.FusedAdam"):
        decoupled = bool(getattr(optimizer, "adam_w_mode", True))
    else:
        raise UnsupportedOptimizerError(
            explain(
                "optimizer",
                name,
                "has no exact host update here; supported are torch.optim.Adam and AdamW, DeepSpeedCPUAdam, FusedAdam, "
                'and "Adam" or "AdamW" in the DeepSpeed configuration',
                "Use one of them, or remove the offload_engine key to train with stock ZeRO-3",
            )
        )
    for index, group in enumerate(optimizer.param_groups):
        for option in _REFUSED_OPTIONS:
            if group.get(option):
                raise UnsupportedOptimizerError(
                    explain(
                        f"optimizer.param_groups[{index}][{option!r}]",
                        group[option],
                        "is not part of the host update",
                        f"Set {option}=False",
                    )
                )
    return decoupled


def read_group(group: Mapping[str, Any], *, decoupled: bool, grad_scale: float) -> AdamStep:
    """What a group asks for now, as the kernel takes it (`step` is filled in per parameter).

    Args:
        group: a live param group; "lr" may be a float or a 0-d tensor.
        decoupled: AdamW or Adam.
        grad_scale: factor for every gradient element.
    """
    beta1, beta2 = group["betas"]
    return AdamStep(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        decoupled=decoupled,
        bias_correction=bool(group.get("bias_correction", True)),
        step=1,
        grad_scale=grad_scale,
    )


def make_holder(name: str, parameters: Any, settings: Mapping[str, Any]) -> torch.optim.Optimizer:
    """The optimizer that a configuration's "optimizer" block names, as a holder of groups.

    Args:
        name: "adam" or "adamw", any case.
        parameters: parameters or groups.
        settings: the block's "params", DeepSpeed's own keys included.

    Raises:
        UnsupportedOptimizerError: another type, or an option that Adam does not have.
    """
    settings = dict(settings)
    kind = name.lower()
    if kind not in ("adam", "adamw"):
        raise UnsupportedOptimizerError(
            explain(
                "optimizer.type",
                name,
                "has no exact host update here; supported are Adam and AdamW",
                'Set "type": "AdamW", or remove the offload_engine key to train with stock ZeRO-3',
            )
        )
    for key, value in settings.items():
        if value == "auto":
            raise UnsupportedOptimizerError(
                explain(
                    f"optimizer.params.{key}",
                    value,
                    'only Trainer and Accelerate fill in "auto", and nobody did',
                    "Set a number",
                )
            )
    # DeepSpeed reads "Adam" as AdamW unless adam_w_mode says otherwise.
    decoupled = kind == "adamw" or bool(settings.pop("adam_w_mode", True))
    settings.pop("adam_w_mode", None)
    for without_effect in ("torch_adam", "fused", "foreach", "fp32_optimizer_states"):
        settings.pop(without_effect, None)
    bias_correction = settings.pop("bias_correction", True)
    try:
        holder = (torch.optim.AdamW if decoupled else torch.optim.Adam)(parameters, **settings)
    except TypeError as error:
        raise UnsupportedOptimizerError(
            explain("optimizer.params", settings, f"{error}", "Remove the option from the optimizer block")
        ) from error
    for group in holder.param_groups:
        group.setdefault("bias_correction", bias_correction)
    return holder
