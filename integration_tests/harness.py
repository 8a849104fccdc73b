"""Runs the example programs in subprocesses, with and without the flag, and reads back what they recorded.

The programs never learn which engine they run on: this module writes a ds_config, starts them as a user would, and
checks that the engine which the configuration asks for is the one that ran.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from megatrain_ds.cli.single_process import free_port, program_environment, rank_variables, remove_shared_buffers

SCRIPTS = Path(__file__).parent / "scripts"
ENGINE_CLASSES = {True: "MegaTrainEngine", False: "DeepSpeedEngine"}
TIME_LIMIT_S = 900


class ProgramFailedError(RuntimeError):
    """A program ended non-zero; carries the end of its output."""


@dataclass(frozen=True)
class Program:
    """One call of one example program.

    Attributes:
        route: `raw`, `trainer`, `accelerate` or `launcher` (the raw program under the `deepspeed` launcher).
        flag: whether the ds_config carries `"offload_engine": "megatrain"`.
        options: further options of the program, as on its command line.
        block: the `megatrain` block of the ds_config; left out when empty.
        overrides: further top-level keys of the ds_config.
    """

    route: str
    flag: bool
    options: tuple[str, ...] = ()
    block: dict = field(default_factory=dict)
    overrides: dict = field(default_factory=dict)


def ds_config(program: Program) -> dict:
    """Stock ZeRO-3 with both offloads; the flag adds its line and nothing else."""
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu"},
            "offload_optimizer": {"device": "cpu"},
        },
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "initial_scale_power": 12},
        "data_types": {"grad_accum_dtype": "fp32"},
        "steps_per_print": 1000000,
        **program.overrides,
    }
    if program.flag:
        config["offload_engine"] = "megatrain"
        if program.block:
            config["megatrain"] = program.block
    return config


def option(options: tuple[str, ...], name: str, default: str) -> str:
    """The value that follows `name` in `options`."""
    return options[options.index(name) + 1] if name in options else default


def write_accelerate_config(folder: Path, config: dict, program: Program, port: int) -> Path:
    """An Accelerate file of the deepspeed_config_file route; clipping and accumulation stand in the ds_config."""
    filled = dict(config)
    filled["train_micro_batch_size_per_gpu"] = int(option(program.options, "--micro-batch", "4"))
    filled["gradient_accumulation_steps"] = int(option(program.options, "--grad-accum", "1"))
    filled["gradient_clipping"] = float(option(program.options, "--clip", "1.0"))
    (folder / "ds_config.json").write_text(json.dumps(filled, indent=1))
    lines = [
        "compute_environment: LOCAL_MACHINE",
        "distributed_type: DEEPSPEED",
        "deepspeed_config:",
        f"  deepspeed_config_file: {folder / 'ds_config.json'}",
        "  zero3_init_flag: false",
        "num_machines: 1",
        "num_processes: 1",
        "machine_rank: 0",
        "main_training_function: main",
        f"main_process_port: {port}",
    ]
    path = folder / "accelerate.yaml"
    path.write_text("\n".join(lines) + "\n")
    return path


def command_of(program: Program, folder: Path, port: int) -> list[str]:
    """Writes the configuration files into `folder` and returns the command line."""
    config_path = folder / "ds_config.json"
    config_path.write_text(json.dumps(ds_config(program), indent=1))
    options = ["--ds-config", str(config_path), "--out", str(folder / "out.json"), *program.options]
    python = sys.executable
    if program.route == "accelerate":
        config_file = write_accelerate_config(folder, ds_config(program), program, port)
        launch = [python, "-m", "accelerate.commands.launch", "--config_file", str(config_file)]
        return [*launch, str(SCRIPTS / "train_accelerate.py"), *options]
    if program.route == "launcher":
        launch = [python, "-m", "deepspeed.launcher.runner", "--num_gpus", "1", "--master_port", str(port)]
        return [*launch, str(SCRIPTS / "train_raw.py"), *options]
    return [python, str(SCRIPTS / f"train_{program.route}.py"), *options]


def environment_of(program: Program, port: int) -> dict[str, str]:
    """What the program finds around it; the launchers set the rank variables themselves."""
    environment = program_environment()
    if program.route in ("raw", "trainer"):
        environment.update(rank_variables(port))
    return environment


def run(program: Program, folder: Path) -> list[dict]:
    """Runs `program` in `folder` and returns its records.

    Raises:
        ProgramFailedError: if it ends non-zero or runs on another engine than its configuration asks for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command, environment = command_of(program, folder, port), environment_of(program, port)
    log = folder / "log.txt"
    try:
        with log.open("w") as stream:
            ended = subprocess.run(command, env=environment, stdout=stream, stderr=stream, timeout=TIME_LIMIT_S)
    finally:
        remove_shared_buffers(port)
    if ended.returncode != 0:
        raise ProgramFailedError(f"{' '.join(command)} ended with {ended.returncode}:\n{log.read_text()[-6000:]}")
    records = json.loads((folder / "out.json").read_text())
    for record in records:
        if record["engine"] != ENGINE_CLASSES[program.flag]:
            raise ProgramFailedError(
                f"route {program.route!r} ran on {record['engine']}, but its ds_config asks for "
                f"{ENGINE_CLASSES[program.flag]}: see {log}."
            )
    return records
