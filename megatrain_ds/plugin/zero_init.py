"""Makes `deepspeed.zero.Init` partition nothing for our configuration: parameters load as full host tensors.

Transformers enters this context by itself for every stage-3 configuration, before any engine exists. All else that
DeepSpeed's context does stays DeepSpeed's own code: it starts `deepspeed.comm`, tensors created inside come out in the
configured compute type, and buffers that a model names for fp32 go back to fp32. So parameters and buffers get the same
types and bits as on ZeRO-3.

[Note: Writes to another module's parameters] Inside DeepSpeed's context, and in Transformers' initialisation after it,
parameters are empty outside their own module's turn; a parent that writes to a child's parameter (GPT-2 scales its
residual projections so) loses the write. Here parameters are always full, so such a write has the effect that the
model's author meant, as it has in plain Transformers.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import torch
from torch import nn

from megatrain_ds.config import ENGINE_KEY, ENGINE_NAME, read_param_dict
from megatrain_ds.errors import UnsupportedVersionError, explain
from megatrain_ds.plugin.selection import selects_megatrain

CONFIG_PARAMETERS = ("config_dict_or_path", "config")
"""Parameters of `zero.Init` that may carry the configuration."""

_NEEDED_PARAMETERS = (*CONFIG_PARAMETERS, "enabled", "module")
_NEEDED_METHODS = ("_post_init_method", "patch_init_and_builtins", "unpatch_init_and_builtins")

_LEFT_ON_CLASSES = (
    "__init_subclass__",
    "__new__",
    "__old_new__",
    "_apply",
    "_old_apply",
    "_old_apply_of_skip_init_hook",
    "_old_init",
    "_old_init_subclass",
)
"""Attributes that DeepSpeed's context leaves, set or changed, on `nn.Module`, its subclasses or `torch.Tensor`."""


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
    # The base class logs these when the context ends.
    counters = stock.__base__

    class InertInit(stock):
        """`zero.Init` without partitioning; tensors that name no device are made on the host."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            bound = inspect.signature(stock.__init__).bind(self, *args, **kwargs)
            target = bound.arguments.get("module")
            # DeepSpeed partitions `module` even when the context is disabled.
            bound.arguments.update(module=None)
            stock.__init__(*bound.args, **bound.kwargs)
            self.local_device = torch.device("cpu")
            # DeepSpeed's replacement of nn.functional.linear would outlive the context and only serves partitions.
            self.mem_efficient_linear = False
            self._classes_before: dict[type, dict[str, Any]] = {}
            if target is not None:
                self._keep_named_buffers(target)

        def patch_init_and_builtins(self) -> None:
            self._classes_before = _class_attributes()
            super().patch_init_and_builtins()

        def unpatch_init_and_builtins(self) -> None:
            super().unpatch_init_and_builtins()
            _restore_class_attributes(self._classes_before)
            self._classes_before = {}

        def _post_init_method(self, module: nn.Module) -> None:
            for parameter in module.parameters(recurse=False):
                counters.num_module_parameters += 1
                counters.num_module_elements += parameter.numel()
                # DeepSpeed allocates a partition by torch.empty, whose type under its overrides is the parameter's.
                parameter.data = parameter.data.to(torch.empty(0, dtype=parameter.dtype).dtype)
            self._keep_named_buffers(module)

        def _keep_named_buffers(self, module: nn.Module) -> None:
            # DeepSpeed 0.18 has no such list.
            if hasattr(stock, "_keep_in_fp32"):
                self._keep_in_fp32(module)

    return InertInit


def _classes() -> set[type]:
    """`torch.Tensor`, `nn.Module` and every subclass of the latter."""
    found: set[type] = {torch.Tensor}
    pending: list[type] = [nn.Module]
    while pending:
        cls = pending.pop()
        if cls not in found:
            found.add(cls)
            pending.extend(type.__subclasses__(cls))
    return found


def _class_attributes() -> dict[type, dict[str, Any]]:
    """What each class defines itself of `_LEFT_ON_CLASSES`."""
    return {cls: {name: vars(cls)[name] for name in _LEFT_ON_CLASSES if name in vars(cls)} for cls in _classes()}


def _restore_class_attributes(before: dict[type, dict[str, Any]]) -> None:
    """Put the attributes back; a class that was made meanwhile only loses DeepSpeed's saved `__init__`.

    A `__init_subclass__` left on `nn.Module`, even the original one, hides that of later bases such as `Generic`.
    """
    for cls in _classes():
        own = vars(cls)
        if cls not in before:
            if "_old_init" in own:
                del cls._old_init  # pyright: ignore[reportAttributeAccessIssue]
            continue
        for name in _LEFT_ON_CLASSES:
            if name in before[cls]:
                if own.get(name) is not before[cls][name]:
                    setattr(cls, name, before[cls][name])
            elif name in own:
                delattr(cls, name)


def _choose_class(stock: type, inert: type, cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> type:
    """Return `inert` for our configuration, else `cls`.

    Raises:
        EngineConfigError: The engine's name is unknown or a DeepSpeed key is refused; said here, before weights load.
        UnsupportedVersionError: `zero.Init` lost a parameter or a method that this needs.
    """
    config = _find_config(cls, args, kwargs)
    if config is None or not selects_megatrain(read_param_dict(config)):
        return cls
    _refuse_changed_version(stock)
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


def _refuse_changed_version(stock: Any) -> None:
    signature = inspect.signature(stock.__init__)
    missing = [f"parameter {name}" for name in _NEEDED_PARAMETERS if name not in signature.parameters]
    missing += [f"method {name}" for name in _NEEDED_METHODS if not hasattr(stock, name)]
    if missing:
        rule = f"this version of DeepSpeed has no {' and no '.join(missing)}"
        action = f'Install a tested version of deepspeed (see `megatrain-ds doctor`) or remove "{ENGINE_KEY}"'
        raise UnsupportedVersionError(explain("deepspeed.zero.Init.__init__", str(signature), rule, action))


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
