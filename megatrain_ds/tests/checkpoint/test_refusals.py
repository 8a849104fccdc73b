"""What is refused, with its message, and that a refusal leaves engine and files as they were."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import deepspeed
import pytest
import torch

from megatrain_ds.checkpoint.deepspeed_layout import MODEL_FILE, optimizer_file
from megatrain_ds.errors import CheckpointError
from megatrain_ds.tests.checkpoint.engines import batch, config, differing, make_engine, make_model, state_of, train

OPTIMIZER_FILE = optimizer_file(bf16=True)


def edit(name: str, change: Callable[[dict], object]) -> Callable[[Path], None]:
    """Rewrites one file of a checkpoint, as stock `torch.save` would write it."""

    def rewrite(folder: Path) -> None:
        content = torch.load(folder / name, weights_only=False)
        change(content)
        torch.save(content, folder / name)

    return rewrite


def cut(name: str) -> Callable[[Path], None]:
    def truncate(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) * 2 // 3])

    return truncate


def reshape(content: dict) -> None:
    content["param_shapes"][0]["embed.weight"] = torch.Size([8, 16])


def drop_group(content: dict) -> None:
    content["optimizer_state_dict"]["optimizer_state_dict"]["param_groups"].pop()


DAMAGE = {
    "several ranks": (edit(MODEL_FILE, lambda c: c.update(dp_world_size=4)), "4.*ranks"),
    "partitions": (edit(OPTIMIZER_FILE, lambda c: c["optimizer_state_dict"].update(partition_count=2)), "partition_c"),
    "stage": (edit(OPTIMIZER_FILE, lambda c: c["optimizer_state_dict"].update(zero_stage=2)), "stage 3"),
    "name": (edit(MODEL_FILE, lambda c: c["module"].pop("embed.weight")), r"embed.weight.*load_module_strict=False"),
    "parameter": (
        edit(MODEL_FILE, lambda c: c["frozen_param_shapes"].pop("layers.0.inner.weight")),
        r"layers.0.inner.weight.*not in the checkpoint",
    ),
    "shape": (edit(MODEL_FILE, reshape), r"embed.weight.*\(16, 8\).*\(8, 16\)"),
    "buffer": (edit(MODEL_FILE, lambda c: c["module"].update({"layers.2.table": torch.zeros(5)})), r"layers.2.table"),
    "flat size": (edit(MODEL_FILE, lambda c: c["param_shapes"][0].popitem()), "elements of fp32"),
    "groups": (edit(OPTIMIZER_FILE, drop_group), "parameter groups.*2.*1"),
    "scheduler": (edit(MODEL_FILE, lambda c: c.update(lr_scheduler=None)), "load_lr_scheduler_states=False"),
    # A sequence of pairs is taken up to the first that is none.
    "half a scheduler": (edit(MODEL_FILE, lambda c: c.update(lr_scheduler=[("last_epoch", 99), 5])), "lr_scheduler"),
    "cut model file": (cut(MODEL_FILE), MODEL_FILE),
    "cut optimizer file": (cut(OPTIMIZER_FILE), OPTIMIZER_FILE),
    "empty file": (lambda folder: (folder / MODEL_FILE).write_bytes(b""), MODEL_FILE),
    "no optimizer file": (lambda folder: (folder / OPTIMIZER_FILE).unlink(), "optim_states.pt"),
    "no folder": (shutil.rmtree, "global_step3.*Check load_dir and tag"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_does_not_fit_is_refused_and_changes_nothing(saved, tmp_path: Path, damage: str, other) -> None:
    change, message = DAMAGE[damage]
    shutil.copytree(saved[0], tmp_path / "copy")
    before = state_of(other)
    change(tmp_path / "copy" / "global_step3")
    with pytest.raises(CheckpointError, match=rf"(?s){message}"):
        other.load_checkpoint(tmp_path / "copy")
    assert differing(before, state_of(other)) == []


def test_a_model_of_other_depth_is_refused(saved) -> None:
    engine = make_engine(make_model(num_blocks=4))
    before = state_of(engine)
    with pytest.raises(CheckpointError, match=r"layers.3.inner.*load_module_strict"):
        engine.load_checkpoint(saved[0])
    assert differing(before, state_of(engine)) == []


def test_a_parameter_frozen_at_the_save_has_no_moments(saved) -> None:
    model = make_model(seed=1)
    model.requires_grad_(True)
    engine = make_engine(model)
    with pytest.raises(CheckpointError, match=r"layers.0.*frozen.*load_optimizer_states=False"):
        engine.load_checkpoint(saved[0])
    engine.load_checkpoint(saved[0], load_optimizer_states=False)
    assert torch.equal(engine.module.layers[0].inner.weight, saved[1]["layers.0.inner.weight"])


@pytest.mark.parametrize("accumulation", [1, 2])
def test_unfinished_steps_are_not_saved(tmp_path: Path, accumulation: int) -> None:
    ds_config = config(accumulation=accumulation)
    ds_config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2}}
    engine = deepspeed.initialize(model=make_model(), config=ds_config)[0]
    engine.backward(engine(torch.zeros(2, 6, dtype=torch.long)))
    with pytest.raises(CheckpointError, match=r"micro_steps.*Save after step"):
        engine.save_checkpoint(tmp_path)
    assert not list(tmp_path.iterdir())
    for _ in range(accumulation - 1):
        engine.step()
        engine.backward(engine(torch.zeros(2, 6, dtype=torch.long)))
    engine.step()
    assert engine.save_checkpoint(tmp_path)


def test_updates_begun_in_backward_are_not_saved(tmp_path: Path) -> None:
    model = make_model()
    model.embed.weight.requires_grad_(False)
    ds_config = config()
    ds_config["megatrain"]["finite_check"], ds_config["gradient_clipping"] = False, 0.0
    ds_config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2}}
    engine = deepspeed.initialize(model=model, config=ds_config)[0]
    engine.backward(engine(batch(0)))
    # No unit holds its gradient any more: every update began as the gradient came.
    assert not any(any(unit.received) for unit in engine.runtime.store.units)
    with pytest.raises(CheckpointError, match="Save after step"):
        engine.save_checkpoint(tmp_path)
    engine.step()
    assert engine.save_checkpoint(tmp_path)


def test_reserved_client_keys_are_refused(other, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"module.*Choose other names"):
        other.save_checkpoint(tmp_path, client_state={"module": {}})


def test_a_full_disk_is_reported_and_leaves_the_old_checkpoint(other, tmp_path: Path) -> None:
    other.save_checkpoint(tmp_path, tag="t")
    state = state_of(other)
    train(other, range(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"could not be written.*Free space"):
            other.save_checkpoint(tmp_path, tag="t")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    other.load_checkpoint(tmp_path, tag="t")
    assert differing(state, state_of(other)) == []


def test_a_failed_save_leaves_the_old_checkpoint(other, tmp_path: Path) -> None:
    other.save_checkpoint(tmp_path, tag="t")
    state = state_of(other)
    train(other, range(1))
    with pytest.raises((AttributeError, TypeError, RuntimeError), match="pickle"):
        other.save_checkpoint(tmp_path, tag="t", client_state={"bad": lambda: 0})
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    other.load_checkpoint(tmp_path, tag="t")
    assert differing(state, state_of(other)) == []
    with pytest.raises(ValueError, match="save_dir"):
        other.save_checkpoint("")
