"""Which class a constructor call builds, by every route that DeepSpeed has, and what is refused."""

from __future__ import annotations

import argparse
import base64
import copyreg
import json
import warnings

import deepspeed
import pytest
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.hybrid_engine import DeepSpeedHybridEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

from megatrain_ds.engine import MegaTrainEngine
from megatrain_ds.errors import EngineConfigError, MegaTrainWarning, UnsupportedVersionError
from megatrain_ds.plugin import dispatch
from megatrain_ds.plugin.dispatch import choose_class
from megatrain_ds.tests.programs import read_result, run_program

STOCK = {"train_batch_size": 1, "zero_optimization": {"stage": 3}, "steps_per_print": 1000000}
OURS = {**STOCK, "offload_engine": "megatrain"}


def choose(config: dict, cls: type = DeepSpeedEngine) -> type:
    return choose_class(
        DeepSpeedEngine, cls, (), {"args": None, "model": None, "config_class": DeepSpeedConfig(config)}
    )


def write(tmp_path, config: dict) -> str:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config))
    return str(path)


def encode(config: dict) -> str:
    return base64.urlsafe_b64encode(json.dumps(config).encode()).decode()


ROUTES = {
    "dict": lambda config, tmp_path: {"config": config},
    "path": lambda config, tmp_path: {"config": write(tmp_path, config)},
    "base64": lambda config, tmp_path: {"config": encode(config)},
    "config_params": lambda config, tmp_path: {"config_params": config},
    "args.deepspeed_config": lambda config, tmp_path: {
        "args": argparse.Namespace(deepspeed_config=write(tmp_path, config), local_rank=0)
    },
}


def blocks() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_of_initialize_builds_our_engine(route, tmp_path):
    engine, *_ = deepspeed.initialize(model=blocks(), **ROUTES[route](OURS, tmp_path))
    try:
        assert type(engine) is MegaTrainEngine
        assert isinstance(engine, DeepSpeedEngine)
    finally:
        engine.destroy()


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_without_the_key_builds_deepspeeds(route, tmp_path):
    engine, *_ = deepspeed.initialize(model=blocks(), **ROUTES[route](STOCK, tmp_path))
    try:
        assert type(engine) is DeepSpeedEngine
    finally:
        engine.destroy()


def test_a_constructor_call_may_be_positional():
    parsed = DeepSpeedConfig(OURS)
    positional = (None, None, None, None, None, None, None, None, None, OURS, parsed)
    assert choose_class(DeepSpeedEngine, DeepSpeedEngine, positional, {}) is MegaTrainEngine
    assert choose_class(DeepSpeedEngine, DeepSpeedEngine, (None, None), {"config": OURS}) is MegaTrainEngine
    assert choose_class(DeepSpeedEngine, DeepSpeedEngine, (None, None), {"config": STOCK}) is DeepSpeedEngine


def test_a_subclass_of_our_engine_is_built_as_it_is():
    own = type("Own", (MegaTrainEngine,), {})
    assert choose(OURS, own) is own


def test_making_an_instance_without_configuration_is_as_before():
    for blank in (DeepSpeedEngine.__new__(DeepSpeedEngine), copyreg.__newobj__(DeepSpeedEngine)):
        assert type(blank) is DeepSpeedEngine
        blank.__dict__.update(vars(nn.Module()), optimizer=None, checkpoint_engine=None)
    with pytest.raises(TypeError, match="model"):
        DeepSpeedEngine(None)
    with pytest.raises(TypeError, match="colour"):
        DeepSpeedEngine(None, None, colour=1)


def test_other_base_classes_get_the_constructors_arguments():
    class Base:
        def __new__(cls, *args, **kwargs):
            made = object.__new__(cls)
            object.__setattr__(made, "seen", (args, kwargs))
            return made

    class Mixed(DeepSpeedEngine, Base):
        def __init__(self, *args, **kwargs):
            nn.Module.__init__(self)

        def __del__(self):
            pass

    assert Mixed(1, colour=2).seen == ((1,), {"colour": 2})


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ("megatrian", ["offload_engine = 'megatrian'", 'valid names: "megatrain"', 'Did you mean "megatrain"?']),
        ("MegaTrain", ["offload_engine = 'MegaTrain'", 'Did you mean "megatrain"?']),
        ("zero", ["offload_engine = 'zero'", "remove the key for DeepSpeed's own engine"]),
        ("auto", ["offload_engine = 'auto'", 'valid names: "megatrain"']),
        (True, ["offload_engine = True", 'valid names: "megatrain"']),
        (None, ["offload_engine = None", 'valid names: "megatrain"']),
        (["megatrain"], ["offload_engine = ['megatrain']", 'valid names: "megatrain"']),
    ],
)
def test_an_unknown_engine_is_refused_with_the_valid_names(value, parts):
    with pytest.raises(DeepSpeedConfigError) as caught:
        deepspeed.initialize(model=blocks(), config={**STOCK, "offload_engine": value})
    assert isinstance(caught.value, EngineConfigError)
    for part in parts:
        assert part in str(caught.value)


def test_a_refused_key_stops_initialize_before_the_engine_is_built():
    with pytest.raises(EngineConfigError, match=r"zero_optimization.stage = 1: .*Set \"stage\": 3"):
        deepspeed.initialize(model=blocks(), config={**OURS, "zero_optimization": {"stage": 1}})


def test_engines_of_their_own_are_refused_by_name():
    own = type("OwnEngine", (DeepSpeedEngine,), {})
    for cls in (PipelineEngine, DeepSpeedHybridEngine, own):
        with pytest.raises(EngineConfigError, match=rf"cannot stream for .*{cls.__name__}.*remove \"offload_engine\""):
            choose(OURS, cls)
        assert choose(STOCK, cls) is cls
    with pytest.raises(EngineConfigError, match=r"hybrid_engine.enabled = True"):
        deepspeed.initialize(model=blocks(), config={**OURS, "hybrid_engine": {"enabled": True}})


def test_a_pipeline_module_is_refused_by_name():
    deepspeed.init_distributed()
    module = deepspeed.pipe.PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], num_stages=1, loss_fn=nn.MSELoss())
    with pytest.raises(EngineConfigError, match=r"PipelineEngine.*no PipelineModule"):
        deepspeed.initialize(model=module, config=OURS)


def test_a_block_without_the_key_warns():
    with pytest.warns(MegaTrainWarning, match=r"megatrain = .*has no effect without \"offload_engine\""):
        assert choose({**STOCK, "megatrain": {"weight_slots": 3}}) is DeepSpeedEngine


@pytest.mark.parametrize("name", ["ofload_engine", "offload-engine", "Offload_Engine", "engine"])
def test_a_misspelt_key_warns(name: str):
    with pytest.warns(MegaTrainWarning, match=rf'{name} = \'megatrain\': .*no effect. Write "offload_engine"'):
        assert choose({**STOCK, name: "megatrain"}) is DeepSpeedEngine


def test_a_key_inside_another_section_warns():
    nested = {**STOCK, "optimizer": {"type": "AdamW", "offload_engine": "megatrain"}}
    with pytest.warns(MegaTrainWarning, match=r"optimizer.offload_engine = 'megatrain': .*out of \"optimizer\""):
        assert choose(nested) is DeepSpeedEngine


def test_neither_key_is_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error", MegaTrainWarning)
        assert choose(STOCK) is DeepSpeedEngine


def test_a_constructor_without_the_parameters_is_shown():
    class Changed:
        def __init__(self, args, model, settings=None):
            pass

    with pytest.raises(UnsupportedVersionError) as caught:
        choose_class(Changed, Changed, (None, None, DeepSpeedConfig(OURS)), {})
    assert "(self, args, model, settings=None)" in str(caught.value)
    assert "no constructor parameter config_class and config" in str(caught.value)
    assert choose_class(Changed, Changed, (None, None, DeepSpeedConfig(STOCK)), {}) is Changed


def test_the_hooked_constructor_still_has_the_parameters():
    dispatch._check_signature(DeepSpeedEngine)


TRAIN = """
import json, sys, traceback
import torch, deepspeed
from torch import nn
frames = []
class Block(nn.Linear):
    def forward(self, x):
        frames.extend(frame.filename for frame in traceback.extract_stack())
        return super().forward(x)
torch.manual_seed(0)
engine, optimizer, *_ = deepspeed.initialize(
    model=nn.Sequential(Block(4, 4), Block(4, 4)),
    config={"train_batch_size": 2, "zero_optimization": {"stage": 3}, "gradient_clipping": 0.1,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}},
)
losses = []
for _ in range(3):
    loss = engine(torch.ones(2, 4, device=engine.device)).pow(2).sum()
    engine.backward(loss)
    engine.step()
    losses.append(loss.item().hex())
print("RESULT " + json.dumps({
    "losses": losses,
    "classes": [cls.__module__ + "." + cls.__name__ for cls in (*type(engine).__mro__, *type(optimizer).__mro__)],
    "ours": [name for name in frames if "megatrain_ds" in name],
    "plugin": "megatrain_ds" in sys.modules,
}))
"""


def test_without_the_key_a_run_is_the_same_as_without_the_plugin(installed):
    with_plugin = read_result(run_program(TRAIN, installed))
    without = read_result(run_program(TRAIN, installed, TORCH_DEVICE_BACKEND_AUTOLOAD="0"))
    assert (with_plugin.pop("plugin"), without.pop("plugin")) == (True, False)
    assert with_plugin == without
    assert with_plugin["ours"] == []
