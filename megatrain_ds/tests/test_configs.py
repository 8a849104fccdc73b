"""Every file in configs/ is loaded by the library that users would load it with, and is described in its README."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatrain_ds.cli.single_process import free_port
from megatrain_ds.config import ENGINE_KEY, ENGINE_NAME, MegaTrainConfig

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
DS_FILES = sorted(CONFIGS.glob("ds_*.json"))
ACCELERATE_FILES = sorted(CONFIGS.glob("accelerate_*.yaml"))
FILLED = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0}

LOAD_WITH_ACCELERATE = """
import json, sys
from accelerate import Accelerator
accelerator = Accelerator()
plugin = accelerator.state.deepspeed_plugin
print("LOADED", json.dumps([str(accelerator.distributed_type), plugin.deepspeed_config]))
"""


def fill_auto(config: dict) -> dict:
    """What Trainer or Accelerate does to "auto" values, for the keys that DeepSpeed itself cannot read as "auto"."""
    filled = copy.deepcopy(config)
    for key, value in FILLED.items():
        if filled.get(key) == "auto":
            filled[key] = value
    for name in ("bf16", "fp16"):
        if filled.get(name, {}).get("enabled") == "auto":
            filled[name]["enabled"] = name == "bf16"
    return filled


def test_there_are_files() -> None:
    assert DS_FILES
    assert ACCELERATE_FILES
    unknown = {path.name for path in CONFIGS.iterdir()} - {p.name for p in (*DS_FILES, *ACCELERATE_FILES)}
    assert unknown == {"README.md", "models"}


@pytest.mark.parametrize("path", DS_FILES, ids=lambda path: path.name)
def test_deepspeed_reads_it(path: Path) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    raw = json.loads(path.read_text())
    parsed = DeepSpeedConfig(fill_auto(raw))
    assert parsed.zero_optimization_stage == 3
    assert parsed.zero_config.offload_param.device == "cpu"
    assert parsed.zero_config.offload_optimizer.device == "cpu"
    settings = MegaTrainConfig.from_deepspeed(parsed)
    assert settings.model_fields_set == set(raw.get("megatrain", {}))
    assert raw[ENGINE_KEY] == ENGINE_NAME


@pytest.mark.parametrize("path", DS_FILES, ids=lambda path: path.name)
def test_the_flag_is_the_first_line(path: Path) -> None:
    """Where a reader sees it, and where deleting one line turns the file into a stock one."""
    assert path.read_text().splitlines()[1].strip() == f'"{ENGINE_KEY}": "{ENGINE_NAME}",'


@pytest.mark.parametrize("path", ACCELERATE_FILES, ids=lambda path: path.name)
def test_accelerate_launches_with_it(path: Path, tmp_path: Path) -> None:
    script = tmp_path / "load.py"
    script.write_text(LOAD_WITH_ACCELERATE)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}
    environment["DS_ACCELERATOR"] = "cpu"
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        str(path),
        "--main_process_port",
        str(free_port()),
    ]
    ended = subprocess.run(
        [*command, str(script)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("LOADED ")]
    kind, config = json.loads(line.removeprefix("LOADED "))
    assert kind == "DistributedType.DEEPSPEED"
    assert config[ENGINE_KEY] == ENGINE_NAME
    named = yaml.safe_load(path.read_text())["deepspeed_config"]["deepspeed_config_file"]
    written = json.loads((ROOT / named).read_text())
    assert {key: config[key] for key in ("zero_optimization", "gradient_clipping")} == {
        key: written[key] for key in ("zero_optimization", "gradient_clipping")
    }


def test_readme_describes_every_file_and_no_other() -> None:
    text = (CONFIGS / "README.md").read_text()
    table = {line.split("`")[1] for line in text.splitlines() if line.startswith("| `")}
    assert table == {path.name for path in (*DS_FILES, *ACCELERATE_FILES)}
