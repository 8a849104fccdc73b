"""Engines that are gone after each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megatrain_ds.tests.engine.models import make_engine


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """`start(...)` as `make_engine`; every engine is destroyed after the test."""
    started: list[Any] = []

    def factory(*args: Any, **kwargs: Any) -> Any:
        started.append(make_engine(*args, **kwargs))
        return started[-1]

    yield factory
    for engine in started:
        engine.destroy()
