"""The random state that torch does not keep: Python's and NumPy's global generators."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class GlobalRandom:
    """A moment of both generators.

    Attributes:
        python: `random.getstate()`.
        numpy: `numpy.random.get_state()`.
    """

    python: Any
    numpy: Any

    @classmethod
    def now(cls) -> GlobalRandom:
        """Both states as they are."""
        return cls(random.getstate(), np.random.get_state())  # noqa: NPY002 - the global generator is the point

    def restore(self) -> None:
        """Set both generators back to this moment."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002 - see above
