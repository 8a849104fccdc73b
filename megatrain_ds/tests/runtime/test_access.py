"""Device copies of streamed parameters that user code may write by mistake."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatrain_ds.errors import StateError
from megatrain_ds.runtime.access import ParameterAccess


def make_access() -> ParameterAccess:
    unused: Any = SimpleNamespace()
    return ParameterAccess(host_units=[], pipeline=unused, roots=unused, compute_device=lambda: None)


@pytest.mark.parametrize("write", [True, False])
def test_a_written_copy_is_an_error_at_the_end_of_the_forward(write) -> None:
    access, param, copied = make_access(), torch.ones(2, 3), torch.ones(2, 3)
    access.lent(param, copied)  # type: ignore[arg-type]
    if write:
        copied.T[0] = 5.0
        with pytest.raises(StateError, match=r"shape \(2, 3\).*written in place inside a forward.*\.data"):
            access.end_forward()
    access.end_forward()
