"""Checkpoints of engines in this process: what is saved and what comes back."""

from __future__ import annotations

import copy
from pathlib import Path

import deepspeed
import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from megatrain_ds.checkpoint.deepspeed_layout import MODEL_FILE, load_group_settings, optimizer_file
from megatrain_ds.errors import CheckpointError
from megatrain_ds.tests.checkpoint.engines import config, differing, make_engine, make_model, state_of, train

OPTIMIZER_FILE = optimizer_file(bf16=True)


def test_load_on_a_trained_engine_goes_on_as_the_saved_one(saved, other) -> None:
    folder, state, losses = saved
    groups = other.optimizer.param_groups
    objects = [id(groups), *map(id, groups)]
    path, client_state = other.load_checkpoint(folder)
    assert path == str(folder / "global_step3" / MODEL_FILE)
    assert (client_state["epoch"], client_state["values"].tolist()) == (7, [0, 1, 2])
    assert not {"module", "megatrain", "lr_scheduler", "frozen_param_fragments"} & client_state.keys()
    assert differing(state, state_of(other)) == []
    assert [id(other.optimizer.param_groups), *map(id, other.optimizer.param_groups)] == objects
    assert train(other, range(3, 5)) == losses


@pytest.mark.parametrize("sub_group_size", [1, 10**9])
def test_the_split_into_sub_groups_may_differ(saved, sub_group_size: int) -> None:
    folder, state, losses = saved
    engine = make_engine(make_model(seed=1), sub_group_size=sub_group_size)
    engine.load_checkpoint(folder)
    assert differing(state, state_of(engine)) == []
    assert train(engine, range(3, 5)) == pytest.approx(losses, abs=1e-6)


@pytest.mark.parametrize("options", [{"load_module_only": True}, {"load_optimizer_states": False}], ids=str)
def test_weights_alone_reach_the_forward_and_the_masters(saved, other, options: dict) -> None:
    folder, state, losses = saved
    before = state_of(other)
    other.load_checkpoint(folder, **options)
    changed = set(differing(before, state_of(other)))
    kept = {key for key in state if key.endswith((":exp_avg", ":exp_avg_sq", ":step")) or key.startswith("lr")}
    assert not changed & kept
    assert ("global_steps" in changed) == ("load_optimizer_states" in options)
    remaining = set(differing(state, state_of(other)))
    assert not {key for key in remaining if key.endswith(":master") or "." in key and ":" not in key}
    with torch.no_grad():
        assert other(torch.randint(0, 16, (2, 6))) is not None
    assert train(other, range(3, 4))[0] == losses[0]


def test_tools_read_the_masters_frozen_weights_and_ties(saved) -> None:
    folder, state, _ = saved
    weights = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    assert weights.keys() == make_model().state_dict().keys()
    assert torch.equal(weights.pop("head.weight"), weights["embed.weight"])
    for name, value in weights.items():
        expected = state.get(f"{name}:master", state[name])
        assert torch.equal(value, expected.to(value.dtype)), name


def test_frozen_parameters_can_be_left_out(other, tmp_path: Path) -> None:
    other.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    weights = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    assert not [name for name in weights if name.startswith("layers.0.inner")]
    engine = make_engine(make_model(seed=2))
    before = state_of(engine)
    with pytest.raises(CheckpointError, match="load_module_strict=False"):
        engine.load_checkpoint(tmp_path)
    assert differing(before, state_of(engine)) == []
    engine.load_checkpoint(tmp_path, load_module_strict=False)
    assert all("layers.0" in key for key in differing(state_of(other), state_of(engine)))
    assert torch.equal(engine.module.layers[0].inner.weight, before["layers.0.inner.weight"])


def test_buffers_are_saved_and_loaded(other, tmp_path: Path) -> None:
    other.module.layers[1].table.fill_(5.0)
    other.save_checkpoint(tmp_path)
    other.module.layers[1].table.fill_(6.0)
    other.load_checkpoint(tmp_path)
    assert other.module.layers[1].table.tolist() == [5.0] * 4


def test_writes_of_user_code_are_saved(other, tmp_path: Path) -> None:
    with torch.no_grad():
        other.module.layers[1].inner.weight.fill_(0.5)
        other.module.embed.weight.fill_(0.25)
        other.module.layers[0].inner.weight.fill_(0.125)
    other.save_checkpoint(tmp_path)
    weights = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    assert (weights["layers.1.inner.weight"] == 0.5).all()
    assert (weights["embed.weight"] == 0.25).all()
    assert (weights["layers.0.inner.weight"] == 0.125).all()


def test_step_counts_of_skipped_parameters_survive(tmp_path: Path) -> None:
    engine = make_engine()
    train(engine, range(3))
    train(engine, range(3, 5), skip=1)
    engine.save_checkpoint(tmp_path)
    state, losses = state_of(engine), train(engine, range(5, 7))
    assert (state["layers.1.inner.weight:step"], state["layers.2.inner.weight:step"]) == (3, 5)
    content = torch.load(tmp_path / "global_step5" / OPTIMIZER_FILE, weights_only=False)["optimizer_state_dict"]
    steps = [group["step"] for group in content["optimizer_state_dict"]["state"].values()]
    assert max(steps) == 5
    engine = make_engine(make_model(seed=1))
    engine.load_checkpoint(tmp_path)
    assert differing(state, state_of(engine)) == []
    assert train(engine, range(5, 7)) == losses


def test_before_the_first_step(tmp_path: Path) -> None:
    engine = make_engine()
    engine.save_checkpoint(tmp_path)
    state, losses = state_of(engine), train(engine, range(2))
    engine.load_checkpoint(tmp_path)
    assert differing(state, state_of(engine)) == []
    assert train(engine, range(2)) == losses


def test_stock_zero3_before_its_first_step(tmp_path: Path) -> None:
    stock = make_engine(flag=False)
    stock.save_checkpoint(tmp_path)
    engine = make_engine(make_model(seed=1))
    train(engine, range(1))
    engine.load_checkpoint(tmp_path)
    state = state_of(engine)
    assert all(not state[key].any() for key in state if key.endswith((":exp_avg", ":exp_avg_sq", ":step")))
    fresh = state_of(make_engine())
    assert not [key for key in differing(fresh, state) if key.endswith((":master", ".weight", ".bias"))]


def test_loading_drops_gradients_of_an_unfinished_step(tmp_path: Path) -> None:
    engine = make_engine(accumulation=2)
    engine.save_checkpoint(tmp_path)
    losses = train(engine, range(4))
    engine.load_checkpoint(tmp_path)
    train(engine, range(9, 10))
    with pytest.warns(RuntimeWarning, match="load_checkpoint"):
        engine.load_checkpoint(tmp_path)
    assert train(engine, range(4)) == losses


def test_random_generators_come_back_when_asked(other, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="Call load_checkpoint first"):
        other.restore_rng_state()
    other.save_checkpoint(tmp_path)
    drawn = torch.rand(3)
    other.load_checkpoint(tmp_path)
    assert not torch.equal(torch.rand(3), drawn)
    other.restore_rng_state()
    assert torch.equal(torch.rand(3), drawn)


def test_a_custom_load_function_decides_the_weights(saved, other) -> None:
    folder, state, _ = saved

    def halve(src: dict[str, torch.Tensor], dst: torch.nn.Module) -> None:
        dst.load_state_dict({name: value / 2 for name, value in src.items()})

    other.load_checkpoint(folder, load_optimizer_states=False, custom_load_fn=halve)
    for name in ("embed.weight", "layers.0.inner.weight", "layers.2.inner.weight"):
        assert torch.allclose(other.module.state_dict()[name], state[name] / 2, rtol=1e-2)
    assert torch.equal(state_of(other)["layers.2.inner.weight:master"].bfloat16(), other.module.layers[2].inner.weight)


def test_optimizer_state_dict_round_trip(other) -> None:
    state, content = state_of(other), copy.deepcopy(other.optimizer.state_dict())
    assert [flat.numel() for flat in content["fp32_flat_groups"]] == [
        sum(entry.numel for entry in group) for group in other.optimizer.sub_groups
    ]
    train(other, range(2))
    for form in (content, [content]):
        other.optimizer.load_state_dict(form)
        assert [key for key in differing(state, state_of(other)) if ":" in key or key.startswith("lr")] == []
    with pytest.raises(CheckpointError, match="sub groups"):
        make_engine(sub_group_size=10**9).optimizer.load_state_dict(content)


def test_the_loss_scale_comes_back(other, tmp_path: Path) -> None:
    scaler = DynamicLossScaler(1024.0, 2.0, 100, 1, 2, False, dtype=torch.float16)
    other.optimizer.loss_scaler = scaler
    other.save_checkpoint(tmp_path)
    scaler.cur_scale, scaler.cur_iter = 8.0, 50
    other.load_checkpoint(tmp_path, load_optimizer_states=False)
    assert other.optimizer.loss_scale == 8.0
    other.load_checkpoint(tmp_path)
    assert (other.optimizer.loss_scale, other.optimizer.loss_scaler.cur_iter) == (1024.0, 0)


def test_learning_rates_keep_their_kind() -> None:
    live = [{"lr": torch.tensor(1.0), "betas": (0.1, 0.2), "params": [1]}, {"lr": 1.0, "eps": 2.0, "params": [2]}]
    rates, objects = live[0]["lr"], [id(group) for group in live]
    load_group_settings(live, [{"lr": 0.5, "betas": (0.9, 0.95), "params": [0]}, {"lr": torch.tensor(0.25), "new": 3}])
    assert live[0]["lr"] is rates
    assert rates.item() == 0.5
    assert (live[0]["betas"], live[0]["params"]) == ((0.9, 0.95), [1])
    assert live[1] == {"lr": 0.25, "eps": 2.0, "new": 3, "params": [2]}
    assert isinstance(live[1]["lr"], float)
    assert [id(group) for group in live] == objects


def test_missing_latest_loads_nothing(other, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = state_of(other)
    assert other.load_checkpoint(tmp_path) == (None, None)
    assert "latest" in caplog.text
    assert differing(before, state_of(other)) == []


def test_save_latest_can_be_left_alone(other, tmp_path: Path) -> None:
    other.save_checkpoint(tmp_path, tag="a")
    other.save_checkpoint(tmp_path, tag="b", save_latest=False)
    assert (tmp_path / "latest").read_text() == "a"
    assert (tmp_path / "b" / MODEL_FILE).is_file()


def test_16bit_model(other, tmp_path: Path) -> None:
    assert other.save_16bit_model(tmp_path / "deep", "weights.bin")
    weights = torch.load(tmp_path / "deep" / "weights.bin", weights_only=True)
    live = other.module.state_dict()
    assert weights.keys() == live.keys()
    assert all(torch.equal(weights[name], live[name]) and weights[name].dtype == live[name].dtype for name in live)
    assert weights["head.weight"] is weights["embed.weight"]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["weights.bin"]
    other._config.zero_config.gather_16bit_weights_on_model_save = False
    assert not other.save_16bit_model(tmp_path, "nothing.bin")
    assert not (tmp_path / "nothing.bin").exists()


def test_an_engine_without_optimizer(saved, tmp_path: Path) -> None:
    folder, state, _ = saved
    engine = deepspeed.initialize(model=make_model(seed=1), config=config())[0]
    engine.load_checkpoint(folder, load_module_only=True)
    assert all(torch.equal(value, state[name]) for name, value in engine.module.state_dict().items())
    engine.save_checkpoint(tmp_path)
    again = deepspeed.initialize(model=make_model(seed=2), config=config())[0]
    again.load_checkpoint(tmp_path)
    assert all(torch.equal(value, state[name]) for name, value in again.module.state_dict().items())
    weights = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    assert torch.equal(weights["layers.2.inner.weight"].bfloat16(), state["layers.2.inner.weight"])
