"""`megatrain-ds compare` on whole programs: the three example scripts as they are, and scripts that go wrong.

Each run is as short as it can be: what a run of many steps shows, the parity tests show.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path

import pytest

from integration_tests.harness import SCRIPTS, Program, ds_config, write_accelerate_config
from megatrain_ds.cli.compare_runs import find_processes
from megatrain_ds.cli.main import main
from megatrain_ds.cli.single_process import SHARED_MEMORY, free_port, program_environment, rank_variables
from megatrain_ds.plugin.compare_spec import CompareSpec

OPTIONS = ("--precision", "fp32", "--layers", "2", "--hidden", "32", "--micro-batch", "2", "--steps", "50")
NUM_STEPS = 4
DEEPSPEED = (sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "1", "--master_port")


class Comparison:
    """One call of the command in a folder of its own."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port, self.out = folder, port, folder / "out"
        self.status = -1

    def write_config(self, name: str = "ds_config.json", **keys) -> Path:
        path = self.folder / name
        path.write_text(json.dumps({**ds_config(Program("raw", flag=False)), **keys}))
        return path

    def run(self, *program: object) -> dict:
        """Run it and return its report; the user's files are the same before and after."""
        before = self.hash_users_files()
        words = ["compare", "--steps", str(NUM_STEPS), "--warmup", "1", "--timeout", "120", "--out-dir", str(self.out)]
        self.status = main([*words, "--", *map(str, program)])
        assert self.hash_users_files() == before
        return json.loads((self.out / "report.json").read_text())

    def hash_users_files(self) -> dict[str, str]:
        paths = [*SCRIPTS.glob("*.py"), *self.folder.glob("*.json"), *self.folder.glob("*.yaml")]
        return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}

    def assert_nothing_is_left(self) -> None:
        for name, flag in (("megatrain", True), ("stock", False)):
            spec = CompareSpec(name=name, flag=flag, num_steps=NUM_STEPS, num_warmup=1, folder=str(self.out))
            assert find_processes(spec) == []
        assert not list(SHARED_MEMORY.glob(f"deepspeed_allreduce_buffer_*_{self.port}_*"))
        kinds = {path.name.partition(".")[2] for path in self.out.iterdir()}
        assert kinds <= {"log", "events.jsonl", "record.json", "json", "png"}

    def assert_agreement(self, report: dict, engines: tuple[str, str] = ("MegaTrainEngine", "DeepSpeedEngine")) -> None:
        assert (self.status, report["problems"]) == (0, [])
        assert report["losses"]["agree"] is True
        assert report["losses"]["num_compared"] == NUM_STEPS
        assert report["speedup"] > 0
        for name, engine in zip(("megatrain", "stock"), engines, strict=True):
            record = report["runs"][name]["record"]
            assert (record["engine"], record["complete"], record["drained"]) == (engine, True, True)
            assert len(set(record["losses"])) == NUM_STEPS
            assert len(record["step_times_s"]) == NUM_STEPS - 1
            assert record["tokens_per_s"] > 0
            assert record["peak_host_bytes"] > 2**27
        assert report["runs"]["megatrain"]["record"]["memory_report"]["host_bytes_per_param"] > 16
        self.assert_nothing_is_left()


@pytest.fixture
def comparison(tmp_path, monkeypatch) -> Comparison:
    """A folder, and the environment in which a user would type the command."""
    port = free_port()
    for name, value in {**program_environment(), **rank_variables(port)}.items():
        monkeypatch.setenv(name, value)
    return Comparison(tmp_path, port)


def printed_losses(comparison: Comparison, name: str) -> list[float]:
    """What Trainer printed at every step; it does its own averaging over micro-batches."""
    return [float(text) for text in re.findall(r"'loss': '?([\d.]+)", (comparison.out / f"{name}.log").read_text())]


def test_the_trainer_script_started_by_python(comparison, capsys):
    config, out = comparison.write_config(), comparison.folder / "result.json"
    script = (sys.executable, SCRIPTS / "train_trainer.py", "--ds-config", config, "--out", out)
    report = comparison.run(*script, *OPTIONS, "--grad-accum", 2)
    comparison.assert_agreement(report)
    assert not out.exists()
    for name in ("megatrain", "stock"):
        losses = report["runs"][name]["record"]["losses"]
        # The program ends inside the last step, before Trainer prints it.
        assert losses[:-1] == pytest.approx(printed_losses(comparison, name), abs=1e-3)
    said = capsys.readouterr().out
    assert "losses agree: at step" in said
    assert re.search(r"^mean step, ms +[\d.]+ +[\d.]+$", said, flags=re.MULTILINE)


def test_the_accelerate_script_whose_file_has_the_flag_already(comparison):
    program = Program("accelerate", flag=True, options=("--micro-batch", "2", "--grad-accum", "2"))
    file = write_accelerate_config(comparison.folder, ds_config(program), program, comparison.port)
    launch = (sys.executable, "-m", "accelerate.commands.launch", "--config_file", file)
    script = (SCRIPTS / "train_accelerate.py", "--ds-config", "-", "--out", comparison.folder / "result.json")
    comparison.assert_agreement(comparison.run(*launch, *script, *OPTIONS, "--grad-accum", 2))


def test_the_raw_loop_started_by_torchrun(comparison):
    launch = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", 1, "--master_port", comparison.port)
    script = (SCRIPTS / "train_raw.py", "--ds-config", comparison.write_config())
    comparison.assert_agreement(comparison.run(*launch, *script, *OPTIONS, "--out", comparison.folder / "result.json"))


def users_program(comparison: Comparison, *options: str) -> list[object]:
    adam = {"type": "AdamW", "params": {"lr": 0.01}}
    usual = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0}
    config = comparison.write_config(**usual, optimizer=adam, bf16={"enabled": False}, fp16={"enabled": False})
    script = ("--deepspeed", "--deepspeed_config", config, "--folder", comparison.folder)
    return [SCRIPTS / "compare_user.py", *script, *options]


def test_losses_that_differ_end_non_zero_and_saves_are_whole(comparison, capsys):
    report = comparison.run(sys.executable, *users_program(comparison, "--wrong", "losses"))
    assert comparison.status == 1
    said = capsys.readouterr()
    assert "FAILED: losses: DIFFER: at step" in said.err
    assert "agree:" not in said.out
    assert report["losses"]["max_rel_diff"] == pytest.approx(0.01, rel=0.2)
    comparison.assert_nothing_is_left()
    for engine in ("MegaTrainEngine", "DeepSpeedEngine"):
        saves = comparison.folder / engine
        # The last step ends the program before its save begins; neither save nor final block of the script runs.
        assert (saves / "latest").read_text() == f"global_step{NUM_STEPS - 1}"
        assert sorted(p.name for p in saves.glob("global_step*")) == [f"global_step{n}" for n in range(1, NUM_STEPS)]
    assert not (comparison.folder / "final").exists()


def test_a_run_that_fails_is_named_and_the_other_one_is_reported(comparison, capsys):
    report = comparison.run(*DEEPSPEED, comparison.port, *users_program(comparison, "--wrong", "raises"))
    assert comparison.status == 1
    said = capsys.readouterr()
    words = f"after 2 of {NUM_STEPS} optimizer steps: RuntimeError: no such thing"
    assert f"FAILED: with the flag: the command ended with status 1, {words}\n" in said.err
    assert "FAILED: without" not in said.err
    runs = {name: run["record"] for name, run in report["runs"].items()}
    assert [len(runs[name]["losses"]) for name in ("megatrain", "stock")] == [2, NUM_STEPS]
    assert report["losses"] is None
    assert re.search(r"^engine +MegaTrainEngine +DeepSpeedEngine$", said.out, flags=re.MULTILINE)
    comparison.assert_nothing_is_left()
