"""The paper authors' code, from a checkout that the user names; nothing of it is in this tree."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch

from comparisons.systems import Settings

ADAPTER = "comparison_adapter.py"


def build(model: Any, settings: Settings) -> Any:
    """What the user's adapter builds.

    Args:
        model: the model, on the host.
        settings: `settings.reference_path` is the checkout. It, or the folder above it, holds `comparison_adapter.py`,
            written by the user against the checkout's own interface, with `build(model, settings)` as every system
            module here has it.

    Raises:
        FileNotFoundError: no path was given, or there is no adapter.
    """
    if settings.reference_path is None:
        raise FileNotFoundError(
            "--reference = None: the system 'reference' runs the paper authors' code, which is not part of this tree. "
            "Give the path of a checkout."
        )
    checkout = Path(settings.reference_path).resolve()
    adapter = next((folder / ADAPTER for folder in (checkout, checkout.parent) if (folder / ADAPTER).is_file()), None)
    if adapter is None:
        raise FileNotFoundError(
            f"--reference = {settings.reference_path!r}: neither it nor the folder above holds {ADAPTER}, a module "
            "with build(model, settings) that returns an object with name, step(tokens), drain() and report(). "
            "Write it against the checkout's own trainer."
        )
    sys.path.insert(0, str(checkout))
    specification = importlib.util.spec_from_file_location("comparison_adapter", adapter)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return module.build(model, settings)
