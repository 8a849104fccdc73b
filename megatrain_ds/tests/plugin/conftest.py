"""An installation of the package into a folder of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatrain_ds.tests.plugin.tools import ROOT


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`pip install` a copy of the source tree; returns the folder to put on PYTHONPATH."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "megatrain_ds", source / "megatrain_ds", ignore=shutil.ignore_patterns("__pycache__"))
    for extra in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / extra).exists():
            shutil.copy(ROOT / extra, source)
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--target", str(target), str(source)], check=True, timeout=180)
    return target
