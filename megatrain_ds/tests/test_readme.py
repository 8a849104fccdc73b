"""The README's commands are those that continuous integration runs, and what it names exists."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from megatrain_ds.config import MegaTrainConfig

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def readme_commands() -> list[str]:
    return [block.strip() for block in re.findall(r"```bash\n(.*?)```", README, flags=re.DOTALL)]


def ci_commands() -> list[str]:
    """The command lines of .ci/run: what is neither comment nor preparation."""
    lines = [line.strip() for line in (ROOT / ".ci" / "run").read_text().splitlines()]
    return [line for line in lines if line and not line.startswith(("#", "set ", "cd ", "export "))]


def test_the_two_commands_are_those_of_ci() -> None:
    commands = readme_commands()
    assert len(commands) == 2
    assert all("\n" not in command for command in commands)
    assert commands == ci_commands()


def test_the_demo_command_is_understood() -> None:
    from megatrain_ds.cli.main import _build_parser

    words = readme_commands()[0].partition("megatrain-ds ")[2].split()
    arguments = _build_parser(words).parse_args(words)
    assert arguments.command == "demo"
    assert arguments.json == "out.json"


@pytest.mark.parametrize("name", ["run", "setup"])
def test_ci_scripts_are_strict_bash(name: str) -> None:
    path = ROOT / ".ci" / name
    assert "set -euo pipefail" in path.read_text()
    assert os.access(path, os.X_OK)
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0


def test_the_flag_is_one_added_line() -> None:
    (block,) = re.findall(r"```diff\n(.*?)```", README, flags=re.DOTALL)
    lines = block.splitlines()
    (added,) = [line for line in lines if line.startswith("+")]
    assert added.strip("+ ,") == '"offload_engine": "megatrain"'
    before = json.loads("\n".join(line for line in lines if not line.startswith("+")))
    after = json.loads("\n".join(line.lstrip("+") for line in lines))
    assert {**before, "offload_engine": "megatrain"} == after


def test_settings_that_it_shows_exist() -> None:
    shown = re.findall(r'`"megatrain": (\{.*?\})`', README)
    assert shown
    for block in shown:
        assert MegaTrainConfig(**json.loads(block))


def test_paths_that_it_names_exist() -> None:
    named = re.findall(r"`((?:megatrain_ds|integration_tests|configs)/[\w./]*)`", README)
    linked = re.findall(r"\]\(([\w./]+)\)", README)
    assert len(named) >= 8
    missing = [name for name in (*named, *linked) if not (ROOT / name).exists()]
    assert not missing


def test_modules_of_the_reading_order_are_six() -> None:
    section = README.partition("## Reading order")[2].partition("Then ")[0]
    assert len(re.findall(r"^\d\. `megatrain_ds/", section, flags=re.MULTILINE)) == 6
