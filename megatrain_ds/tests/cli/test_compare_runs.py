"""One run of a user's command: every way it can end is named, and nothing that it started is left.

The commands here are small programs that tell what a recorder would tell; integration_tests/ has the real ones.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from megatrain_ds.cli import compare_runs
from megatrain_ds.cli.compare_runs import (
    Ending,
    Outcome,
    find_error_line,
    find_notes,
    find_problem,
    find_processes,
    run_once,
)
from megatrain_ds.cli.single_process import SHARED_MEMORY, free_port
from megatrain_ds.plugin.compare_spec import CompareSpec

TELL = """
import json, os, subprocess, sys, time
spec = json.load(open(os.environ["MEGATRAIN_DS_COMPARE"]))
def tell(event, **values):
    with open(f"{spec['folder']}/{spec['name']}.events.jsonl", "a") as stream:
        stream.write(json.dumps({"event": event, "process": os.getpid(), "master_port": None, **values}) + "\\n")
"""
SLEEPING_CHILD = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)"
RECORD = {
    "engine": "MegaTrainEngine",
    "losses": [1.0] * 5,
    "complete": True,
    "world_size": 1,
    "num_trained_engines": 1,
    "skipped_steps": 0,
}


@pytest.fixture
def spec(tmp_path) -> CompareSpec:
    return CompareSpec(name="megatrain", flag=True, num_steps=5, num_warmup=1, folder=str(tmp_path))


def run_source(spec: CompareSpec, source: str, timeout_s: float = 60.0) -> Outcome:
    return run_once(spec, [sys.executable, "-c", TELL + source], title="", timeout_s=timeout_s)


def events(*names: str, **values) -> tuple[dict, ...]:
    return tuple({"event": name, "master_port": None, **values} for name in names)


def problem_of(spec: CompareSpec, told: tuple[dict, ...], record: dict | None = None, status: int = 0) -> str:
    return find_problem(spec, Ending(status, told, None), record, [])


def test_a_command_that_does_what_is_asked_has_no_problem(spec):
    source = f"tell('step', step=5, loss=1.0); open({str(spec.record)!r}, 'w').write({json.dumps(RECORD)!r})"
    found = run_source(spec, source)
    assert (found.problem, found.notes, found.tail, found.record) == ("", (), "", RECORD)


def test_a_failing_command_is_quoted(spec):
    found = run_source(spec, "tell('step', step=2, loss=1.0); print('loading'); raise ValueError('no such batch')")
    words = "the command ended with status 1, after 2 of 5 optimizer steps: ValueError: no such batch"
    assert found.problem == words
    assert found.tail.splitlines()[0] == "loading"
    assert found.tail.splitlines()[-1] == "ValueError: no such batch"


def test_a_record_of_a_failing_command_is_kept(spec):
    source = f"open({str(spec.record)!r}, 'w').write({json.dumps(RECORD)!r}); sys.exit(3)"
    found = run_source(spec, source)
    assert found.record == RECORD
    assert found.problem == "the command ended with status 3, after 0 of 5 optimizer steps: it printed nothing"


def test_an_earlier_runs_answers_are_gone(spec):
    spec.record.write_text(json.dumps(RECORD))
    spec.events.write_text(json.dumps({"event": "step", "step": 4, "master_port": None}) + "\n")
    found = run_source(spec, "sys.exit(1)")
    assert found.record is None
    assert "after 0 of 5" in found.problem


def test_a_command_that_cannot_be_started_is_named(spec, tmp_path):
    program = tmp_path / "launch"
    program.write_bytes(b"\x00\x01")
    program.chmod(0o755)
    found = run_once(spec, [str(program)], title="", timeout_s=10)
    assert found.problem.startswith("the command could not be started: [Errno 8] Exec format error")
    assert not spec.path.exists()


def test_a_command_that_does_not_end_is_ended_with_all_its_children(spec, monkeypatch):
    monkeypatch.setattr(compare_runs, "GRACE_S", 0.5)
    found = run_source(spec, f"tell('deepspeed'); {SLEEPING_CHILD}; time.sleep(60)", timeout_s=1.0)
    assert found.problem.startswith("no end within 1 s, after 0 of 5 optimizer steps. Raise --timeout, or ask for")
    assert found.problem.endswith("Check that the launcher or TrainingArguments carries the DeepSpeed configuration.")
    assert find_processes(spec) == []


def test_a_child_that_outlives_the_command_is_ended(spec, monkeypatch):
    monkeypatch.setattr(compare_runs, "GRACE_S", 0.5)
    run_source(spec, SLEEPING_CHILD)
    assert find_processes(spec) == []


def test_only_the_runs_own_shared_memory_is_removed(spec):
    own, other = free_port(), free_port()
    paths = [SHARED_MEMORY / f"deepspeed_allreduce_buffer_0_127.0.0.1_{port}_0" for port in (own, other)]
    try:
        for path in paths:
            path.touch()
        run_source(spec, f"tell('engine', master_port='{own}'); tell('end', master_port='x'); sys.exit(1)")
        assert [path.exists() for path in paths] == [False, True]
    finally:
        paths[1].unlink()


def test_only_what_a_reader_wants_stays(spec):
    run_source(spec, f"open({str(spec.record)[:-5]!r} + '.77.partial', 'w'); tell('end')")
    assert sorted(path.name for path in Path(spec.folder).iterdir()) == ["megatrain.events.jsonl", "megatrain.log"]


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ((), "the script never imported DeepSpeed with this plugin active"),
        (events("deepspeed", "end"), "the script never called DeepSpeed's engine: none was built"),
        (events("deepspeed", "engine", trained=False), "an engine without an optimizer"),
        (events("deepspeed", "engine", trained=True), "took no optimizer step with it"),
    ],
)
def test_a_script_that_trains_nothing_here_is_told_what_is_missing(told, words, spec):
    assert words in problem_of(spec, told)


def test_the_wrong_engine_is_a_problem(spec):
    assert problem_of(spec, (), RECORD) == ""
    found = problem_of(spec, (), {**RECORD, "engine": "DeepSpeedEngine"})
    assert found.startswith("ran on DeepSpeedEngine, expected MegaTrainEngine. Run `megatrain-ds doctor`")
    stock = CompareSpec(name="stock", flag=False, num_steps=5, num_warmup=1, folder=spec.folder)
    assert problem_of(stock, (), RECORD).startswith("ran on MegaTrainEngine, expected DeepSpeedEngine")


@pytest.mark.parametrize(
    ("told", "output", "line"),
    [
        (events("error", text="ConfigError: first\nsecond"), ["ValueError: other"], "ConfigError: first"),
        (
            (),
            ["Traceback (most recent call last):", "  x()", "KeyError: 'loss'", "", "cleaning up"],
            "KeyError: 'loss'",
        ),
        ((), ["usage: launch [-h]", "launch: error: unrecognized arguments: --x", "===="], "launch: error: unrecog"),
        ((), ["[2026] [INFO] [launch.py:12:main]", "Killed", "[2026] [ERROR] [launch.py:3:f] exits with 1"], "Killed"),
        ((), ["a.Error: b", "E1 torch/distributed/elastic/api.py] failed", "x.ChildFailedError: ", "t : c"], "a.Error"),
        ((), ["subprocess.CalledProcessError: Command failed"], ""),
        ((), [], ""),
    ],
)
def test_the_line_that_says_why_is_the_scripts_own(told, output, line):
    found = find_error_line(told, output)
    assert found.startswith(line) if line else found == ""


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"complete": False}, "the script ended by itself after 5 of 5 steps, before the clock could wait"),
        ({"num_trained_engines": 2}, "2 engines trained: these are the figures of the furthest one."),
        ({"world_size": 4}, "4 ranks: these are the figures of rank 0."),
        ({"skipped_steps": 1}, "1 steps were skipped for gradients that were not finite."),
    ],
)
def test_what_a_reader_should_know_is_noted(figures, words, spec):
    (note,) = find_notes(spec, {**RECORD, **figures})
    assert note.startswith(words)
    assert find_notes(spec, RECORD) == find_notes(spec, None) == []
