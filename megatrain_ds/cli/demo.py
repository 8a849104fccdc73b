"""`megatrain-ds demo`: one Trainer script with the flag, then without it, and whether the two agree.

Runs `demo_script.py` in subprocesses and follows what it writes; judges and reports through `demo_report`. Knows
nothing about how either engine works: only the ds_config differs between the runs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from megatrain_ds.cli import demo_report
from megatrain_ds.cli.following import POLL_S, follow

CPU_SIZES = ("--hidden", "128", "--layers", "6", "--length", "128", "--batch", "8", "--precision", "fp32")
GPU_SIZES = ("--hidden", "512", "--layers", "8", "--length", "256", "--batch", "16", "--precision", "bf16")
# Built side by side first, so that no run's step times share the cores with a compiler.
NATIVE_BUILDS = {
    "the update kernel": "from megatrain_ds.optim.native import native_status; native_status()",
    "DeepSpeed's CPU Adam": "from deepspeed.ops.op_builder import CPUAdamBuilder as B; B().load(verbose=False)",
    "DeepSpeed's CPU collectives": (
        "from deepspeed.accelerator import get_accelerator; "
        "from deepspeed.comm.torch import build_shm_op; "
        "get_accelerator().device_name() == 'cpu' and build_shm_op()"
    ),
}


@dataclass(frozen=True)
class DemoRun:
    """One run of the script.

    Attributes:
        name: `megatrain`, `zero3` or `zero3_...`; also the stem of the run's files.
        title: what the progress bar shows.
        flag: whether the ds_config carries `"offload_engine": "megatrain"`.
        attention: attention implementation; another one adds in another order and changes nothing else.
        reverse_rows: reverse the rows of each batch, which also changes the order of additions and nothing else.
    """

    name: str
    title: str
    flag: bool
    attention: str
    reverse_rows: bool = False


RUNS = (
    DemoRun("megatrain", "megatrain", True, "sdpa"),
    DemoRun("zero3", "ZeRO-3 offload", False, "sdpa"),
    DemoRun("zero3_attention", "ZeRO-3, other attention", False, "eager"),
    DemoRun("zero3_rows", "ZeRO-3, rows reversed", False, "sdpa", reverse_rows=True),
)


class DemoFailedError(RuntimeError):
    """A run of the script ended non-zero, or ended without its record."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `megatrain-ds demo`."""
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of each run (default: %(default)s)")
    parser.add_argument("--out-dir", default="megatrain_demo", help="folder for script, configurations, logs and plot")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--offline", action="store_true", help="accepted for clarity: the demo never uses a network")


def run(args: argparse.Namespace) -> int:
    """Run the demo; return 0 when the losses fell and agree, 1 otherwise."""
    if args.steps < demo_report.MIN_STEPS:
        print(f"--steps {args.steps}: at least {demo_report.MIN_STEPS} are needed to see a loss fall. Ask for more.")
        return 1
    folder = Path(args.out_dir).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    script = Path(shutil.copyfile(Path(__file__).with_name("demo_script.py"), folder / "train.py"))
    try:
        build_native(folder)
        records = {each.name: run_script(each, script, args.steps) for each in RUNS}
    except DemoFailedError as failure:
        print(failure, file=sys.stderr)
        return 1
    report = demo_report.make_report(records)
    demo_report.show(report)
    demo_report.plot(report, folder / "losses.png")
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    print(f"\nScript, configurations, logs and {folder / 'losses.png'} are in {folder}")
    problems = demo_report.find_problems(report)
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


def build_native(folder: Path) -> None:
    """Build DeepSpeed's native parts side by side; one that fails is left to the run that needs it to report."""
    from tqdm import tqdm

    from megatrain_ds.cli.single_process import program_environment

    with (folder / "build.log").open("w") as log:
        builds = [
            subprocess.Popen([sys.executable, "-c", code], env=program_environment(), stdout=log, stderr=log)
            for code in NATIVE_BUILDS.values()
        ]
        with tqdm(total=len(builds), desc="native builds (first time: about a minute)", unit="build") as bar:
            while bar.n < len(builds):
                time.sleep(POLL_S)
                ended = sum(build.poll() is not None for build in builds) - bar.n
                if ended:
                    bar.update(ended)


def ds_config(flag: bool) -> dict:
    """Return stock ZeRO-3 with both offloads; the flag adds its line and nothing else."""
    config: dict = {"offload_engine": "megatrain"} if flag else {}
    return {
        **config,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu"},
            "offload_optimizer": {"device": "cpu"},
        },
        "bf16": {"enabled": "auto"},
        "steps_per_print": 1000000,
    }


def run_script(demo_run: DemoRun, script: Path, num_steps: int) -> dict:
    """Run the script once behind a progress bar.

    Returns:
        The script's totals, with its steps under `"steps"`.

    Raises:
        DemoFailedError: the script ended non-zero or left no record; carries the end of its log.
    """
    import torch
    from tqdm import tqdm

    from megatrain_ds.cli.single_process import free_port, program_environment, rank_variables, remove_shared_buffers

    folder, name, port = script.parent, demo_run.name, free_port()
    config, out, log = (folder / f"{name}.{end}" for end in ("ds_config.json", "steps.jsonl", "log"))
    config.write_text(json.dumps(ds_config(demo_run.flag), indent=1) + "\n")
    out.unlink(missing_ok=True)
    sizes = GPU_SIZES if torch.cuda.is_available() else CPU_SIZES
    command = [sys.executable, str(script), "--ds-config", str(config), "--out", str(out), "--steps", str(num_steps)]
    environment = {**program_environment(), **rank_variables(port)}
    with log.open("w") as stream, tqdm(total=num_steps, desc=demo_run.title, unit="step") as bar:
        command += [*sizes, "--attention", demo_run.attention, *(["--reverse-rows"] if demo_run.reverse_rows else [])]
        program = subprocess.Popen(command, env=environment, cwd=folder, stdout=stream, stderr=stream)
        try:
            lines = [json.loads(line) for line in follow(program, out, bar)]
        finally:
            program.kill()
            program.wait()
            remove_shared_buffers(port)
    if program.returncode != 0 or not lines or "engine" not in lines[-1]:
        end = log.read_text()[-4000:]
        raise DemoFailedError(f"The {demo_run.title} run ended with {program.returncode}. End of {log}:\n{end}")
    return {**lines[-1], "steps": lines[:-1]}
