"""The command line of `megatrain-ds compare`: what it refuses, in which words, and how it ends when told to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatrain_ds.cli.compare_runs import find_processes
from megatrain_ds.cli.main import main
from megatrain_ds.plugin.compare_spec import CompareSpec

SLEEPER = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
RUN_MAIN = "import sys; from megatrain_ds.cli.main import main; sys.exit(main())"


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def refusal(capsys, *words: str) -> str:
    """What the command says when it ends with 2 without having run anything."""
    assert main(["compare", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert not list(Path.cwd().glob("*/*.log"))
    return said.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "command = '': stands wholly after \"--\" and starts your training. Write `megatrain-ds compare"),
        (("python", "train.py", "--lr", "1"), "command = 'python train.py --lr 1': stands wholly after \"--\""),
        (("python", "--", "train.py"), "command = 'python train.py': stands wholly after \"--\""),
        (("--steps", "9", "--"), "command = '': stands wholly after \"--\""),
        (("--", "no-such-launcher", "x.py"), "command = 'no-such-launcher': is neither a program on the PATH nor"),
        (
            ("--steps", "0", "--", sys.executable),
            "--steps = 0: is at least 5: 3 to warm up and 2 to time. Ask for more",
        ),
        (("--steps", "2", "--warmup", "1", "--", sys.executable), "--steps = 2: is at least 3: 1 to warm up"),
        (("--warmup", "0", "--", sys.executable), "--warmup = 0: is at least 1"),
        (("--timeout", "0", "--", sys.executable), "--timeout = 0.0: is a positive number"),
        (("--timeout", "inf", "--", sys.executable), "--timeout = inf: is a positive number"),
        (("--tolerance", "nan", "--", sys.executable), "--tolerance = nan: is a positive number"),
        (("--out-dir", "file", "--", sys.executable), "--out-dir = 'file': cannot be written (File exists). Name"),
        (("--out-dir", "/proc/self", "--", sys.executable), "--out-dir = '/proc/self': cannot be written ("),
        (("--json", "no/such.json", "--", sys.executable), "--json = 'no/such.json': cannot be written (No such file"),
        (("--json", ".", "--", sys.executable), "--json = '.': cannot be written (Is a directory). Name a file"),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_runs(words, message, capsys):
    Path("file").touch()
    assert f"megatrain-ds compare: {message}" in refusal(capsys, *words)


def test_a_word_that_is_no_number_is_refused(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["compare", "--steps", "many", "--", "true"])
    assert caught.value.code == 2
    assert "argument --steps: invalid int value: 'many'" in capsys.readouterr().err


def test_words_after_the_dashes_are_the_commands_own(capsys):
    words = [sys.executable, "-c", "import sys; print(sys.argv)", "--steps", "7", "--", "--json"]
    assert main(["compare", "--steps", "5", "--out-dir", "out", "--", *words]) == 1
    assert Path("out/stock.log").read_text() == "['-c', '--steps', '7', '--', '--json']\n"
    assert "FAILED: without the flag: the script never imported DeepSpeed" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT], ids=lambda kind: kind.name)
def test_a_comparison_that_is_told_to_end_ends_what_it_started(kind, tmp_path):
    words = ["compare", "--out-dir", str(tmp_path), "--", sys.executable, "-c", SLEEPER]
    program = subprocess.Popen(
        [sys.executable, "-c", RUN_MAIN, *words], env=os.environ.copy(), stderr=subprocess.PIPE, text=True
    )
    spec = CompareSpec(name="megatrain", flag=True, num_steps=20, num_warmup=3, folder=str(tmp_path))
    wait_for(lambda: len(find_processes(spec)) == 2)
    program.send_signal(kind)
    _, said = program.communicate(timeout=30)
    assert program.returncode == 130
    assert "megatrain-ds compare: interrupted, and what it started is ended" in said
    assert find_processes(spec) == []


def wait_for(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
