"""A DeepSpeed plugin: `"offload_engine": "megatrain"` in ds_config.json trains the model from host memory.

PyTorch imports this package in the middle of its own import, to reach the entry point `plugin.autoload:activate`. It
must stay free of torch, DeepSpeed and pydantic; names that need them are loaded on first access.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatrain_ds.plugin.autoload import activate

if TYPE_CHECKING:
    from megatrain_ds.config import MegaTrainConfig
    from megatrain_ds.engine import MegaTrainEngine

__version__ = "0.1.0"
__all__ = ["MegaTrainConfig", "MegaTrainEngine", "__version__"]

_HOMES = {"MegaTrainConfig": "megatrain_ds.config", "MegaTrainEngine": "megatrain_ds.engine"}

# For scripts that run with TORCH_DEVICE_BACKEND_AUTOLOAD=0 and import the package by name.
activate()


def __getattr__(name: str) -> Any:
    """Load a public name from its module on first access."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
