"""The recompute leaves no trace: buffers, attributes, hooks, containers and caches see one forward."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import DynamicCache, StaticCache
from transformers.models.llama import LlamaConfig

from megatrain_ds.errors import UnsupportedModelError
from megatrain_ds.runtime.replay import Replay, snapshot


def run_twice(block: nn.Module, *args, replay: Replay | None = None):
    """The real forward and the recompute of it; returns both results."""
    replay = replay or Replay(block, "layers.0")
    with replay.first_run() as before:
        first = block(*args)
    with replay.second_run(before):
        second = block(*args)
    return first, second


class Stateful(nn.Module):
    """Writes a buffer in place, replaces another, counts, remembers, and drops with its counter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("written", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(3))
        self.register_buffer("constant", torch.ones(3))
        self.calls = 0
        self.seen: list[int] = []
        self.first = True

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.written.add_(1)
        self.replaced = self.replaced + 1
        self.calls += 1
        self.seen.append(self.calls)
        was_first, self.first = self.first, False
        return self.inner(hidden) * self.written.sum() + self.replaced.sum() + self.calls + float(was_first)


def test_buffers_counters_and_containers_change_once():
    block = Stateful()
    replay = Replay(block, "layers.0")
    for call in range(1, 4):
        first, second = run_twice(block, torch.ones(1, 2), replay=replay)
        # In its mode the block is known from the second call on: the same must hold then.
        assert torch.equal(first, second), call
        assert block.written.tolist() == [call] * 2
        assert block.replaced.tolist() == [call] * 3
        assert (block.calls, block.seen, block.first) == (call, list(range(1, call + 1)), False)


def test_batch_statistics_move_once_and_the_first_run_in_training_finds_them():
    norm = nn.BatchNorm1d(2)
    twin = nn.BatchNorm1d(2)
    replay = Replay(norm, "norm")
    norm.eval()
    run_twice(norm, torch.randn(4, 2), replay=replay)
    norm.train()
    for _ in range(3):
        batch = torch.randn(4, 2)
        twin(batch)
        first, second = run_twice(norm, batch, replay=replay)
        assert torch.equal(first, second)
    assert torch.equal(norm.running_mean, twin.running_mean)
    assert torch.equal(norm.running_var, twin.running_var)
    assert norm.num_batches_tracked.item() == 3


def test_untouched_buffers_are_not_copied_once_the_block_is_known():
    block = Stateful()
    replay = Replay(block, "layers.0")
    with replay.first_run() as before:
        block(torch.ones(1, 2))
    assert {name for _, name in before.buffers} == {"written", "replaced", "constant"}
    with replay.first_run() as before:
        block(torch.ones(1, 2))
    assert {name for _, name in before.buffers} == {"written", "replaced"}


def test_a_buffer_that_is_replaced_only_later_is_seen_from_then_on():
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.zeros(3))
            self.replaces = False

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            if self.replaces:
                self.table = self.table + 1
            return hidden + self.table.sum()

    block = Late()
    replay = Replay(block, "layers.0")
    run_twice(block, torch.ones(1), replay=replay)
    block.replaces = True
    run_twice(block, torch.ones(1), replay=replay)
    first, second = run_twice(block, torch.ones(1), replay=replay)
    assert first.item() == second.item() == 7.0
    assert block.table.tolist() == [2.0] * 3


def test_observing_hooks_run_once_and_changing_hooks_twice():
    block = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    seen: list[str] = []
    block[0].register_forward_hook(lambda *_: seen.append("observe"))
    block[0].register_forward_pre_hook(lambda *_: seen.append("observe before"))

    def double(_module, _args, output):
        seen.append("double")
        return 2 * output

    def write(_module, args):
        seen.append("write")
        args[0].mul_(3)

    block[1].register_forward_hook(double)
    block[1].register_forward_pre_hook(write)
    tables = [dict(module._forward_hooks) for module in block]
    first, second = run_twice(block, torch.ones(1, 2))
    assert torch.equal(first, second)
    assert seen == ["observe before", "observe", "write", "double", "write", "double"]
    assert [dict(module._forward_hooks) for module in block] == tables


def test_an_exception_in_either_run_leaves_the_block_as_it_was():
    block = Stateful()
    hook = block.inner.register_forward_hook(lambda *_: None)
    table = dict(block.inner._forward_hooks)
    replay = Replay(block, "layers.0")
    with pytest.raises(RuntimeError), replay.first_run():
        block(torch.ones(1, 3))
    with replay.first_run() as before:
        block(torch.ones(1, 2))
    attributes = dict(block.__dict__)
    with pytest.raises(RuntimeError), replay.second_run(before):
        block(torch.ones(1, 3))
    assert dict(block.__dict__) == attributes
    assert dict(block.inner._forward_hooks) == table
    hook.remove()


def test_containers_are_given_to_the_recompute_as_they_were():
    tensor = torch.ones(2)
    given = ([tensor], {"inner": [1], "tensor": tensor}, {3}, (tensor, "text"), tensor)
    kept = snapshot(given, "layers.0")
    given[0].append(tensor)
    given[1]["new"] = 1
    given[1]["inner"].append(2)
    given[2].add(4)
    assert [len(part) for part in kept[:3]] == [1, 2, 1]
    assert kept[1]["inner"] == [1]
    assert kept[0][0] is kept[1]["tensor"] is kept[3][0] is kept[4] is tensor


def test_a_growing_cache_is_seen_as_it_was():
    cache = DynamicCache()
    cache.update(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 0)
    kept = snapshot({"past_key_values": cache}, "layers.0")["past_key_values"]
    cache.update(torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4), 0)
    assert (kept.get_seq_length(), cache.get_seq_length()) == (2, 5)


def test_a_cache_written_in_place_is_refused():
    config = LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=8)
    cache = StaticCache(config=config, max_cache_len=4)
    with pytest.raises(UnsupportedModelError, match="layers.5 was given a StaticCache.*Pass use_cache=False"):
        snapshot((cache,), "layers.5")
