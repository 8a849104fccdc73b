"""The list of systems and what all share: a module each, short, with the interface; options; compiled layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from comparisons.models import build_model
from comparisons.systems import SYSTEMS, Settings, SilentSystem, compile_layers, load
from comparisons.systems.deepspeed_common import configuration

ROOT = Path(__file__).parents[1]
TINY = ROOT.parent / "configs" / "models" / "tiny.json"
MAX_SYSTEM_LINES, MAX_MODULE_LINES = 120, 350
SHARED = {"__init__", "deepspeed_common"}


def settings(**options: object) -> Settings:
    return Settings(2, 16, clip=0.5, learning_rate=1e-3, weight_decay=0.1, betas=(0.9, 0.95), options=options)


def test_every_system_has_a_module_and_every_module_is_a_system():
    assert {path.stem for path in (ROOT / "systems").glob("*.py")} == {*SYSTEMS, *SHARED}
    assert all(callable(load(name).build) for name in SYSTEMS)
    with pytest.raises(ValueError, match="system = 'zero9': no such system. Choose from megatrain"):
        load("zero9")


def test_modules_are_read_in_one_sitting():
    lines = {path: len(path.read_text().splitlines()) for path in ROOT.rglob("*.py")}
    limits = {path: MAX_SYSTEM_LINES if path.parent.name == "systems" else MAX_MODULE_LINES for path in lines}
    assert [path.name for path in lines if lines[path] > limits[path]] == []


def test_a_system_that_counts_nothing_says_nothing():
    system = SilentSystem()
    assert (system.breakdown_steps, system.drain(), system.report(), system.breakdown()) == (0, None, {}, [])


def test_compile_is_taken_out_of_the_options():
    assert settings(compile=True, recompute=False).compiled() == (True, {"recompute": False})
    assert settings().compiled() == (False, {})


def test_deepspeed_systems_have_the_same_clipping_and_optimizer():
    plain = configuration(settings(), {"offload_param": {"device": "cpu"}})
    flagged = configuration(settings(), {}, offload_engine="megatrain")
    assert plain["gradient_clipping"] == 0.5
    assert plain["optimizer"]["params"] == {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}
    assert plain["zero_optimization"] == {"stage": 3, "offload_param": {"device": "cpu"}}
    assert flagged["offload_engine"] == "megatrain"
    assert {key for key in plain if plain[key] != flagged.get(key)} == {"zero_optimization"}


def test_each_layer_is_compiled_in_place(monkeypatch):
    """Seen without a compiler, which would take half a minute."""
    model = build_model(TINY, torch.device("cpu"))
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compiled.append(module))
    compile_layers(model)
    assert compiled == list(model.model.layers)


def test_weights_depend_on_the_seed_alone():
    one, same, other = (build_model(TINY, torch.device("cpu"), seed) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
