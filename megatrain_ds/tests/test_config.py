"""The megatrain block: its surface is frozen here, and each wrong value gives a message with a next action."""

from __future__ import annotations

import pickle
import warnings

import pytest
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from pydantic import ValidationError

from megatrain_ds.config import MegaTrainConfig
from megatrain_ds.errors import (
    ConfigError,
    EngineConfigError,
    HostMemoryError,
    MegaTrainError,
    MegaTrainWarning,
    StateError,
    explain,
)

DEFAULTS = {
    "weight_slots": 2,
    "gradient_slots": 2,
    "synchronous": False,
    "finite_check": True,
    "pin_memory": True,
    "units": None,
    "activations": "recompute",
    "compile": False,
    "update_kernel": "native",
    "update_threads": None,
    "defer_moments": True,
    "host_memory_limit_gib": None,
    "trace_file": None,
    "trace_after": 2,
    "trace_steps": 3,
}


def read(block: object) -> MegaTrainConfig:
    return MegaTrainConfig.from_deepspeed({"offload_engine": "megatrain", "megatrain": block})


def test_the_fields_and_their_defaults_are_frozen():
    assert MegaTrainConfig.from_deepspeed({}).model_dump() == DEFAULTS


def test_every_field_is_documented():
    for name, described in MegaTrainConfig.model_fields.items():
        assert described.description, name
        assert described.description.endswith("."), name


def test_a_block_is_read_from_the_parsed_configuration():
    parsed = DeepSpeedConfig({"train_batch_size": 1, "megatrain": {"units": ["Block"], "host_memory_limit_gib": 12}})
    config = MegaTrainConfig.from_deepspeed(parsed)
    assert config.units == ("Block",)
    assert config.host_memory_limit_gib == 12.0


def test_settings_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        read({}).weight_slots = 4


@pytest.mark.parametrize(
    ("block", "parts"),
    [
        ({"weight_slot": 3}, ["megatrain.weight_slot = 3", "not a setting", 'Did you mean "weight_slots"?', "units"]),
        ({"zzz": 1}, ["megatrain.zzz = 1", "Use one of: weight_slots, gradient_slots"]),
        ({"weight_slots": "auto"}, ["megatrain.weight_slots = 'auto'", "Leave the setting out"]),
        ({"units": ["Block", "auto"]}, ["megatrain.units[1] = 'auto'", "Leave the setting out"]),
        ({"other": {"deep": "auto"}}, ["megatrain.other.deep = 'auto'"]),
        ("auto", ["megatrain = 'auto'", "object of settings"]),
        (3, ["megatrain = 3", "object of settings", "or leave it out"]),
        ({"weight_slots": 1}, ["megatrain.weight_slots = 1", "greater than or equal to 2", "default 2"]),
        ({"weight_slots": 2.5}, ["megatrain.weight_slots = 2.5", "valid integer"]),
        ({"weight_slots": "3"}, ["megatrain.weight_slots = '3'", "valid integer"]),
        ({"weight_slots": True}, ["megatrain.weight_slots = True", "valid integer"]),
        ({"gradient_slots": 0}, ["megatrain.gradient_slots = 0", "greater than or equal to 1"]),
        ({"pin_memory": 1}, ["megatrain.pin_memory = 1", "valid boolean", "default True"]),
        ({"units": "Block"}, ["megatrain.units = 'Block'", "valid tuple"]),
        ({"units": []}, ["megatrain.units = []", "at least one"]),
        ({"units": [""]}, ["megatrain.units = ['']", "none of them empty"]),
        ({"units": [7]}, ["megatrain.units.0 = 7", "valid string"]),
        ({"activations": "host"}, ["megatrain.activations = 'host'", "'recompute' or 'keep'"]),
        ({"update_kernel": "cuda"}, ["megatrain.update_kernel = 'cuda'", "'native', 'torch' or 'deepspeed'"]),
        ({"update_threads": 0}, ["megatrain.update_threads = 0", "greater than or equal to 1"]),
        ({"host_memory_limit_gib": 0}, ["megatrain.host_memory_limit_gib = 0", "greater than 0"]),
        ({"host_memory_limit_gib": float("nan")}, ["megatrain.host_memory_limit_gib = nan", "finite"]),
        ({"trace_file": ""}, ["megatrain.trace_file = ''", "at least 1 character"]),
        ({"trace_file": "t.json", "trace_steps": 0}, ["megatrain.trace_steps = 0", "greater than or equal to 1"]),
    ],
)
def test_a_wrong_value_is_named_with_the_rule_and_the_next_action(block, parts):
    with pytest.raises(EngineConfigError) as caught:
        read(block)
    for part in parts:
        assert part in str(caught.value)


def test_deepspeeds_own_handlers_catch_the_error_and_it_pickles():
    with pytest.raises(DeepSpeedConfigError) as caught:
        read({"zzz": 1})
    assert isinstance(caught.value, ConfigError | MegaTrainError | ValueError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is EngineConfigError
    assert str(again) == str(caught.value)


@pytest.mark.parametrize("name", ["trace_steps", "trace_after"])
def test_trace_settings_without_a_file_warn(name):
    with pytest.warns(MegaTrainWarning, match=rf"{name} = 4: has no effect.*trace_file"):
        read({name: 4})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read({name: 4, "trace_file": "trace.json"})
        read({})


def test_messages_state_all_their_parts():
    assert explain("a.b", 3, "is even", "Set 2") == "a.b = 3: is even. Set 2."
    memory = pickle.loads(pickle.dumps(HostMemoryError(3 * 2**30, 2**30, "Use a smaller model")))
    assert (memory.need_bytes, memory.have_bytes) == (3 * 2**30, 2**30)
    assert "need 3.00 GiB" in str(memory)
    assert "have 1.00 GiB" in str(memory)
    assert str(memory).endswith("Use a smaller model.")
    assert isinstance(memory, MemoryError)
    state = pickle.loads(pickle.dumps(StateError("slot 1: fill", ("EMPTY", "READY"), "IN_USE", "Release it first")))
    assert str(state) == "slot 1: fill: allowed from EMPTY or READY, but the state is IN_USE. Release it first."
