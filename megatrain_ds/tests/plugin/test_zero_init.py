"""`zero.Init` for our configuration: full tensors in the compute type, and no trace once it ends."""

from __future__ import annotations

import contextlib
import gc
import json
import types
from typing import Generic, TypeVar

import deepspeed
import pytest
import torch
from torch import nn

from megatrain_ds.errors import EngineConfigError, UnsupportedVersionError
from megatrain_ds.plugin import zero_init

OURS = {"train_batch_size": 1, "zero_optimization": {"stage": 3}, "offload_engine": "megatrain"}
BF16 = {**OURS, "bf16": {"enabled": True}}


@pytest.mark.parametrize("form", ["config_dict_or_path", "config", "path", "positional"])
def test_every_way_to_give_the_configuration_is_inert(form, tmp_path):
    if form == "path":
        path = tmp_path / "ds_config.json"
        path.write_text(json.dumps(BF16))
        context = deepspeed.zero.Init(config_dict_or_path=str(path))
    elif form == "positional":
        context = deepspeed.zero.Init(None, None, True, None, False, BF16)
    else:
        context = deepspeed.zero.Init(**{form: BF16})
    linear = nn.functional.linear
    with context:
        built = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    assert isinstance(context, deepspeed.zero.Init)
    assert deepspeed.comm.is_initialized()
    assert not any(hasattr(parameter, "ds_id") for parameter in built.parameters())
    assert built[0].weight.shape == (2, 3)
    assert {parameter.dtype for parameter in built.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in built.buffers()} == {torch.bfloat16, torch.int64}
    assert nn.functional.linear is linear
    assert nn.Linear(3, 2).weight.dtype is torch.float32


def public_state() -> dict:
    """Everything that the context changes while it is active."""
    classes = {cls: dict(vars(cls)) for cls in zero_init._classes()}
    return {"torch": dict(vars(torch)), "functional": dict(vars(nn.functional)), "classes": classes}


class BreaksError(Exception):
    """What `Breaks` raises."""


class Breaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        raise BreaksError


def build_parts() -> None:
    """A plain module, one on the meta device that is never filled, and a class made inside the context."""
    nn.Linear(3, 2)
    nn.LSTM(3, 2, device="meta")
    nn.Linear(3, 2, device="meta")
    type("Late", (nn.Module,), {"__init__": lambda self: nn.Module.__init__(self)})()


@pytest.mark.parametrize("fails", [False, True])
def test_the_context_leaves_nothing_behind(fails):
    # The first context of a process also imports and builds DeepSpeed's communication.
    context = deepspeed.zero.Init(config_dict_or_path=BF16)
    before = public_state()
    expected = pytest.raises(BreaksError) if fails else contextlib.nullcontext()
    with expected, context:
        assert torch.zeros is not before["torch"]["zeros"]
        build_parts()
        if fails:
            Breaks()
    gc.collect()
    assert public_state() == before
    assert nn.Linear(3, 2).weight.dtype is torch.float32
    assert torch.Tensor([1.5, 2.5]).tolist() == [1.5, 2.5]


def test_classes_made_after_the_context_may_be_generic():
    with deepspeed.zero.Init(config_dict_or_path=BF16):
        nn.Linear(3, 2)
    kind = TypeVar("kind")
    made = types.new_class("Made", (nn.Module, Generic[kind]))
    assert made[int] is not None


def test_a_class_made_inside_stays_usable():
    with deepspeed.zero.Init(config_dict_or_path=BF16):
        late = type("Late", (nn.Linear,), {"__init__": lambda self: nn.Linear.__init__(self, 3, 2)})
        assert late().weight.dtype is torch.bfloat16
    assert late().weight.dtype is torch.float32
    assert "_old_init" not in vars(late)


def test_nested_contexts_end_one_by_one():
    with deepspeed.zero.Init(config_dict_or_path=BF16):
        with deepspeed.zero.Init(config_dict_or_path=BF16):
            inner = nn.Linear(3, 2)
        outer = nn.Linear(3, 2)
    assert (inner.weight.dtype, outer.weight.dtype) == (torch.bfloat16, torch.bfloat16)
    assert nn.Linear(3, 2).weight.dtype is torch.float32


def test_deepspeed_may_suspend_the_context_while_it_builds_an_engine():
    context = deepspeed.zero.Init(config_dict_or_path=BF16)
    before = public_state()
    with context:
        deepspeed.zero.partition_parameters.shutdown_init_context()
        assert public_state() == before
        suspended = nn.Linear(3, 2)
        deepspeed.zero.partition_parameters.restore_init_context()
        resumed = nn.Linear(3, 2)
    assert (suspended.weight.dtype, resumed.weight.dtype) == (torch.float32, torch.bfloat16)
    assert public_state() == before


def test_a_disabled_context_changes_nothing():
    with deepspeed.zero.Init(config_dict_or_path=BF16, enabled=False):
        assert nn.Linear(3, 2).weight.dtype is torch.float32


def test_a_finished_module_keeps_its_types_and_stays_whole():
    module = nn.Linear(3, 2)
    deepspeed.zero.Init(module=module, config_dict_or_path=BF16)
    assert module.weight.shape == (2, 3)
    assert module.weight.dtype is torch.float32
    assert not hasattr(module.weight, "ds_id")


def test_without_configuration_or_key_it_partitions_as_before():
    stock = {key: value for key, value in OURS.items() if key != "offload_engine"}
    for keywords in ({}, {"config_dict_or_path": stock}):
        context = deepspeed.zero.Init(mem_efficient_linear=False, **keywords)
        assert type(context) is deepspeed.zero.Init
    assert type(deepspeed.zero.Init.__new__(deepspeed.zero.Init)) is deepspeed.zero.Init


def test_a_refused_key_is_said_before_weights_load():
    nvme = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/tmp"}}
    with pytest.raises(EngineConfigError, match=r"offload_param.device = 'nvme'"):
        deepspeed.zero.Init(config_dict_or_path={**OURS, "zero_optimization": nvme})
    with pytest.raises(EngineConfigError, match=r"offload_engine = 'megatrian'"):
        deepspeed.zero.Init(config_dict_or_path={**OURS, "offload_engine": "megatrian"})


def test_other_subclasses_are_refused_by_name():
    own = type("OwnInit", (deepspeed.zero.Init,), {})
    with pytest.raises(EngineConfigError, match=r"OwnInit has nothing to do"):
        own(config_dict_or_path=OURS)


def test_a_changed_signature_is_shown():
    class Changed:
        def __init__(self, config_dict_or_path=None, module=None):
            pass

    with pytest.raises(UnsupportedVersionError, match=r"\(self, config_dict_or_path=None, module=None\)"):
        zero_init._choose_class(Changed, Changed, Changed, (OURS,), {})
    stock = deepspeed.zero.Init
    Changed.__init__ = stock.__init__
    with pytest.raises(UnsupportedVersionError, match=r"no method _post_init_method and no method patch_init"):
        zero_init._choose_class(Changed, Changed, Changed, (), {"config": OURS})
    assert zero_init._choose_class(Changed, object, Changed, ({"train_batch_size": 1},), {}) is Changed
