"""One checkpoint that many tests read, and an engine to load it into."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megatrain_ds.tests.checkpoint.engines import make_engine, make_model, state_of, train


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor], list[float]]:
    """A checkpoint after three steps, the state it holds, and the losses of the two steps that follow."""
    folder = tmp_path_factory.mktemp("saved")
    engine = make_engine()
    train(engine, range(3))
    engine.save_checkpoint(folder, client_state={"epoch": 7, "values": torch.arange(3)})
    return folder, state_of(engine), train(engine, range(3, 5))


@pytest.fixture
def other() -> Iterator:
    """An engine of other weights that has taken a step of its own."""
    engine = make_engine(make_model(seed=1), lr=3e-3)
    train(engine, range(20, 21))
    yield engine
    engine.destroy()
