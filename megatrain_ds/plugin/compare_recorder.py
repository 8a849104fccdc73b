"""Follows the engines of a program that `megatrain-ds compare` started, and ends it after the asked steps.

Installed only where the comparison's variable is set. Wraps methods of `DeepSpeedEngine`, which both engines have;
changes nothing that they compute. Every rank counts steps and ends; rank 0 alone writes.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch

from megatrain_ds.plugin.compare_record import EngineRecord, count_tokens
from megatrain_ds.plugin.compare_spec import PARTIAL_SUFFIX, CompareSpec, current_spec
from megatrain_ds.plugin.compare_stop import end_process


def install(engine_class: Any) -> Recorder:
    """Start following.

    Args:
        engine_class: `DeepSpeedEngine`.

    Raises:
        ConfigError: What the variable leads to cannot be read.
    """
    recorder = Recorder(current_spec())
    for name in ("forward", "backward", "scale", "step"):
        if hasattr(engine_class, name):
            _wrap(engine_class, name, getattr(recorder, f"around_{name}"))
    _wrap(engine_class, "__init__", recorder.around_init)
    _wrap(torch.Tensor, "backward", recorder.around_plain_backward)
    sys.excepthook = recorder.around_excepthook(sys.excepthook)
    atexit.register(recorder.end)
    recorder.tell("deepspeed")
    return recorder


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, method)


class Recorder:
    """Sees every engine of this process.

    Args:
        spec: The run.
    """

    def __init__(self, spec: CompareSpec) -> None:
        self._spec = spec
        self._records: list[EngineRecord] = []
        self._by_engine: weakref.WeakKeyDictionary[Any, EngineRecord] = weakref.WeakKeyDictionary()
        self._plain_losses: list[torch.Tensor] = []
        self._scaled: tuple[weakref.ref[torch.Tensor], torch.Tensor] | None = None
        self._depth = 0
        self._furthest = 0
        self._ended = False

    def around_init(self, original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> None:
        """Say that an engine was built, and whether it can train."""
        original(engine, *args, **kwargs)
        self.tell("engine", engine=type(engine).__name__, trained=_has_optimizer(engine))

    def around_forward(self, original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
        """Count the tokens of a forward that trains."""
        if engine.training and torch.is_grad_enabled() and _has_optimizer(engine):
            count = count_tokens(args, kwargs)
            if count is not None:
                self._of(engine).add_tokens(count)
        return original(engine, *args, **kwargs)

    def around_backward(self, original: Callable[..., Any], engine: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        """Take what DeepSpeed returns: the loss, divided by the accumulation steps unless the caller did that."""
        with self._inside_backward():
            result = original(engine, loss, *args, **kwargs)
        copy = _copy(result)
        if copy is not None:
            self._of(engine).add_loss(copy)
        return result

    def around_scale(self, original: Callable[..., Any], engine: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
        """Remember what a scaled loss was before."""
        scaled, copy = original(engine, loss, *args, **kwargs), _copy(loss)
        self._scaled = None if copy is None else (weakref.ref(scaled), copy)
        return scaled

    def around_plain_backward(self, original: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Take the loss of a script that calls `loss.backward()` itself; it goes to the engine that steps next."""
        outermost = self._depth == 0
        scaled = self._scaled
        copy = scaled[1] if scaled is not None and scaled[0]() is tensor else _copy(tensor) if outermost else None
        with self._inside_backward():
            result = original(tensor, *args, **kwargs)
        if outermost and copy is not None:
            self._plain_losses.append(copy)
        return result

    def around_step(self, original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> Any:
        """Notice the end of an optimizer step; after the last one this does not return."""
        before = engine.global_steps
        result = original(engine, *args, **kwargs)
        if engine.global_steps > before:
            self._end_step(engine)
        return result

    def around_excepthook(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a hook that leaves the error's own words before Python prints the traceback."""

        def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
            self.tell("error", text=f"{kind.__name__}: {error}"[:2000])
            original(kind, error, traceback)

        return hook

    def tell(self, event: str, **values: Any) -> None:
        """Append one event. A write of one piece to a file opened so does not mix with other processes' lines."""
        if _rank() != 0:
            return
        place = {"process": os.getpid(), "master_port": os.environ.get("MASTER_PORT")}
        line = json.dumps({"event": event, **place, **values}) + "\n"
        descriptor = os.open(self._spec.events, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)

    def end(self) -> None:
        """Write the record of the engine that got furthest, if there is none yet; runs at exit."""
        self.tell("end")
        if not self._ended and self._records:
            furthest = max(self._records, key=lambda record: record.num_steps)
            if furthest.num_steps:
                self._write(furthest, complete=False)

    def _of(self, engine: Any) -> EngineRecord:
        record = self._by_engine.get(engine)
        if record is None:
            record = EngineRecord(engine, num_warmup=self._spec.num_warmup, flag=self._spec.flag)
            self._by_engine[engine] = record
            self._records.append(record)
        return record

    def _end_step(self, engine: Any) -> None:
        record = self._of(engine)
        if not record.has_losses:
            # DeepSpeed divides the gradients of a plain `loss.backward()` in hooks.
            for loss in self._plain_losses:
                record.add_loss(loss / engine.gradient_accumulation_steps())
        self._plain_losses.clear()
        record.end_step(engine)
        if record.num_steps > self._furthest:
            self._furthest = record.num_steps
            self.tell("step", step=record.num_steps, loss=record.last_loss())
        if record.num_steps == self._spec.num_steps:
            record.stop_clock(engine)
            self._write(record, complete=True)
            end_process()

    def _write(self, record: EngineRecord, *, complete: bool) -> None:
        """Write it whole or not at all. Of several programs in one run the first complete record stays."""
        self._ended = True
        if _rank() != 0 or (self._spec.record.exists() and not (complete and self._is_incomplete())):
            return
        content = {
            **record.as_plain_data(),
            "complete": complete,
            "num_trained_engines": len(self._records),
        }
        partial = self._spec.record.with_suffix(f".{os.getpid()}{PARTIAL_SUFFIX}")
        partial.write_text(json.dumps(content) + "\n")
        partial.replace(self._spec.record)

    def _is_incomplete(self) -> bool:
        return not json.loads(self._spec.record.read_text())["complete"]

    @contextlib.contextmanager
    def _inside_backward(self) -> Iterator[None]:
        # What backward runs inside, reentrant checkpoints for instance, is no loss of its own.
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1


def _copy(loss: Any) -> torch.Tensor | None:
    """A scalar's own copy on its device: the script may write to the original."""
    return loss.detach().clone() if isinstance(loss, torch.Tensor) and loss.numel() == 1 else None


def _has_optimizer(engine: Any) -> bool:
    optimizer = getattr(engine, "optimizer", None)
    return optimizer is not None and type(optimizer).__name__ != "DummyOptim"


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))
