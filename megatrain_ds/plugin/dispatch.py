"""Gives `DeepSpeedEngine` a `__new__` that builds this package's engine when the configuration asks for it.

`deepspeed.initialize` stays as it is: each of its routes (dict, path, base64, `config_params`,
`args.deepspeed_config`) ends in a constructor call that carries the parsed configuration.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from megatrain_ds.config import ENGINE_KEY, ENGINE_NAME, read_param_dict
from megatrain_ds.errors import UnsupportedVersionError, explain
from megatrain_ds.plugin.selection import COMPARE_VARIABLE, selects_megatrain

CONFIG_PARAMETERS = ("config_class", "config")
"""Constructor parameters that may carry the configuration; the parsed one first."""


def install(module: ModuleType) -> None:
    """Hook `deepspeed.runtime.engine`.

    Args:
        module: The imported module.
    """
    stock = module.DeepSpeedEngine

    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        chosen = choose_class(stock, cls, args, kwargs)
        following: Any = super(stock, cls).__new__
        if following is object.__new__:
            return following(chosen)
        return following(chosen, *args, **kwargs)

    stock.__new__ = staticmethod(__new__)
    if COMPARE_VARIABLE in os.environ:
        from megatrain_ds.plugin import compare_recorder

        compare_recorder.install(stock)


def choose_class(stock: type, cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> type:
    """Return the class to build for a call `cls(*args, **kwargs)`; `cls` itself unless the key is there.

    Args:
        stock: `DeepSpeedEngine`.
        cls: The class that was called: `stock` or a subclass.
        args: Positional arguments, without self.
        kwargs: Keyword arguments.

    Raises:
        EngineConfigError: The engine's name is unknown, a DeepSpeed key is refused, or `cls` is another subclass.
        UnsupportedVersionError: The constructor no longer has the parameters that carry the configuration.
    """
    config = _find_config(cls, args, kwargs)
    if config is None or not selects_megatrain(read_param_dict(config)):
        return cls
    _check_signature(stock)
    return _prepare_engine_class(stock, cls, config)


def _find_config(cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the parsed configuration among the arguments, else the dict given as `config`, else None."""
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        bound = inspect.signature(cls.__init__).bind_partial(None, *args, **kwargs).arguments
    except TypeError:
        bound = {}
    named = {**bound, **kwargs}
    for name in CONFIG_PARAMETERS:
        if isinstance(named.get(name), DeepSpeedConfig | dict):
            return named[name]
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, DeepSpeedConfig)), None)


def _check_signature(stock: type) -> None:
    signature = inspect.signature(stock.__init__)
    missing = [name for name in CONFIG_PARAMETERS if name not in signature.parameters]
    if missing:
        raise UnsupportedVersionError(
            explain(
                "DeepSpeedEngine.__init__",
                str(signature),
                f"this version of DeepSpeed has no constructor parameter {' and '.join(missing)}",
                f'Install a tested version of deepspeed (see `megatrain-ds doctor`) or remove "{ENGINE_KEY}"',
            )
        )


def _prepare_engine_class(stock: type, cls: type, config: Any) -> type:
    """Run the checks that must fail before anything is built, then name the class."""
    from megatrain_ds.compatibility import check_deepspeed_config
    from megatrain_ds.engine import MegaTrainEngine
    from megatrain_ds.plugin.versions import check_versions, warn_untested

    if not isinstance(config, dict):
        check_deepspeed_config(config)
    if cls is not stock and not issubclass(cls, MegaTrainEngine):
        raise _foreign_subclass(cls)
    warn_untested(check_versions())
    return MegaTrainEngine if cls is stock else cls


def _foreign_subclass(cls: type) -> Exception:
    from megatrain_ds.errors import EngineConfigError

    return EngineConfigError(
        explain(
            ENGINE_KEY,
            ENGINE_NAME,
            f"cannot stream for {cls.__module__}.{cls.__qualname__}, which brings an engine of its own",
            f'Use a plain module with deepspeed.initialize (no PipelineModule, no "hybrid_engine"), or remove '
            f'"{ENGINE_KEY}"',
        )
    )
