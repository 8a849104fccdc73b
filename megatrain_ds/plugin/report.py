"""Says whether an ordinary script on this machine gets the plugin, and why not.

Imports DeepSpeed, so that the hooks are seen where they must be rather than believed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points

from megatrain_ds.plugin import autoload
from megatrain_ds.plugin.versions import VersionCheck, check_versions

AUTOLOAD_VARIABLE = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""PyTorch loads entry points only while this is unset or "1"."""

ENTRY_POINT = "megatrain_ds.plugin.autoload:activate"


@dataclass(frozen=True)
class ActivationReport:
    """What stands between a script and the plugin.

    Attributes:
        active: Whether `import deepspeed` alone gives a script the plugin.
        hooked: Whether DeepSpeed carries the hooks in this process, where this package was imported by name.
        reasons: Why not active, each with its next action; empty when active.
        versions: Installed versions against the tested ranges.
    """

    active: bool
    hooked: bool
    reasons: tuple[str, ...]
    versions: tuple[VersionCheck, ...]


def activation_report() -> ActivationReport:
    """Look at the entry point, PyTorch's switch for it, and the hooks in this process. Never raises."""
    failures = _hook_failures()
    reasons = [*_entry_point_reasons(), *failures]
    return ActivationReport(
        active=not reasons,
        hooked=not failures,
        reasons=tuple(reasons),
        versions=tuple(check_versions()),
    )


def _entry_point_reasons() -> list[str]:
    reasons = []
    if not any(point.value == ENTRY_POINT for point in entry_points(group="torch.backends")):
        reasons.append(
            'entry point "torch.backends: megatrain_ds" is missing: the package is not installed in this environment. '
            "Run `pip install .`, or import megatrain_ds in the script."
        )
    switch = os.environ.get(AUTOLOAD_VARIABLE, "1")
    if switch != "1":
        reasons.append(
            f"{AUTOLOAD_VARIABLE} = {switch!r}: PyTorch loads no plugins. "
            "Unset it, or import megatrain_ds in the script."
        )
    return reasons


def _hook_failures() -> list[str]:
    for name in autoload.HOOKS:
        try:
            import_module(name)
        except Exception as error:
            return [f"{name} cannot be imported: {type(error).__name__}: {error}. Repair the DeepSpeed installation."]
    failures = [
        f"hook not applied: {name}: {cause}. Install a tested version of deepspeed."
        for name, cause in autoload.failures.items()
    ]
    lost = [name for name in autoload.HOOKS if name not in autoload.applied and name not in autoload.failures]
    return failures + [f"hook not applied: {name}: imported without it. Import megatrain_ds earlier." for name in lost]
