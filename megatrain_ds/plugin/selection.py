"""Reads which engine a DeepSpeed configuration asks for.

Knows the key and its valid values, not what is built for them.
"""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Mapping
from typing import Any

from megatrain_ds.config import BLOCK_KEY, ENGINE_KEY, ENGINE_NAME, suggest
from megatrain_ds.errors import MegaTrainWarning, explain

VALID_ENGINES = (ENGINE_NAME,)
"""Names that the key takes; DeepSpeed's own engine is chosen by leaving the key out."""

_CLOSE = 0.8
# Similarity (difflib) from which a key is taken for a misspelling: DeepSpeed's own top-level keys stay below 0.6.

COMPARE_VARIABLE = "MEGATRAIN_DS_COMPARE"
"""Environment variable by which `megatrain-ds compare` reaches the programs it starts; its value is a file's path."""


def selects_megatrain(param_dict: Mapping[str, Any]) -> bool:
    """Tell whether the top-level keys of a configuration choose this package's engine.

    In a program started by `megatrain-ds compare` the key counts as present in one run and as absent in the other.

    Args:
        param_dict: The keys as written by the user.

    Raises:
        EngineConfigError: The key holds anything but a valid engine name.
    """
    compared = _compared_choice() if COMPARE_VARIABLE in os.environ else None
    if compared is False:
        return False
    if ENGINE_KEY not in param_dict:
        if compared:
            return True
        _warn_of_near_misses(param_dict)
        return False
    value = param_dict[ENGINE_KEY]
    if isinstance(value, str) and value in VALID_ENGINES:
        return True
    raise _unknown_engine(value)


def _compared_choice() -> bool:
    from megatrain_ds.plugin.compare_spec import current_spec

    return current_spec().flag


def _warn_of_near_misses(param_dict: Mapping[str, Any]) -> None:
    """Say it where somebody meant this engine and DeepSpeed, which ignores unknown keys, will not get it."""
    if BLOCK_KEY in param_dict:
        action = f'Add "{ENGINE_KEY}": "{ENGINE_NAME}" or remove the block'
        _warn(BLOCK_KEY, param_dict[BLOCK_KEY], f'has no effect without "{ENGINE_KEY}"', action)
    for key, value in param_dict.items():
        if value in VALID_ENGINES or difflib.get_close_matches(str(key), [ENGINE_KEY], cutoff=_CLOSE):
            action = f'Write "{ENGINE_KEY}": "{ENGINE_NAME}" for this engine, or rename or remove the key'
            _warn(key, value, "is no key of DeepSpeed's and has no effect", action)
        if isinstance(value, Mapping) and ENGINE_KEY in value:
            action = f'Move "{ENGINE_KEY}" out of "{key}", to the top level of the configuration'
            _warn(f"{key}.{ENGINE_KEY}", value[ENGINE_KEY], f'chooses no engine inside "{key}"', action)


def _warn(name: str, value: object, rule: str, action: str) -> None:
    warnings.warn(explain(name, value, rule, action), MegaTrainWarning, stacklevel=5)


def _unknown_engine(value: object) -> Exception:
    from megatrain_ds.errors import EngineConfigError

    valid = ", ".join(f'"{name}"' for name in VALID_ENGINES)
    action = f"{suggest(value, list(VALID_ENGINES))}Set a valid name, or remove the key for DeepSpeed's own engine"
    return EngineConfigError(explain(ENGINE_KEY, value, f"is not an engine; valid names: {valid}", action))
