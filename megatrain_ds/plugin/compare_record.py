"""What one engine did in a run of `megatrain-ds compare`: losses, clock, tokens, memory.

Keeps device tensors as they are until the end, so that reading a loss never waits for the device. Knows neither how
steps are noticed nor who reads the record.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatrain_ds.planning.probe import peak_resident_bytes, resident_bytes

Count = int | torch.Tensor


class EngineRecord:
    """Collects the steps of one engine.

    Args:
        engine: A `DeepSpeedEngine`, of either kind; not kept.
        num_warmup: Optimizer steps before the clock starts.
        flag: Whether it is this package's, whose updates outlive a step.
    """

    def __init__(self, engine: Any, *, num_warmup: int, flag: bool) -> None:
        self.num_steps = 0
        self._num_warmup = num_warmup
        self._flag = flag
        self._facts = _describe(engine)
        self._losses: list[list[torch.Tensor]] = []
        self._tokens: list[list[Count]] = []
        self._window: list[torch.Tensor] = []
        self._window_tokens: list[Count] = []
        self._ends_s: list[float] = []
        self._start_s: float | None = None
        self._stop_s: float | None = None

    def add_loss(self, value: torch.Tensor) -> None:
        """Add one micro-batch of the step under way.

        Args:
            value: Its share of the step's loss, a scalar that nobody will write to.
        """
        self._window.append(value)

    def add_tokens(self, count: Count) -> None:
        """Add the tokens of one micro-batch; a tensor is an integer scalar on any device."""
        self._window_tokens.append(count)

    @property
    def has_losses(self) -> bool:
        """Whether the step under way has a loss."""
        return bool(self._window)

    def end_step(self, engine: Any) -> None:
        """Close the step. The clock starts after the last step of the warm-up, when nothing of it is under way."""
        self._losses.append(self._window)
        self._tokens.append(self._window_tokens)
        self._window, self._window_tokens = [], []
        self.num_steps += 1
        self._facts.update(resident_bytes=resident_bytes(), skipped_steps=int(engine.skipped_steps))
        if self.num_steps == self._num_warmup:
            drain(engine, self._flag)
            self._start_s = time.perf_counter()
        self._ends_s.append(time.perf_counter())

    def stop_clock(self, engine: Any) -> None:
        """Wait for everything under way and stop the clock."""
        drain(engine, self._flag)
        self._stop_s = time.perf_counter()

    def last_loss(self) -> float | None:
        """The latest step's loss where reading it waits for no device."""
        values = self._losses[-1] if self._losses else []
        if not values or any(value.device.type != "cpu" for value in values):
            return None
        return _add_up(values)

    def as_plain_data(self) -> dict[str, Any]:
        """Return the record; waits for the device.

        Returns:
            "engine" (class), "precision" ("fp32", "bf16", "fp16"), "loss_dtype", "losses" (one a step: the sum over
            its micro-batches of what gradients were made of, loss scale left out; None where nothing was seen),
            "step_times_s" (of the steps after the warm-up, end to end), "mean_step_s" (with the final wait, when
            "drained"), "median_step_s", "tokens_per_s" (None where unknown), "resident_bytes", "peak_host_bytes",
            "peak_device_bytes" (None without a device), "memory_report" (the engine's own, if it has one),
            "num_parameters", "world_size", "skipped_steps", "device".
        """
        ends = self._ends_s[max(self._num_warmup, 1) - 1 :]
        times = [after - before for before, after in zip(ends, ends[1:], strict=False)]
        seconds = self._timed_seconds()
        return {
            **self._facts,
            "loss_dtype": next((str(w[0].dtype).removeprefix("torch.") for w in self._losses if w), None),
            "losses": [_add_up(values) if values else None for values in self._losses],
            "step_times_s": times,
            "mean_step_s": seconds / len(times) if seconds is not None and times else None,
            "median_step_s": statistics.median(times) if times else None,
            "drained": self._stop_s is not None,
            "tokens_per_s": self._tokens_per_s(seconds),
            "peak_host_bytes": peak_resident_bytes(),
            "peak_device_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None,
        }

    def _timed_seconds(self) -> float | None:
        stop = self._stop_s if self._stop_s is not None else (self._ends_s[-1] if self._ends_s else None)
        return None if self._start_s is None or stop is None else stop - self._start_s

    def _tokens_per_s(self, seconds: float | None) -> float | None:
        windows = self._tokens[self._num_warmup :]
        if not seconds or not windows or not all(windows):
            return None
        return sum(int(count) for window in windows for count in window) / seconds


def drain(engine: Any, flag: bool) -> None:
    """Wait until nothing of the engine is under way: host updates of ours, and the device.

    Args:
        engine: A `DeepSpeedEngine`.
        flag: Whether it is this package's.
    """
    if flag and hasattr(type(engine), "runtime"):
        engine.runtime.pipeline.wait_all()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def count_tokens(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Count | None:
    """Return how many tokens a forward call got, padding left out where a mask says so; None where unknown.

    Args:
        args: Positional arguments; a dict as the only one is read like keyword arguments.
        kwargs: Keyword arguments; "input_ids" int64[batch, length] and "attention_mask" [batch, length] count.
    """
    named = args[0] if len(args) == 1 and isinstance(args[0], Mapping) else kwargs
    ids, mask = named.get("input_ids"), named.get("attention_mask")
    if not isinstance(ids, torch.Tensor):
        return None
    if isinstance(mask, torch.Tensor) and mask.shape == ids.shape:
        return (mask != 0).sum()
    return ids.numel()


def _add_up(values: list[torch.Tensor]) -> float:
    return sum(float(value) for value in values)


def _describe(engine: Any) -> dict[str, Any]:
    account = getattr(type(engine), "memory_report", None)
    return {
        "engine": type(engine).__name__,
        "precision": _precision(engine),
        "num_parameters": sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters()),
        "memory_report": account(engine) if callable(account) else None,
        "world_size": int(engine.world_size),
        "device": torch.cuda.get_device_name() if torch.cuda.is_initialized() else "cpu",
    }


def _precision(engine: Any) -> str:
    """The type that most arithmetic is done in."""
    autocast = getattr(engine, "torch_autocast_enabled", None)
    dtype = torch.float32
    if engine.fp16_enabled():
        dtype = torch.float16
    elif engine.bfloat16_enabled():
        dtype = torch.bfloat16
    elif autocast is not None and autocast():
        dtype = engine.torch_autocast_dtype()
    return {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(dtype, "fp32")
