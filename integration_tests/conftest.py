"""Shared folders for runs: each example program runs once in a session, however many tests read its record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from integration_tests.harness import Program, run


@pytest.fixture(scope="session")
def run_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Program], list[dict]]:
    """`run_once(program)` runs it at the first call and returns the same records at every later one."""
    base = tmp_path_factory.mktemp("programs")
    records: dict[str, list[dict]] = {}

    def runner(program: Program) -> list[dict]:
        key = repr(program)
        if key not in records:
            records[key] = run(program, Path(base) / f"{len(records):03d}_{program.route}")
        return records[key]

    return runner


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
