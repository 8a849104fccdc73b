"""The demo's verdict and its following of a running program; whether the demo itself succeeds, .ci/run shows."""

from __future__ import annotations

import math
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
from tqdm import tqdm

from megatrain_ds.cli import demo, demo_report
from megatrain_ds.cli.curves import allowed_differences, worst_excess

FALLING = [5.0 - 0.05 * step for step in range(30)]


def record(losses: list[float], engine: str = "DeepSpeedEngine", report: dict | None = None) -> dict:
    """What demo_script.py would write for these losses."""
    steps = [{"step": i + 1, "loss": loss, "grad_norm": 1.0, "seconds": 0.1} for i, loss in enumerate(losses)]
    totals = {"engine": engine, "num_parameters": 10, "peak_host_bytes": 1000, "peak_device_bytes": 0}
    return {**totals, "memory_report": report, "steps": steps}


def report_of(losses: list[float], engine: str = "MegaTrainEngine", floor: float = 1e-3) -> dict:
    """The report of a run with `losses` beside a stock run with FALLING and a floor of `floor`."""
    return demo_report.make_report(
        {
            "megatrain": record(losses, engine, {"host_bytes_per_param": 16.25}),
            "zero3": record(FALLING),
            "zero3_attention": record([loss + floor for loss in FALLING]),
            "zero3_rows": record([loss - floor / 2 for loss in FALLING]),
        }
    )


def test_a_good_run_has_no_problems() -> None:
    report = report_of([loss + 1.9e-3 for loss in FALLING])
    assert demo_report.find_problems(report) == []
    assert report["max_abs_diff"] == pytest.approx(1.9e-3)
    assert report["max_abs_diff_floor"] == pytest.approx(1e-3)
    assert report["host_bytes_per_param"] == 16.25
    assert report["loss_megatrain"] != report["loss_zero3"] == FALLING


@pytest.mark.parametrize(
    ("losses", "engine", "words"),
    [
        ([loss + 2.1e-3 for loss in FALLING], "MegaTrainEngine", "losses differ"),
        ([*FALLING[:-1], FALLING[-1] + 0.1], "MegaTrainEngine", "at step 29"),
        ([*FALLING[:15], math.nan, *FALLING[16:]], "MegaTrainEngine", "losses differ"),
        (FALLING, "DeepSpeedEngine", "expected MegaTrainEngine"),
        ([5.0] * 30, "MegaTrainEngine", "not 20% under the first"),
    ],
)
def test_each_problem_is_found(losses: list[float], engine: str, words: str) -> None:
    assert any(words in problem for problem in demo_report.find_problems(report_of(losses, engine)))


def test_floor_counts_only_what_was_seen_so_far() -> None:
    """A floor that is large late in training allows nothing early."""
    reordered = [*FALLING[:20], *(loss + 1.0 for loss in FALLING[20:])]
    allowed = allowed_differences(FALLING, [reordered, FALLING])
    assert max(allowed[:20]) < 1e-5
    assert min(allowed[20:]) > 2.0
    assert worst_excess([FALLING[0] + 0.1, *FALLING[1:]], FALLING, [reordered]).step == 0


def test_report_is_shown_and_plotted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(FALLING)
    demo_report.show(report)
    demo_report.plot(report, tmp_path / "losses.png")
    shown = capsys.readouterr().out
    assert "16.25" in shown
    assert f"{FALLING[-1]:.5f}" in shown
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")


def test_follow_waits_for_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    code = (
        "import sys, time; stream = open(sys.argv[1], 'w')\n"
        "for piece in ('{\"lo', 'ss\": 1.0}\\n', '{\"engine\": 1}\\n'):\n"
        "    stream.write(piece); stream.flush(); time.sleep(0.5)\n"
    )
    program = subprocess.Popen([sys.executable, "-c", code, str(path)])
    with tqdm(total=1, disable=True) as bar:
        assert list(demo.follow(program, path, bar)) == ['{"loss": 1.0}\n', '{"engine": 1}\n']
    assert program.wait() == 0


def test_a_failing_program_is_reported_with_its_words(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('no such thing')\n")
    with pytest.raises(demo.DemoFailedError, match="no such thing"):
        demo.run_script(demo.RUNS[0], script, 20)


def test_a_program_without_a_record_is_a_failure(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    with pytest.raises(demo.DemoFailedError, match="ended with 0"):
        demo.run_script(demo.RUNS[0], script, 20)


def test_configurations_differ_by_the_flag_alone() -> None:
    assert {**demo.ds_config(False), "offload_engine": "megatrain"} == demo.ds_config(True)


def test_too_few_steps_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = Namespace(steps=1, out_dir=str(tmp_path), json=None)
    assert demo.run(arguments) == 1
    assert "at least 20" in capsys.readouterr().out
