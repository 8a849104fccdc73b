"""What the DeepSpeed systems share: one configuration with a few lines that differ, and one loop."""

from __future__ import annotations

from typing import Any

import torch

from comparisons.systems import Settings, SilentSystem

OFFLOAD = {"device": "cpu", "pin_memory": True}
# Buckets that were fastest on a 14B layer shape: large enough that no transfer is latency-bound.
TUNED = {
    "overlap_comm": True,
    "contiguous_gradients": True,
    "reduce_bucket_size": int(5e8),
    "stage3_prefetch_bucket_size": int(5e8),
    "stage3_max_live_parameters": int(2e9),
    "stage3_max_reuse_distance": int(2e9),
    "stage3_param_persistence_threshold": int(1e5),
    "sub_group_size": int(1e9),
}


def configuration(settings: Settings, zero: dict[str, Any], **top_level: Any) -> dict[str, Any]:
    """A ds_config for bf16 (fp32 where there is no GPU) with this "zero_optimization" block."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": settings.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": settings.clip,
        "zero_optimization": {"stage": 3, **zero},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": settings.learning_rate,
                "betas": list(settings.betas),
                "weight_decay": settings.weight_decay,
            },
        },
        "bf16": {"enabled": True},
        **top_level,
    }
    return config


class DeepSpeedSystem(SilentSystem):
    """Any engine behind `deepspeed.initialize`.

    Args:
        model: the model, on the host.
        config: the ds_config.
        expected: class name that the engine must have: a flag that nobody reads is not measured.
        recompute: switch the model's recompute on, without which large batches do not fit.
    """

    def __init__(
        self, model: Any, config: dict[str, Any], expected: str = "DeepSpeedEngine", *, recompute: bool = True
    ) -> None:
        import deepspeed

        if recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.engine: Any
        self.engine, *_ = deepspeed.initialize(model=model, config=config)
        self.name = type(self.engine).__name__
        if self.name != expected:
            raise RuntimeError(
                f"engine = {self.name}: {expected} was asked for. Install the package (pip install .) so that the flag "
                "is seen; `megatrain-ds doctor` says what is missing."
            )

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Forward, backward, step."""
        loss = self.engine(input_ids=tokens, labels=tokens).loss
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()


def build_zero3(model: Any, settings: Settings, zero: dict[str, Any]) -> DeepSpeedSystem:
    """An engine of ZeRO-3's.

    Args:
        model: the model, on the host.
        settings: options are {"compile": true}, {"recompute": false} (faster where memory allows it) and keys of
            "zero_optimization".
        zero: the "zero_optimization" block without the stage.
    """
    compiled, options = settings.compiled()
    recompute = options.pop("recompute", True)
    system = DeepSpeedSystem(model, configuration(settings, {**zero, **options}), recompute=recompute)
    if compiled:
        system.engine.compile()
    return system
