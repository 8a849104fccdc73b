"""The state of the random generators of a training process, as plain tensors and numbers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator


def capture() -> dict[str, Any]:
    """The generators of python, numpy, torch on the host and torch on the current device."""
    name, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002
    return {
        "python": random.getstate(),
        "numpy": [str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss],
        "cpu": torch.get_rng_state(),
        "device": _accelerator().get_rng_state() if _has_device_generator() else None,
    }


def restore(state: dict[str, Any]) -> None:
    """Set every generator to what `capture` returned; a device that is not there now is left out."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(state["cpu"].clone())
    if state["device"] is not None and _has_device_generator():
        _accelerator().set_rng_state(state["device"].clone())


def _has_device_generator() -> bool:
    return _accelerator().current_device_name() != "cpu"


def _accelerator() -> Any:
    return get_accelerator()
