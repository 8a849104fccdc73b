"""Makes `deepspeed.zero.Init` inert for our configuration: parameters are built and loaded as full host tensors.

Transformers enters this context by itself for every stage-3 configuration, before any engine exists. The context still
starts `deepspeed.comm` and still gives parameters the configured compute type, as DeepSpeed's does, so that weights
load to the same bits; it neither moves nor partitions them.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

from megatrain_ds.config import ENGINE_KEY, ENGINE_NAME, read_param_dict
from megatrain_ds.errors import UnsupportedVersionError, explain
from megatrain_ds.plugin.selection import selects_megatrain

CONFIG_PARAMETERS = ("config_dict_or_path", "config")
"""Parameters of `zero.Init` that may carry the configuration."""

_NEEDED_PARAMETERS = (*CONFIG_PARAMETERS, "enabled", "module")


def install(module: ModuleType) -> None:
    """Hook `deepspeed.runtime.zero.partition_parameters`.

    Args:
        module: The imported module.
    """
    stock = module.Init
    inert = _make_inert_class(stock)

    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        chosen = _choose_class(stock, inert, cls, args, kwargs)
        following: Any = super(stock, cls).__new__
        if following is object.__new__:
            return following(chosen)
        return following(chosen, *args, **kwargs)

    stock.__new__ = staticmethod(__new__)


def _make_inert_class(stock: Any) -> type:
    """Derive the context that partitions nothing; a subclass, so `isinstance(x, zero.Init)` stays true."""

    class InertInit(stock):
        """`zero.Init` that only sets the type of floating-point parameters as modules register them."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            bound = inspect.signature(stock.__init__).bind(self, *args, **kwargs)
            converts = bound.arguments.get("enabled", True)
            target = bound.arguments.get("module")
            # DeepSpeed partitions `module` even when the context is disabled.
            bound.arguments.update(enabled=False, module=None)
            stock.__init__(*bound.args, **bound.kwargs)
            self._converts = converts
            self._handle: Any = None
            if target is not None and converts:
                for parameter in target.parameters():
                    _convert(parameter, self.dtype)

        def __enter__(self) -> None:
            if self._converts and self._handle is None:
                self._handle = _convert_on_registration(self.dtype)

        def __exit__(self, *exception: object) -> None:
            if self._handle is not None:
                self._handle.remove()
                self._handle = None

    return InertInit


def _choose_class(stock: type, inert: type, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> type:
    """Return `inert` for our configuration, else `cls`.

    Raises:
        EngineConfigError: The engine's name is unknown or a DeepSpeed key is refused; said here, before weights load.
        UnsupportedVersionError: `zero.Init` lost a parameter that this needs.
    """
    config = _find_config(cls, args, kwargs)
    if config is None or not selects_megatrain(read_param_dict(config)):
        return cls
    signature = inspect.signature(stock.__init__)
    missing = [name for name in _NEEDED_PARAMETERS if name not in signature.parameters]
    if missing:
        rule = f"this version of DeepSpeed has no parameter {' and '.join(missing)}"
        action = f'Install a tested version of deepspeed (see `megatrain-ds doctor`) or remove "{ENGINE_KEY}"'
        raise UnsupportedVersionError(explain("deepspeed.zero.Init.__init__", str(signature), rule, action))
    _refuse_early(config, kwargs.get("mpu"))
    if cls is not stock and not issubclass(cls, inert):
        raise _foreign_subclass(cls)
    return inert


def _find_config(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the configuration as a dict or a `DeepSpeedConfig`; None where the call carries none."""
    try:
        bound = inspect.signature(cls.__init__).bind_partial(None, *args, **kwargs).arguments
    except TypeError:
        return None
    given = [bound[name] for name in CONFIG_PARAMETERS if bound.get(name) is not None]
    if not given:
        return None
    config = given[-1]
    if isinstance(config, dict):
        return config
    from deepspeed.runtime.config import DeepSpeedConfig

    return DeepSpeedConfig(config, bound.get("mpu"))


def _refuse_early(config: Any, mpu: Any) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    from megatrain_ds.compatibility import refuse_unsupported

    refuse_unsupported(DeepSpeedConfig(config, mpu) if isinstance(config, dict) else config)


def _foreign_subclass(cls: type) -> Exception:
    from megatrain_ds.errors import EngineConfigError

    rule = f"parameters are not partitioned, so {cls.__module__}.{cls.__qualname__} has nothing to do"
    return EngineConfigError(
        explain(ENGINE_KEY, ENGINE_NAME, rule, f'Use deepspeed.zero.Init, or remove "{ENGINE_KEY}"')
    )


def _convert(parameter: Any, dtype: Any) -> None:
    if parameter is not None and parameter.is_floating_point() and parameter.dtype != dtype:
        parameter.data = parameter.data.to(dtype)


def _convert_on_registration(dtype: Any) -> Any:
    """Give every floating-point parameter this type when a module registers it; returns the removable handle.

    Registration comes before a module's own initialisation, which therefore draws in the same type, and takes as many
    random numbers, as inside DeepSpeed's context. Buffers keep the type they were built with.
    """
    from torch.nn.modules.module import register_module_parameter_registration_hook

    def hook(module: Any, name: str, parameter: Any) -> None:
        _convert(parameter, dtype)

    return register_module_parameter_registration_hook(hook)
