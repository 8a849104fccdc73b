"""What a build allocates and takes over, and that a refused build leaves the model as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megatrain_ds.errors import EngineConfigError, HostMemoryError, MegaTrainWarning
from megatrain_ds.memory.arena import PAGE_BYTES
from megatrain_ds.model.parameters import StreamedParameter, raw_data
from megatrain_ds.optim import native
from megatrain_ds.tests.engine.models import (
    MATRIX,
    NUM_BLOCKS,
    Net,
    differing,
    engine_threads,
    make_model,
    state,
    train,
)

NUM_PARAMETERS = (2 * NUM_BLOCKS + 2) * MATRIX


@pytest.mark.parametrize(("bf16", "root_bytes"), [(True, 2), (False, 4)])
def test_sixteen_host_bytes_a_parameter(start, bf16, root_bytes):
    engine = start(bf16=bf16)
    report = engine.memory_report()
    assert report["num_parameters"] == NUM_PARAMETERS
    # bf16: compute 2, gradient 2, master 4, moments 8; fp32: compute and master 4, gradient 4, moments 8.
    assert report["host_bytes"] == 16 * NUM_PARAMETERS
    assert report["host_bytes_per_param"] == 16.0
    itemsize = root_bytes
    # Two weight slots and two gradient buffers of one block, and the root weights (embedding and head).
    assert report["device_bytes"] == (2 + 2) * 2 * MATRIX * itemsize + 2 * MATRIX * itemsize
    assert report["pinned_bytes"] == 0  # nothing to lock for on the CPU


def test_frozen_weights_cost_two_bytes(start):
    model = make_model()
    model.layers.requires_grad_(False)
    frozen, trained = 2 * NUM_BLOCKS * MATRIX, 2 * MATRIX
    assert start(model, bf16=True).memory_report()["host_bytes"] == 2 * frozen + 16 * trained


@pytest.mark.parametrize("accumulation_dtype", ["fp32", "bf16"])
def test_accumulation_costs_what_the_model_says(start, accumulation_dtype):
    keys = {"gradient_accumulation_steps": 2, "data_types": {"grad_accum_dtype": accumulation_dtype}}
    engine = start(bf16=True, **keys)
    accumulator = {"fp32": 4, "bf16": 2}[accumulation_dtype]
    # compute 2, accumulator, master 4, moments 8 a parameter; a ring of three blocks of 1 MiB.
    expected = (2 + accumulator + 4 + 8) * NUM_PARAMETERS + 3 * (1 << 20)
    assert engine.memory_report()["host_bytes"] == engine.runtime.footprint.host_bytes == expected


def test_parameters_keep_identity_shape_and_values(start):
    model = make_model()
    before = {name: (param, param.detach().clone()) for name, param in model.named_parameters()}
    engine = start(model)
    assert engine.module is model
    for name, param in model.named_parameters():
        assert param is before[name][0]
        assert isinstance(param, StreamedParameter)
        assert torch.equal(param.detach(), before[name][1])


def test_streamed_parameters_show_the_arena_and_root_parameters_their_device_copy(start):
    engine = start()
    for unit, host in zip(engine.runtime.units, engine.runtime.store.units, strict=True):
        shared = [
            raw_data(param).data_ptr() == view.data_ptr()
            for (_, param), view in zip(unit.parameters, host.compute, strict=True)
        ]
        assert set(shared) == {not unit.is_root}
        assert host.compute_block.data_ptr() % PAGE_BYTES == 0


def test_masters_are_the_weights_as_cast(start):
    engine = start(bf16=True)
    for entry in engine.optimizer.parameters[0]:
        assert entry.view("master").dtype is torch.float32
        assert torch.equal(entry.view("master"), entry.param.detach().float())


def test_too_little_memory_is_refused_before_anything_is_taken_over(start):
    model = make_model()
    values = {name: param.detach().clone() for name, param in model.named_parameters()}
    with pytest.raises(HostMemoryError, match=rf"need .*\({16 * NUM_PARAMETERS} bytes\), have .*\(1073 bytes\)"):
        start(model, block={"host_memory_limit_gib": 1e-6})
    assert engine_threads() == []
    for name, param in model.named_parameters():
        assert type(param) is nn.Parameter
        assert torch.equal(param, values[name])
        assert not param._post_accumulate_grad_hooks
    assert not any("forward" in vars(module) for module in model.modules())
    assert len(train(start(model), range(1))) == 1


def test_a_model_without_blocks_works_as_root_units(start):
    with pytest.warns(UserWarning, match="Net has no repeated blocks"):
        engine = start(Net(num_blocks=1))
    assert all(unit.is_root for unit in engine.runtime.units)
    assert engine.runtime.pool.num_bytes == 0
    losses = train(engine, range(4))
    assert losses[0] != losses[3]


def test_no_compiler_means_the_torch_kernel_one_warning_and_the_same_bits(start, monkeypatch, tmp_path):
    reference = start(make_model())
    train(reference, range(2))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    # A library that an earlier test loaded stays loaded.
    native._default_library.cache_clear()
    with pytest.warns(MegaTrainWarning, match="no-such-compiler"):
        engine = start(make_model(), block={"update_kernel": "native"})
    assert engine.runtime.pipeline.kernel.name == "torch"
    train(engine, range(2))
    assert differing(state(engine), state(reference)) == []


def test_a_failure_after_the_build_gives_everything_back(start):
    model = make_model()
    with pytest.raises(TypeError, match="no_such_setting"):
        start(model, scheduler={"type": "WarmupLR", "params": {"no_such_setting": 1}})
    assert engine_threads() == []
    assert {type(param) for param in model.parameters()} == {nn.Parameter}
    assert not any("forward" in vars(module) for module in model.modules())
    assert len(train(start(model), range(1))) == 1


def test_a_trace_file_that_cannot_be_written_is_refused_at_once(start, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineConfigError, match=r"megatrain\.trace_file = .*file/trace\.json.*Name a file"):
        start(make_model(), block={"trace_file": str(tmp_path / "file" / "trace.json")})
    with pytest.raises(EngineConfigError, match=r"megatrain\.trace_file = .*Is a directory.*Name a file"):
        start(make_model(), block={"trace_file": str(tmp_path)})
    assert engine_threads() == []


def test_an_engine_whose_trace_is_lost_gives_everything_back(start, tmp_path):
    folder = tmp_path / "folder"
    model = make_model()
    engine = start(model, block={"trace_file": str(folder / "trace.json"), "trace_after": 0, "trace_steps": 9})
    train(engine, range(1))
    folder.rmdir()
    folder.write_text("in the way")
    with pytest.warns(RuntimeWarning, match="the trace could not be written"):
        engine.destroy()
    assert engine_threads() == []
    assert {type(param) for param in model.parameters()} == {nn.Parameter}
