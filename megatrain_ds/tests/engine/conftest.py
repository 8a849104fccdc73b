"""Engines that are gone after each test."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megatrain_ds.tests.engine.models import ignore_threads, make_engine


@pytest.fixture(autouse=True)
def own_threads() -> None:
    """Tests count the threads of their own engines: what other tests left to the collector goes first."""
    gc.collect()
    ignore_threads(threading.enumerate())


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
