"""Environment and markers of the package's tests: one rank, the CPU accelerator where there is no CUDA."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    """Return a TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def pytest_configure(config: pytest.Config) -> None:
    """Describe a single rank to DeepSpeed before any test imports it."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    one_rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**one_rank, "MASTER_PORT": str(free_port())}.items():
        os.environ.setdefault(name, value)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs more devices than there are."""
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if item.get_closest_marker("gpu") and devices < 1:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("multigpu") and devices < 2:
            item.add_marker(pytest.mark.skip(reason="needs two CUDA devices"))


def remove_shared_buffers(port: str) -> None:
    """Remove the shared-memory buffers that DeepSpeed's CPU communication leaves behind for this port."""
    for leftover in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
        leftover.unlink(missing_ok=True)


def pytest_sessionfinish() -> None:
    """Leave no shared memory of this session behind."""
    remove_shared_buffers(os.environ["MASTER_PORT"])


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
