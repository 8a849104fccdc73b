"""Checkpoints across processes: exact resumption, exchange with stock ZeRO-3, its tools, kills, memory, exports.

Every run is an ordinary program in a process of its own; the flag is the only difference between the engines. (With
DeepSpeed's own host kernel a resumed run differs from an uninterrupted one in the last bit under stock ZeRO-3 too: it
computes bias corrections by a running product until it is interrupted. So exact resumption is asserted of the native
kernel, and equality with stock ZeRO-3 between runs that resume from the same checkpoint.)
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from integration_tests.harness import ENGINE_CLASSES, SCRIPTS
from megatrain_ds.cli.single_process import free_port, program_environment, rank_variables, remove_shared_buffers

MODEL_FILE = "zero_pp_rank_0_mp_rank_00_model_states.pt"
OPTIMIZER_FILE = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
KILLS = 3


def ds_config(flag: bool, precision: str = "bf16", kernel: str = "native", sub_group_size: int = 5000) -> dict:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu"},
            "offload_optimizer": {"device": "cpu"},
            "sub_group_size": sub_group_size,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": precision == "bf16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": 1000000,
    }
    if flag:
        config.update(offload_engine="megatrain", megatrain={"update_kernel": kernel})
    return config


class Runner:
    """Starts the programs of this file, each with a ds_config of its own, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0

    def command(self, script: str, config: dict | None, *options: object) -> list[str]:
        self.count += 1
        command = [sys.executable, str(SCRIPTS / script), *map(str, options)]
        if config is not None:
            path = self.folder / f"ds_config_{self.count}.json"
            path.write_text(json.dumps(config))
            command += ["--ds-config", str(path)]
        return command

    def start(self, command: list[str], port: int) -> subprocess.Popen:
        environment = {**program_environment(), **rank_variables(port)}
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=self.folder
        )

    def run(self, script: str, config: dict | None, *options: object):  # noqa: ANN201
        out, port = self.folder / f"out_{self.count}.json", free_port()
        process = self.start(self.command(script, config, *options, "--out", out), port)
        try:
            output, _ = process.communicate(timeout=200)
        finally:
            process.kill()
            remove_shared_buffers(port)
        assert process.returncode == 0, output[-5000:]
        record = json.loads(out.read_text())
        if config is not None:
            assert record["engine"] == ENGINE_CLASSES["offload_engine" in config]
        return record


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return Runner(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def exchanged(runner: Runner) -> dict[str, dict]:
    """Five runs in bf16: both engines save at step 5 and train on; each checkpoint goes on in both."""
    kernel = {True: ds_config(True, kernel="deepspeed"), False: ds_config(False)}
    records = {}
    for flag, name in ((True, "ours"), (False, "stock")):
        save = runner.folder / name
        records[name] = runner.run("checkpoint_train.py", kernel[flag], "--save", save)
    records["ours in ours"] = runner.run("checkpoint_train.py", kernel[True], "--load", runner.folder / "ours")
    records["ours in stock"] = runner.run("checkpoint_train.py", kernel[False], "--load", runner.folder / "ours")
    records["stock in ours"] = runner.run("checkpoint_train.py", kernel[True], "--load", runner.folder / "stock")
    return records


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_resumption_is_exact(runner: Runner, precision: str) -> None:
    config, save = ds_config(True, precision, sub_group_size=10**9), runner.folder / f"exact_{precision}"
    whole = runner.run("checkpoint_train.py", config, "--save", save)
    resumed = runner.run("checkpoint_train.py", config, "--load", save)
    assert len(whole["losses"]) == 10
    assert resumed["losses"] == whole["losses"][5:]
    assert resumed["learning_rates"] == whole["learning_rates"][5:]
    assert len({tuple(rates) for rates in whole["learning_rates"]}) > 5
    for key in ("state", "generator", "global_steps"):
        assert resumed[key] == whole[key]


@pytest.mark.slow
@pytest.mark.parametrize("route", ["ours in stock", "stock in ours"])
def test_checkpoints_go_on_in_the_other_engine(exchanged: dict[str, dict], route: str) -> None:
    expected = exchanged["ours in ours"]
    for key in ("losses", "learning_rates", "generator", "global_steps"):
        assert exchanged[route][key] == expected[key]
    if "state" in exchanged[route]:
        assert exchanged[route]["state"] == expected["state"]
    assert exchanged["stock"]["losses"] == exchanged["ours"]["losses"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [MODEL_FILE, OPTIMIZER_FILE])
def test_files_have_the_structure_of_stock_zero3(exchanged: dict[str, dict], runner: Runner, name: str) -> None:
    def structure(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return value.dtype, tuple(value.shape), value.device
        if isinstance(value, dict):
            return type(value), {key: structure(item) for key, item in value.items() if key not in ignored}
        if isinstance(value, list):
            return [structure(item) for item in value]
        return type(value)

    # Our own section, and what one optimizer class says of itself and another does not.
    ignored = {"megatrain", "ds_config", "param_groups"}
    ours, stock = (
        torch.load(runner.folder / origin / "global_step5" / name, weights_only=False) for origin in ("ours", "stock")
    )
    assert structure(ours) == structure(stock)
    assert (runner.folder / "ours" / "latest").read_text() == (runner.folder / "stock" / "latest").read_text()
    if name == MODEL_FILE:
        assert ours["param_shapes"] == stock["param_shapes"]
        assert ours["shared_params"] == stock["shared_params"]
        torch.load(runner.folder / "ours" / "global_step5" / name, weights_only=True)
    else:
        ours, stock = (x["optimizer_state_dict"]["optimizer_state_dict"]["param_groups"] for x in (ours, stock))
        assert [{key: live[key] for key in old} for live, old in zip(ours, stock, strict=True)] == stock


@pytest.mark.slow
def test_the_recovery_script_gives_the_masters(exchanged: dict[str, dict], runner: Runner) -> None:
    folder = runner.folder / "ours"
    script = [sys.executable, str(folder / "zero_to_fp32.py"), str(folder), str(runner.folder / "fp32")]
    subprocess.run(script, check=True, timeout=100, env=program_environment(), capture_output=True)
    weights = torch.load(runner.folder / "fp32" / "pytorch_model.bin", weights_only=True)
    stock = get_fp32_state_dict_from_zero_checkpoint(str(runner.folder / "stock"))
    assert weights.keys() == stock.keys()
    # Both engines made the same five steps, so that their masters are the same to the bit.
    assert all(torch.equal(weights[name], stock[name]) for name in stock)
    assert "lm_head.weight" in weights
    assert [name for name in weights if name.startswith("transformer.h.0.")]


@pytest.mark.slow
def test_universal_conversion(exchanged: dict[str, dict], runner: Runner) -> None:
    source, target = runner.folder / "ours" / "global_step5", runner.folder / "ours" / "universal"
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    command += ["--input_folder", str(source), "--output_folder", str(target)]
    command += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    subprocess.run(command, check=True, timeout=200, env=program_environment(), capture_output=True)
    weights = get_fp32_state_dict_from_zero_checkpoint(str(runner.folder / "ours"), tag="global_step5")
    found = [path.name for path in (target / "zero").iterdir() if path.is_dir()]
    assert len(found) > 10
    for name in found:
        assert torch.equal(torch.load(target / "zero" / name / "fp32.pt").view(-1), weights[name].reshape(-1))
        assert torch.load(target / "zero" / name / "exp_avg_sq.pt").count_nonzero() > 0


@pytest.mark.slow
def test_saving_needs_no_memory_of_its_own(runner: Runner) -> None:
    record = runner.run(
        "checkpoint_memory.py", ds_config(True, sub_group_size=10**9), "--folder", runner.folder / "memory"
    )
    assert record["state"] > 200e6
    # What a save may hold: one unit, and five percent of what it writes; a copy of the masters alone would be a third.
    for peak in record["save"]:
        assert peak <= record["train"] + record["unit"] + 0.05 * record["state"]
    assert record["after_load"] <= record["train"] + record["unit"] + 0.05 * record["state"]


def wait_for_line(process: subprocess.Popen, start: str) -> None:
    output = []
    for line in process.stdout:
        output.append(line)
        if line.startswith(start):
            return
    raise AssertionError("".join(output)[-5000:])


def check_sums(folder: Path) -> int:
    """Check a checkpoint's masters against the sums in its client state; returns its step."""
    content = torch.load(folder / "same" / MODEL_FILE, weights_only=False)
    weights = get_fp32_state_dict_from_zero_checkpoint(str(folder))
    for name, total in content["sums"].items():
        assert weights[name].double().sum().item() == pytest.approx(total, rel=1e-12, abs=1e-9), name
    return content["global_steps"]


@pytest.mark.slow
def test_a_killed_save_leaves_the_last_checkpoint(runner: Runner) -> None:
    folder, choose = runner.folder / "killed", random.Random(0)
    left_over, last = 0, 0
    for _ in range(KILLS):
        port = free_port()
        process = runner.start(runner.command("checkpoint_loop.py", ds_config(True), "--folder", folder), port)
        try:
            wait_for_line(process, "saved")
            time.sleep(choose.uniform(0.05, 0.6))
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=60)
        finally:
            process.kill()
            remove_shared_buffers(port)
        left_over += any(path.name.startswith(".") for path in folder.iterdir())
        step = check_sums(folder)
        # The next process went on from the checkpoint that the kill before it had left.
        assert step > last
        last = step
    assert left_over > 0, "no kill came in the middle of a save: nothing was tested"


@pytest.fixture(scope="module")
def trainer_config() -> dict:
    config = ds_config(True)
    config["optimizer"] = {"type": "AdamW", "params": {"lr": "auto"}}
    config["scheduler"] = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}}
    return {**config, "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}}


@pytest.fixture(scope="module")
def exports(runner: Runner, trainer_config: dict) -> Iterator[Callable[[str], tuple[dict, dict]]]:
    """Per route, what the program said of its weights and what a new process reads from its export."""
    folders = {route: runner.folder / route for route in ("trainer", "resumed", "accelerate")}
    accelerate_config = {key: value for key, value in ds_config(True).items() if key != "optimizer"}
    records = {
        "trainer": runner.run("checkpoint_trainer.py", trainer_config, "--folder", folders["trainer"]),
        "resumed": runner.run(
            *("checkpoint_trainer.py", trainer_config, "--folder", folders["resumed"]),
            *("--resume", folders["trainer"] / "checkpoint-2"),
        ),
        "accelerate": runner.run("checkpoint_accelerate.py", accelerate_config, "--folder", folders["accelerate"]),
    }
    loaded = runner.run("checkpoint_reload.py", None, *(folder / "final" for folder in folders.values()))
    return dict(zip(records, zip(records.values(), loaded, strict=True), strict=True)).__getitem__


@pytest.mark.slow
@pytest.mark.parametrize("route", ["trainer", "resumed", "accelerate"])
def test_exports_load_in_a_new_process(exports: Callable[[str], tuple[dict, dict]], route: str) -> None:
    record, loaded = exports(route)
    assert loaded["weights"] == record["weights"]
    assert loaded["tied"]
    assert loaded["files"] == ["model.safetensors"]


@pytest.mark.slow
def test_trainer_resumes_exactly_and_keeps_the_best_model(exports: Callable[[str], tuple[dict, dict]]) -> None:
    whole, resumed = exports("trainer")[0], exports("resumed")[0]
    assert resumed["losses"] == whole["losses"]
    assert resumed["weights"] == whole["weights"]
    assert whole["best"] is not None


@pytest.mark.slow
def test_accelerate_goes_back_on_a_live_engine(exports: Callable[[str], tuple[dict, dict]]) -> None:
    record = exports("accelerate")[0]
    assert record["again"] == record["first"]
    rates = [rate for _, rate in record["first"]]
    assert len(set(rates)) == 3
