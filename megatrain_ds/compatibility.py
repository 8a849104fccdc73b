"""Applies the table of DeepSpeed's own keys: refused by name, without effect, honoured, or of no consequence here.

Reads the parsed configuration; knows no engine. A key that a DeepSpeed version does not have reads as absent.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from enum import Enum
from typing import Any

from megatrain_ds.config import BLOCK_KEY, read_param_dict
from megatrain_ds.deepspeed_keys import REFUSED, WITHOUT_EFFECT, KeyRule
from megatrain_ds.errors import MegaTrainWarning, explain

HONOURED = frozenset(
    ["stage", "sub_group_size", "gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"]
)
"""Keys of `zero_optimization` that mean what they mean in ZeRO-3."""

IMMATERIAL = frozenset(
    [
        "contiguous_gradients",
        "reduce_scatter",
        "reduce_bucket_size",
        "use_multi_rank_bucket_allreduce",
        "allgather_partitions",
        "allgather_bucket_size",
        "overlap_comm",
        "compute_grad_norm",
        "load_from_fp32_weights",
        "elastic_checkpoint",
        "cpu_offload",
        "cpu_offload_param",
        "cpu_offload_use_pin_memory",
        "offload_param",
        "offload_optimizer",
        "prefetch_bucket_size",
        "param_persistence_threshold",
        "model_persistence_threshold",
        "max_live_parameters",
        "max_reuse_distance",
        "module_granularity_threshold",
        "use_all_reduce_for_fetch_params",
        "allgather_sequential",
        "ignore_unused_parameters",
        "legacy_stage1",
        "round_robin_gradients",
        "parameter_alignment",
        "memory_efficient_linear",
        "pipeline_loading_checkpoint",
        "override_module_apply",
        "log_trace_cache_warnings",
        "enable_sanity_checks",
        "save_muon_momentum_buffer_in_memory",
    ]
)
"""Keys of `zero_optimization` that tune ZeRO-3's own machinery: accepted without a word, so that the flag is the only
line that differs. `offload_param` and `offload_optimizer` have rules of their own in the table."""


def check_deepspeed_config(config: Any) -> None:
    """Refuse what the engine does not do and warn of what has no effect.

    Args:
        config: The parsed `DeepSpeedConfig`.

    Raises:
        EngineConfigError: For the first refused key, with its value and what to write instead.
    """
    refuse_unsupported(config)
    _refuse_unfilled_clipping(config)
    for rule in WITHOUT_EFFECT:
        value = read_key(config, rule)
        if value is not None and value not in rule.harmless:
            _warn(explain(rule.key, value, f"has no effect, {rule.reason}", rule.action))
    _warn_of_finite_check(config)
    for name in _unknown_zero_keys(config):
        _warn(explain(f"zero_optimization.{name}", "set", "is not known to this engine and has no effect", "Remove it"))


def refuse_unsupported(config: Any) -> None:
    """Raise for the first key in `REFUSED` whose value is not harmless; warns of nothing.

    Args:
        config: The parsed `DeepSpeedConfig`.

    Raises:
        EngineConfigError: With the key, its value, the reason and what to write instead.
    """
    from megatrain_ds.errors import EngineConfigError

    for rule in REFUSED:
        value = read_key(config, rule)
        if value is not None and value not in rule.harmless:
            rule_text = f'does not go with "offload_engine": "megatrain": {rule.reason}'
            raise EngineConfigError(explain(rule.key, value, rule_text, rule.action))


def check_world_size(world_size: int) -> None:
    """Refuse more than one rank.

    Args:
        world_size: Number of ranks that train together.

    Raises:
        EngineConfigError: When it is more than one.
    """
    from megatrain_ds.errors import EngineConfigError

    if world_size > 1:
        rule = '"offload_engine": "megatrain" trains on one rank for now'
        action = 'Start one process (for example --num_gpus 1 or --num_processes 1), or remove "offload_engine"'
        raise EngineConfigError(explain("world size", world_size, rule, action))


def read_key(config: Any, rule: KeyRule) -> Any:
    """Return the value a rule is about, plain for an enum member; None where this DeepSpeed has no such key.

    Args:
        config: The parsed `DeepSpeedConfig`.
        rule: The rule whose `attribute` is followed.
    """
    path = rule.attribute.removeprefix("json:")
    value = config if path == rule.attribute else read_param_dict(config)
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
    return value.value if isinstance(value, Enum) else value


def _refuse_unfilled_clipping(config: Any) -> None:
    """Refuse a left-over "auto"; not in `refuse_unsupported`, which also runs before Accelerate has filled it in."""
    from megatrain_ds.errors import EngineConfigError

    clipping = config.gradient_clipping
    if isinstance(clipping, bool) or not isinstance(clipping, int | float):
        raise EngineConfigError(explain("gradient_clipping", clipping, "is a number", "Set it, 0 for no clipping"))


def _warn_of_finite_check(config: Any) -> None:
    """Tell that the check cannot be switched off where every gradient's norm is measured anyway."""
    block = read_param_dict(config).get(BLOCK_KEY)
    if not isinstance(block, Mapping) or block.get("finite_check") is not False:
        return
    causes = {
        f'"gradient_clipping" is {config.gradient_clipping} (1.0 where it is left out)': config.gradient_clipping > 0,
        '"fp16" scales the loss': read_param_dict(config).get("fp16", {}).get("enabled") is True,
    }
    for cause, holds in causes.items():
        if holds:
            rule = f"has no effect: {cause}, which needs the norms of all gradients before any update"
            _warn(explain(f"{BLOCK_KEY}.finite_check", False, rule, 'Set "gradient_clipping": 0.0, or remove it'))
            return


def _unknown_zero_keys(config: Any) -> list[str]:
    """List the fields of `zero_optimization` that were set and that no table here names."""
    known = {rule.key.split(".")[1] for rule in (*REFUSED, *WITHOUT_EFFECT) if rule.key.startswith("zero_opt")}
    return sorted(set(config.zero_config.model_fields_set) - known - HONOURED - IMMATERIAL)


def _warn(text: str) -> None:
    warnings.warn(text, MegaTrainWarning, stacklevel=3)
