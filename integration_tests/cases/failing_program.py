"""A training program whose layer 3 fails as its first argument says; it writes its live threads to its second."""

from __future__ import annotations

import atexit
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from integration_tests.cases.engines import initialize
from integration_tests.cases.models import Block, Stack, token_batches


class Fails(Block):
    how = "nothing"

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.how == "forward":
            raise LookupError("no such thing in forward")
        out = super().forward(hidden)
        if out.requires_grad and self.how in ("backward", "interrupt"):
            out.register_hook(self.fail)
        return out

    def fail(self, _grad: torch.Tensor) -> None:
        if self.how == "interrupt":
            raise KeyboardInterrupt
        raise LookupError("no such thing in backward")


def main(how: str, threads_file: str) -> None:
    threads = [t for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]
    engine = initialize(Stack(Block(), Block(), Block(), Fails()))
    batches = token_batches(engine.device, 3)
    engine.backward(engine(batches[0]))
    engine.step()
    engine.module.blocks[3].how = how
    if how == "worker":

        def raises(**_: Any) -> None:
            raise LookupError("no such thing in the worker")

        engine.runtime.pipeline.kernel.update = raises

    def note_threads() -> None:
        alive = [t.name for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]
        Path(threads_file).write_text(repr([name for name in alive if name not in [t.name for t in threads]]))

    atexit.register(note_threads)
    engine.backward(engine(batches[1]))
    engine.step()
    engine(batches[2])


if __name__ == "__main__":
    main(*sys.argv[1:])
