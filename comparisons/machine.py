"""What a record says of where and with what it was measured."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from megatrain_ds.planning.probe import usable_cpus

_PACKAGES = ("torch", "deepspeed", "transformers", "accelerate")


def describe_machine() -> dict[str, Any]:
    """Hardware, versions, commit and date of a record."""
    use_cuda = torch.cuda.is_available()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "device": torch.cuda.get_device_name() if use_cuda else _processor(),
        "cores": usable_cpus(),
        "host_memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "versions": {"python": platform.python_version(), **_versions()},
        # A copy of the tree without its history can say what it is a copy of.
        "commit": commit.stdout.strip() or os.environ.get("GIT_COMMIT"),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
