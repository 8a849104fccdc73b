"""One rank in this process, the accelerator's device, and engines that are gone after each test."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from megatrain_ds.cli.single_process import free_port, rank_variables, remove_shared_buffers


def pytest_configure(config: pytest.Config) -> None:
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for name, value in rank_variables(free_port()).items():
        os.environ.setdefault(name, value)
    # cuBLAS gives the same bits twice only with a workspace of its own a stream.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_sessionfinish() -> None:
    remove_shared_buffers(int(os.environ["MASTER_PORT"]))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where models compute: the accelerator's device, the CPU where there is none."""
    from deepspeed.accelerator import get_accelerator

    return torch.device(get_accelerator().current_device_name())


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(torch.cuda.is_available(), warn_only=True)
    torch.manual_seed(0)
    # Operations of a few kilobytes: a second thread costs more than it gives.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """`start(model, ...)` as `engines.initialize`; every engine is destroyed after the test."""
    from integration_tests.cases import engines

    started: list[Any] = []

    def factory(*args: Any, **kwargs: Any) -> Any:
        started.append(engines.initialize(*args, **kwargs))
        return started[-1]

    yield factory
    for engine in started:
        engine.destroy()


@pytest.fixture
def forget_frameworks() -> Iterator[None]:
    """Transformers and Accelerate keep a configuration for the process: later models would be built for ZeRO-3."""
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    before = dict(os.environ)
    yield
    unset_hf_deepspeed_config()
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if name.startswith("ACCELERATE_")})
