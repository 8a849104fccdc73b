"""The `megatrain` block of a DeepSpeed configuration: its fields, defaults and rules.

Knows nothing of DeepSpeed's own keys (see `compatibility`) nor of what an engine makes of a setting.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from megatrain_ds.errors import MegaTrainWarning, explain

ENGINE_KEY = "offload_engine"
"""Top-level key of a DeepSpeed configuration that chooses the engine."""

ENGINE_NAME = "megatrain"
"""The value of `ENGINE_KEY` that chooses this package's engine."""

BLOCK_KEY = "megatrain"
"""Top-level key of the optional block that `MegaTrainConfig` parses."""


class MegaTrainConfig(BaseModel):
    """Settings of the streaming engine. Every field may be left out; "auto" is not a value of any."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    weight_slots: int = Field(
        default=2,
        ge=2,
        description="Device buffers that weights stream through, a count. Costs slots x the largest unit's bytes of "
        "device memory; prefetch runs slots - 1 units ahead.",
    )
    gradient_slots: int = Field(
        default=2,
        ge=1,
        description="Device buffers that gradients leave through, a count. Costs slots x the largest unit's gradient "
        "bytes of device memory; with 1, a unit's backward waits until the one before has left.",
    )
    synchronous: bool = Field(
        default=False,
        description="Debugging: wait for every copy and kernel. Same bits, no overlap.",
    )
    finite_check: bool = Field(
        default=True,
        description="A gradient that is not finite skips the step and leaves all state as it was. With it and "
        "gradient clipping both off, updates start as gradients arrive.",
    )
    pin_memory: bool = Field(
        default=True,
        description="Page-lock the host copies that the device reads and writes. Off: pageable memory, slower copies "
        "that do not overlap.",
    )
    units: tuple[str, ...] | None = Field(
        default=None,
        description="Class names or module paths of the repeated blocks to stream. None: found in the model.",
    )
    activations: Literal["recompute", "keep"] = Field(
        default="recompute",
        description='What backward does about a unit\'s activations: "recompute" them from its inputs, or "keep" them '
        "on the device.",
    )
    compile: bool = Field(
        default=False,
        description="torch.compile the forward of each unit, one graph for all units of a class. Sums are ordered "
        "otherwise than without it. A unit's gradients then arrive together: one more unit's gradient bytes of device "
        "memory.",
    )
    update_kernel: Literal["native", "torch", "deepspeed"] = Field(
        default="native",
        description='What runs the host update: the fused "native" kernel, plain "torch" operations, or '
        '"deepspeed" (DeepSpeedCPUAdam, for bit comparisons).',
    )
    update_threads: int | None = Field(
        default=None,
        ge=1,
        description="Threads of the host update, a count. None: chosen from the cores this process may use.",
    )
    defer_moments: bool = Field(
        default=True,
        description="With gradient clipping or the finite check: where the forward waits for updates, write weights "
        "first and moments of some units after all weights. Same bits. Off: one pass a unit.",
    )
    host_memory_limit_gib: float | None = Field(
        default=None,
        gt=0,
        description="Host memory the engine may plan for, in GiB; more is refused before allocating. None: what the "
        "machine has available.",
    )
    trace_file: str | None = Field(
        default=None,
        min_length=1,
        description="Path of a Chrome trace that the engine writes. None: no trace.",
    )
    trace_after: int = Field(
        default=2,
        ge=0,
        description="Optimizer steps left out before the trace begins, a count. Needs trace_file.",
    )
    trace_steps: int = Field(
        default=3,
        ge=1,
        description="Optimizer steps in the trace, a count. Needs trace_file.",
    )

    @field_validator("units", mode="before")
    @classmethod
    def _list_to_tuple(cls, value: object) -> object:
        """JSON has lists only; strict parsing wants the tuple."""
        return tuple(value) if isinstance(value, list) else value

    @field_validator("units")
    @classmethod
    def _units_named(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if value is not None and (not value or not all(value)):
            raise ValueError("names at least one class or module path, none of them empty")
        return value

    @classmethod
    def from_deepspeed(cls, ds_config: Any) -> MegaTrainConfig:
        """Parse the `megatrain` block of a DeepSpeed configuration.

        Args:
            ds_config: A `DeepSpeedConfig`, or the dict it was parsed from.

        Returns:
            The settings; all defaults when there is no block.

        Raises:
            EngineConfigError: The block is no object, or a field is unknown, "auto", of the wrong type or out of
                range.
        """
        block = read_param_dict(ds_config).get(BLOCK_KEY, {})
        if not isinstance(block, Mapping):
            raise _error(BLOCK_KEY, block, "is an object of settings", f'Write "{BLOCK_KEY}": {{...}} or leave it out')
        _refuse_auto(BLOCK_KEY, block)
        try:
            parsed = cls(**block)
        except ValidationError as failure:
            raise _explain_validation(failure) from None
        _warn_without_effect(parsed)
        return parsed


def read_param_dict(ds_config: Any) -> Mapping[str, Any]:
    """Return the top-level keys of a parsed or raw DeepSpeed configuration; empty when it is neither."""
    param_dict = getattr(ds_config, "_param_dict", ds_config)
    return param_dict if isinstance(param_dict, Mapping) else {}


def suggest(name: object, valid: list[str]) -> str:
    """Return 'Did you mean "x"? ' for the closest valid name, or an empty string."""
    close = difflib.get_close_matches(name.lower(), valid, n=1) if isinstance(name, str) else []
    return f'Did you mean "{close[0]}"? ' if close else ""


def _error(name: str, value: object, rule: str, action: str) -> Exception:
    # Built on use: the class imports DeepSpeed.
    from megatrain_ds.errors import EngineConfigError

    return EngineConfigError(explain(name, value, rule, action))


def _refuse_auto(path: str, value: object) -> None:
    """Raise for the string "auto" anywhere below `path`; Accelerate fills only keys that it knows."""
    if value == "auto":
        raise _error(path, value, '"auto" is not filled in for this block', "Leave the setting out to have it planned")
    if isinstance(value, Mapping):
        for key, item in value.items():
            _refuse_auto(f"{path}.{key}", item)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _refuse_auto(f"{path}[{index}]", item)


def _explain_validation(failure: ValidationError) -> Exception:
    """Turn pydantic's first complaint into one of ours; the rest would only repeat the pattern."""
    first = failure.errors()[0]
    field = str(first["loc"][0]) if first["loc"] else BLOCK_KEY
    name = ".".join([BLOCK_KEY, *map(str, first["loc"])])
    fields = list(MegaTrainConfig.model_fields)
    if first["type"] == "extra_forbidden":
        action = f"{suggest(field, fields)}Use one of: {', '.join(fields)}"
        return _error(name, first["input"], "is not a setting of this block", action)
    described = MegaTrainConfig.model_fields[field]
    rule = first["msg"].removeprefix("Value error, ")
    action = f"Set it as described ({described.description}) or leave it out for the default {described.default!r}"
    return _error(name, first["input"], rule, action)


def _warn_without_effect(config: MegaTrainConfig) -> None:
    for name in ("trace_after", "trace_steps"):
        if name in config.model_fields_set and config.trace_file is None:
            text = explain(
                f"{BLOCK_KEY}.{name}",
                getattr(config, name),
                "has no effect without a trace file",
                f'Set "{BLOCK_KEY}.trace_file" or remove it',
            )
            warnings.warn(text, MegaTrainWarning, stacklevel=3)
