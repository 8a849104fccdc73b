"""The entry point that PyTorch calls at the end of its own import; it only plants post-import hooks.

Knows the names of two DeepSpeed modules and of the functions that hook them, and nothing else: torch is half imported
here, so neither torch, DeepSpeed nor pydantic may be imported, and an exception would break `import torch` for every
program on the machine.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

HOOKS = {
    "deepspeed.runtime.engine": "megatrain_ds.plugin.dispatch",
    "deepspeed.runtime.zero.partition_parameters": "megatrain_ds.plugin.zero_init",
}
"""DeepSpeed module to be hooked -> the module of ours whose `install(module)` does it."""

applied: set[str] = set()
"""Names of the DeepSpeed modules that carry their hook."""

failures: dict[str, str] = {}
"""Module name -> why its hook could not be applied."""


class PostImportFinder(MetaPathFinder):
    """Finds a module in `HOOKS` by the other finders and has its hook run right after its body.

    It leaves the import system when every hook is applied.
    """

    def __init__(self) -> None:
        """Start outside every search."""
        self._searching: set[str] = set()

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Return the ordinary spec with its loader's `exec_module` extended, or None for every other module."""
        if fullname not in HOOKS or fullname in self._searching:
            return None
        self._searching.add(fullname)
        try:
            spec = _find_by_others(self, fullname, path, target)
        finally:
            self._searching.discard(fullname)
        if spec is not None and spec.loader is not None:
            _extend_loader(spec.loader, fullname)
        return spec


def activate() -> None:
    """Hook DeepSpeed: at once where it is imported already, else when it is. Never raises; may be called again."""
    try:
        for name in HOOKS:
            if name in sys.modules:
                _apply(name, sys.modules[name])
        if len(applied) < len(HOOKS) and not any(isinstance(finder, PostImportFinder) for finder in sys.meta_path):
            sys.meta_path.insert(0, PostImportFinder())
    except Exception as error:
        failures["activate"] = repr(error)


def _find_by_others(own: PostImportFinder, fullname: str, path: Any, target: Any) -> Any:
    for finder in list(sys.meta_path):
        find = None if finder is own else getattr(finder, "find_spec", None)
        spec = find(fullname, path, target) if find else None
        if spec is not None:
            return spec
    return None


def _extend_loader(loader: Any, fullname: str) -> None:
    """Make this loader run the hook after the module's body.

    The instance is changed rather than replaced, so that `module.__loader__` keeps its class. One instance may serve
    several modules (zip files), hence the name check.
    """
    original = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        original(module)
        if module.__name__ == fullname:
            _apply(fullname, module)
            vars(loader).pop("exec_module", None)

    loader.exec_module = exec_module


def _apply(name: str, module: ModuleType) -> None:
    """Run the hook of `name` once; a failure warns and leaves DeepSpeed as it is."""
    if name in applied:
        return
    try:
        import_module(HOOKS[name]).install(module)
    except Exception as error:
        failures[name] = f"{type(error).__name__}: {error}"
        text = f'megatrain_ds is not active, "offload_engine" will be ignored: {name} not hooked: {failures[name]}'
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return
    applied.add(name)
    failures.pop(name, None)
    if len(applied) == len(HOOKS):
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, PostImportFinder)]
