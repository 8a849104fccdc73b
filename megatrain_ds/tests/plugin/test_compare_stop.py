"""A program that is ended inside a step: what still runs, what does not, and that nothing keeps it."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

BEGIN = """
import atexit, concurrent.futures, os, sys, threading, time
from pathlib import Path
from megatrain_ds.plugin.compare_stop import end_process
here = Path.cwd()
"""


@pytest.fixture
def run(tmp_path):
    """`run(source)` runs a program in an empty folder and returns its status, output, errors and the files it left."""

    def runner(source: str) -> tuple[int, str, str, list[str]]:
        ended = subprocess.run(
            [sys.executable, "-c", BEGIN + source], cwd=tmp_path, text=True, capture_output=True, timeout=60
        )
        return ended.returncode, ended.stdout, ended.stderr, sorted(path.name for path in tmp_path.iterdir())

    return runner


def test_no_line_of_the_script_runs_afterwards(run):
    source = """
try:
    end_process()
except BaseException:
    (here / "except").touch()
finally:
    (here / "finally").touch()
(here / "after").touch()
"""
    assert run(source) == (0, "", "", [])


def test_exit_handlers_run_and_output_is_flushed(run):
    source = """
atexit.register((here / "handler").touch)
sys.stdout.write("half a line")
end_process()
"""
    assert run(source) == (0, "half a line", "", ["handler"])


def test_an_exit_handler_that_raises_keeps_nothing_from_running(run):
    source = """
atexit.register((here / "first").touch)
atexit.register(lambda: 1 / 0)
print("said")
end_process()
"""
    status, output, errors, files = run(source)
    assert (status, output, files) == (0, "said\n", ["first"])
    assert "ZeroDivisionError" in errors


def test_a_file_that_a_thread_is_writing_is_whole(run):
    source = """
import torch  # the end imports it, which takes longer than the save
def save():
    with open("half", "w") as stream:
        time.sleep(0.5)
        stream.write("whole")
    os.rename("half", "checkpoint")
pool = concurrent.futures.ThreadPoolExecutor()
pool.submit(save)
time.sleep(0.1)
end_process()
"""
    assert run(source) == (0, "", "", ["checkpoint"])


@pytest.mark.parametrize(
    "hang", ["threading.Thread(target=time.sleep, args=(50,)).start()", "atexit.register(time.sleep, 50)"]
)
def test_what_hangs_is_not_waited_for(hang, run):
    started_s = time.monotonic()
    assert run(f"{hang}\nend_process(limit_s=0.5)") == (0, "", "", [])
    assert time.monotonic() - started_s < 30


def test_any_thread_may_end_the_program(run):
    source = """
thread = threading.Thread(target=end_process, args=(40.0,))
thread.start()
time.sleep(50)
"""
    started_s = time.monotonic()
    assert run(source)[0] == 0
    assert time.monotonic() - started_s < 30
