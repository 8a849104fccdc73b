"""On CUDA: a step in steady state allocates nothing pinned, synchronises once, and its flows overlap."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from integration_tests.gpu.tools import batches, engine_of, small_model
from megatrain_ds.memory import arena
from megatrain_ds.memory.arena import HostArena, locked_bytes

pytestmark = pytest.mark.gpu

# Device-wide or stream-wide waits. Copies to pageable memory wait for their stream as well.
SYNCHRONISATIONS = ("cudaDeviceSynchronize", "cudaStreamSynchronize")


def step(engine: Any, tokens: torch.Tensor) -> None:
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def synchronisations(work: Callable[[], None]) -> int:
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        work()
    calls = {event.key: event.count for event in profiler.key_averages()}
    return sum(calls.get(name, 0) for name in SYNCHRONISATIONS)


def test_steady_step_synchronises_once_and_pins_nothing() -> None:
    data = batches(8)
    plain = small_model().cuda().bfloat16()
    plain(input_ids=data[0], labels=data[0]).loss.backward()
    of_the_model = synchronisations(lambda: plain(input_ids=data[4], labels=data[4]).loss.backward())
    engine = engine_of(small_model(), "bf16", block={})
    for tokens in data[:4]:
        step(engine, tokens)
    locked, cached = locked_bytes(), torch.cuda.host_memory_stats().get("num_host_alloc", 0)
    # One for the norm, on top of what the user's forward does by itself (Transformers looks for packed sequences).
    assert synchronisations(lambda: step(engine, data[4])) == of_the_model + 1
    assert locked_bytes() == locked
    assert torch.cuda.host_memory_stats().get("num_host_alloc", 0) == cached
    engine.destroy()
    assert locked_bytes() == 0


def test_resident_memory_is_flat() -> None:
    engine = engine_of(small_model(), "bf16", block={})
    data = batches(4)
    for index in range(20):
        step(engine, data[index % 4])
    torch.cuda.synchronize()
    host, device = resident_bytes(), torch.cuda.memory_reserved()
    for index in range(50):
        step(engine, data[index % 4])
    torch.cuda.synchronize()
    assert resident_bytes() <= 1.01 * host
    assert torch.cuda.memory_reserved() == device
    engine.destroy()


def test_pinned_bytes_are_exact_and_in_few_segments() -> None:
    blocks = [33 * 2**20 + 2048] * 16 + [0]
    held = HostArena("test", blocks, pin=True)
    assert held.pinned_bytes == held.num_bytes <= 1.05 * sum(blocks)
    assert held.num_segments == 1
    assert held.block(3).is_pinned()
    held.close()
    assert locked_bytes() == 0
    unpinned = HostArena("test", blocks, pin=False)
    assert unpinned.pinned_bytes == 0
    assert not unpinned.block(0).is_pinned()


def test_refused_registration_warns_once_and_trains_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena, "_register", lambda _pointer, _size: 2)
    monkeypatch.setattr(arena, "_refusal_told", False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        engine = engine_of(small_model(), "bf16", block={})
    told = [str(w.message) for w in caught if "page-lock" in str(w.message)]
    assert len(told) == 1, told
    assert "memlock" in told[0]
    for tokens in batches(2):
        step(engine, tokens)
    assert engine.memory_report()["pinned_bytes"] == 0
    engine.destroy()


def test_a_refused_registration_leaves_no_error_behind() -> None:
    held = HostArena("test", [1 << 20], pin=True)
    assert arena._register(held.block(0).data_ptr(), 1 << 20) != 0
    # A pending CUDA error would surface in the next call that checks for one.
    assert float(torch.ones(4, device="cuda").sum()) == 4.0
    held.close()


def test_trace_shows_every_flow_overlapping(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    engine = engine_of(small_model(layers=8, hidden=2048), "bf16", block={"trace_file": str(file), "trace_steps": 2})
    for tokens in batches(5, rows=16, length=128):
        step(engine, tokens)
    engine.destroy()
    spans = spans_by_track(json.loads(file.read_text()))
    assert set(spans) >= {"h2d", "compute", "d2h", "update"}
    assert overlap_us(spans["h2d"], spans["compute"]) > 0
    assert overlap_us(spans["d2h"], spans["compute"]) > 0
    assert overlap_us(spans["update"], spans["h2d"]) > 0
    assert overlap_us(spans["update"], spans["compute"]) > 0


def spans_by_track(trace: dict[str, Any]) -> dict[str, list[tuple[float, float]]]:
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    spans: dict[str, list[tuple[float, float]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            spans.setdefault(names[event["tid"]], []).append((event["ts"], event["ts"] + event["dur"]))
    return spans


def overlap_us(first: list[tuple[float, float]], second: list[tuple[float, float]]) -> float:
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in first for b in second)


def test_retry_after_out_of_memory_equals_a_fresh_run() -> None:
    engine = engine_of(small_model(), "bf16", block={})
    data = batches(3)
    step(engine, data[0])
    room = torch.cuda.mem_get_info()[0]
    hog = torch.empty(int(room * 0.97), dtype=torch.uint8, device="cuda")
    # Memory that the allocator holds but does not use would still serve the step.
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_allocated() / torch.cuda.mem_get_info()[1])
    with pytest.raises(torch.OutOfMemoryError):
        step(engine, torch.randint(0, 256, (512, 128), device="cuda"))
    torch.cuda.set_per_process_memory_fraction(1.0)
    del hog
    engine.optimizer.reset_iteration("out of memory")
    step(engine, data[1])
    retried = engine._zero3_consolidated_16bit_state_dict()
    engine.destroy()

    fresh = engine_of(small_model(), "bf16", block={})
    for tokens in data[:2]:
        step(fresh, tokens)
    expected = fresh._zero3_consolidated_16bit_state_dict()
    fresh.destroy()
    assert all(torch.equal(retried[name], expected[name]) for name in expected)
