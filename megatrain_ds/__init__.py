"""A DeepSpeed plugin: `"offload_engine": "megatrain"` in ds_config.json trains the model from host memory.

PyTorch imports this package in the middle of its own import, to reach the entry point `plugin.autoload:activate`. It
must stay free of torch, DeepSpeed and pydantic; names that need them are loaded on first access.
"""

from __future__ import annotations

__version__ = "0.1.0"
