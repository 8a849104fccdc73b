"""Whole comparisons on the CPU: real children, the record they leave, and what becomes of those that fail."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from comparisons.__main__ import main, parse_arguments
from comparisons.runner import Request, run

TINY = Path(__file__).parents[2] / "configs" / "models" / "tiny.json"
SMALL = ["--sequence", "16", "--steps", "2", "--warmup", "1", "--loss-steps", "6"]
SYSTEMS = ("megatrain", "zero3", "fsdp2", "resident")


def command(out: Path, *more: str, systems: str = ",".join(SYSTEMS)) -> list[str]:
    return ["run", "--model", str(TINY), "--systems", systems, "--batches", "2", "--out", str(out), *SMALL, *more]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Threads of a tiny model wait for each other longer than they compute, on a busy machine a hundred times over."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[int, Path]:
    """One run of four systems: its exit status and folder."""
    out = tmp_path_factory.mktemp("measured")
    return main(command(out)), out


def record(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"tiny_{name}_s16_b2.json").read_text())


def test_four_systems_run_and_agree(measured):
    status, out = measured
    assert status == 0
    table = (out / "report.md").read_text()
    assert [name for name in SYSTEMS if f"\n| {name} | 2 | " in table] == list(SYSTEMS)
    assert "void" not in table.partition("###")[2]
    assert "| 6 agree |" in table
    assert sorted(path.name for path in out.glob("*.png")) == [
        f"tiny_clip1_{name}.png" for name in ("breakdown", "device_memory", "host_memory", "throughput")
    ]


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_record_says_what_was_measured_with_what(measured, system):
    found = record(measured[1], system)
    assert found["status"] == "ok"
    engines = {"megatrain": "MegaTrainEngine", "zero3": "DeepSpeedEngine"}
    assert found["engine"] == engines.get(system, system)
    assert len(found["losses"]) >= 6
    assert found["tokens_per_s"] == pytest.approx(2 * 16 / found["step_s"])
    assert found["model_tflops"] == pytest.approx(6 * found["num_parameters"] * found["tokens_per_s"] / 1e12)
    assert found["host_peak_bytes"] > found["host_baseline_bytes"] > 2**27
    assert {"torch", "python"} <= set(found["versions"])
    assert found["date"]
    assert found["cores"] >= 1


def test_optimizers_learn_and_the_ceiling_does_not(measured):
    losses = {system: record(measured[1], system)["losses"] for system in SYSTEMS}
    assert losses["megatrain"] != losses["resident"]
    assert losses["megatrain"][0] == pytest.approx(losses["resident"][0], rel=1e-3)


def test_the_streaming_engine_tells_where_its_time_went(measured):
    steps = record(measured[1], "megatrain")["breakdown"]
    assert len(steps) == 2
    for step in steps:
        assert sum(step["causes_s"].values()) == pytest.approx(step["seconds"])
        assert step["busy_s"]["compute"] > 0.0
        assert step["busy_s"]["h2d"] > 0.0
    assert record(measured[1], "zero3")["breakdown"] == []


def test_losses_that_differ_on_purpose_make_a_row_void(measured, capsys):
    _, out = measured
    assert main(command(out, "--learning-rate", "0.05", systems="hot=megatrain")) == 1
    rows = [line for line in (out / "report.md").read_text().splitlines() if line.startswith("| hot")]
    assert len(rows) == 1
    assert "differ from zero3's by" in rows[0]
    assert "void" in rows[0]
    assert rows[0] in capsys.readouterr().out
    assert "| zero3 " in (out / "report.md").read_text()
    assert main(["report", str(out)]) == 1


FAILURES = {
    "missing package": ("import a_package_that_nobody_has", "a_package_that_nobody_has", ""),
    "out of memory": ("def build(model, settings): raise MemoryError('too large')", "too large", ""),
    "failed": ("def build(model, settings): raise ValueError('wheels came off')", "wheels came off", ",resident"),
}


@pytest.mark.parametrize("status", FAILURES)
def test_a_system_that_fails_is_a_row_and_the_rest_goes_on(tmp_path, status):
    adapter, reason, others = FAILURES[status]
    (tmp_path / "comparison_adapter.py").write_text(adapter + "\n")
    out = tmp_path / "out"
    assert main(command(out, "--reference", str(tmp_path), systems=f"reference{others}")) == 1
    found = record(out, "reference")
    assert found["status"] == status
    assert reason in found["reason"]
    table = (out / "report.md").read_text()
    assert f"| reference | 2 | **{status}**: " in table
    assert table.count("### tiny") == 1
    if others:
        assert record(out, "resident")["status"] == "ok"


def test_one_command_measures_clipping_on_and_off(tmp_path):
    (tmp_path / "comparison_adapter.py").write_text("def build(model, settings): raise ValueError(settings.clip)\n")
    out = tmp_path / "out"
    main(command(out, "--reference", str(tmp_path), "--clip", "1.0,0", systems="theirs=reference"))
    assert record(out, "theirs")["reason"].endswith("1.0")
    off = json.loads((out / "tiny_theirs_s16_noclip_b2.json").read_text())
    assert off["reason"].endswith("0.0")
    assert (off["clip"], record(out, "theirs")["clip"]) == (0.0, 1.0)


def test_a_child_that_does_not_end_is_stopped_with_what_it_started(tmp_path):
    started = tmp_path / "started"
    source = f"""
import pathlib, subprocess, time
pathlib.Path({str(started)!r}).write_text(str(subprocess.Popen(["sleep", "600"]).pid))
time.sleep(600)
"""
    (tmp_path / "comparison_adapter.py").write_text(source)
    outcome = run(Request("reference", TINY, 2, ("--reference", str(tmp_path))), tmp_path / "out", timeout_s=8.0)
    assert not outcome.ok
    assert outcome.record["status"] == "timeout"
    assert "8 s" in outcome.record["reason"]
    state = Path(f"/proc/{started.read_text()}/stat")
    deadline = time.monotonic() + 10.0
    while state.exists() and state.read_text().split()[2] != "Z" and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not state.exists() or state.read_text().split()[2] == "Z"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--model", "nowhere.json"], r"--model = 'nowhere.json': no such file"),
        (["--systems", "megatrain,zero9"], r"--systems = 'zero9': no such system. Choose from megatrain"),
        (["--systems", "zero3,zero3"], r"--systems = 'zero3,zero3': a label appears twice"),
        (["--batches", "8,many"], r"--batches = '8,many'"),
        (["--clip", "1.0,-2"], r"--clip = '1.0,-2'"),
        (["--steps", "0"], r"--steps = 0: must be at least 1"),
        (["--options", '{"fsdp2": {}}', "--systems", "zero3"], r"--options = .*labels of --systems: zero3"),
        (["--systems", "reference"], r"--reference = None: the system 'reference' needs the folder"),
        (["--systems", "reference", "--reference", "/nowhere"], r"--reference = '/nowhere'"),
    ],
)
def test_a_bad_command_line_is_named_before_anything_starts(tmp_path, capsys, change, message):
    out = tmp_path / "out"
    assert main([*command(out), *change]) == 2
    assert re.search(message, capsys.readouterr().out)
    assert not out.exists()


def test_records_of_other_hardware_are_refused_by_name(tmp_path, capsys):
    (tmp_path / "other.json").write_text(json.dumps({"status": "ok", "device": "A Machine Elsewhere", "cores": 3}))
    assert main(command(tmp_path)) == 2
    assert "holds records of A Machine Elsewhere with 3 cores, and this machine has" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.log"))


def test_a_report_of_nothing_is_refused(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no records" in capsys.readouterr().out


def test_unknown_words_end_with_usage():
    with pytest.raises(SystemExit) as caught:
        parse_arguments(["run", "--modle", "x"])
    assert caught.value.code == 2
