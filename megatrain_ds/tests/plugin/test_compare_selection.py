"""In a program that `megatrain-ds compare` started, the run decides which engine is built, whatever the key says."""

from __future__ import annotations

import warnings

import deepspeed
import pytest
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine

from megatrain_ds.engine import MegaTrainEngine
from megatrain_ds.errors import ConfigError, EngineConfigError
from megatrain_ds.plugin.compare_spec import CompareSpec
from megatrain_ds.plugin.dispatch import choose_class
from megatrain_ds.plugin.selection import COMPARE_VARIABLE, selects_megatrain

STOCK = {"train_batch_size": 1, "zero_optimization": {"stage": 3}, "steps_per_print": 1000000}
CONFIGS = {
    "without the key": STOCK,
    "with the key": {**STOCK, "offload_engine": "megatrain"},
    "with a block alone": {**STOCK, "megatrain": {"weight_slots": 3}},
}


@pytest.fixture
def compare(tmp_path, monkeypatch):
    """`compare(flag)` makes this process one of the two runs."""

    def publish(flag: bool) -> None:
        spec = CompareSpec(name=str(flag), flag=flag, num_steps=5, num_warmup=1, folder=str(tmp_path))
        for name, value in spec.publish().items():
            monkeypatch.setenv(name, value)

    return publish


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize(("flag", "built"), [(True, MegaTrainEngine), (False, DeepSpeedEngine)])
def test_the_engine_is_the_runs(config, flag, built, compare):
    compare(flag)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for given in ({"config_class": DeepSpeedConfig(config)}, {"config": config}):
            assert choose_class(DeepSpeedEngine, DeepSpeedEngine, (), {"model": None, **given}) is built


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_zero_init_partitions_in_the_stock_run_alone(config, compare):
    for flag, module in (
        (True, "megatrain_ds.plugin.zero_init"),
        (False, "deepspeed.runtime.zero.partition_parameters"),
    ):
        compare(flag)
        context = deepspeed.zero.Init(config_dict_or_path=config)
        assert type(context).__module__ == module


def test_a_wrong_name_is_still_refused_with_the_flag(compare):
    compare(True)
    with pytest.raises(EngineConfigError, match="megatrian"):
        selects_megatrain({"offload_engine": "megatrian"})
    compare(False)
    assert selects_megatrain({"offload_engine": "megatrian"}) is False


@pytest.mark.parametrize("text", [None, "{", "{}", "[1]"])
def test_a_variable_that_leads_nowhere_is_named(text, tmp_path, monkeypatch):
    path = tmp_path / "spec.json"
    if text is not None:
        path.write_text(text)
    monkeypatch.setenv(COMPARE_VARIABLE, str(path))
    with pytest.raises(ConfigError, match=r"MEGATRAIN_DS_COMPARE = '.*spec.json': is set by `megatrain-ds compare`"):
        selects_megatrain(STOCK)
