"""What two outcomes add up to: problems, exit, figures side by side, and nothing hidden when a run failed."""

from __future__ import annotations

import pytest

from megatrain_ds.cli.compare_report import OURS, STOCK, format_problems, format_report, make_report, plot
from megatrain_ds.cli.compare_runs import Outcome

LOSSES = [5.0, 4.5, 4.0, 3.5, 3.0]


def record(losses: list[float | None] = LOSSES, **figures) -> dict:
    """What a recorder leaves."""
    usual = {
        "engine": "MegaTrainEngine",
        "precision": "fp32",
        "loss_dtype": "float32",
        "losses": losses,
        "mean_step_s": 0.25,
        "median_step_s": 0.2,
        "tokens_per_s": 1024.0,
        "peak_host_bytes": 3 * 2**20,
        "resident_bytes": 2 * 2**20,
        "peak_device_bytes": None,
        "memory_report": None,
    }
    return {**usual, **figures}


def outcome(content: dict | None, problem: str = "", notes: tuple[str, ...] = (), tail: str = "") -> Outcome:
    return Outcome(content, problem, notes, tail, 10.0)


def report_of(ours: Outcome, stock: Outcome, tolerance: float | None = None) -> dict:
    return make_report({OURS: ours, STOCK: stock}, ["python", "train.py"], tolerance)


def stock_record(**figures) -> dict:
    return record(**{"engine": "DeepSpeedEngine", "mean_step_s": 0.5, **figures})


def test_two_good_runs_have_no_problem_and_every_figure_is_shown():
    account = {"host_bytes_per_param": 16.25}
    report = report_of(outcome(record(memory_report=account, peak_device_bytes=2**20)), outcome(stock_record()))
    assert report["problems"] == []
    assert report["speedup"] == 2.0
    text = format_report(report)
    rows = {line[:32].strip(): line[32:].split() for line in text.splitlines() if len(line) > 32}
    assert rows["engine"] == ["MegaTrainEngine", "DeepSpeedEngine"]
    assert rows["mean step, ms"] == ["250.0", "500.0"]
    assert rows["median step, ms"] == ["200.0", "200.0"]
    assert rows["tokens/s"] == ["1024", "1024"]
    assert rows["peak resident host, MiB"] == ["3.0", "3.0"]
    assert rows["peak device, MiB"] == ["1.0", "-"]
    assert rows["speedup by the mean step"] == ["2.00"]
    assert rows["engine host bytes/param"] == ["16.25"]
    assert text.splitlines()[-1].startswith("losses agree: ")
    assert [line.split()[0] for line in text.splitlines()[1:6]] == ["1", "2", "3", "4", "5"]


def test_losses_that_differ_are_a_problem():
    report = report_of(outcome(record([*LOSSES[:-1], 3.1])), outcome(stock_record()))
    (problem,) = report["problems"]
    assert problem.startswith("losses: DIFFER: at step 5 they lie 3.3e-02 apart")
    assert "agree" not in format_report(report)
    assert report_of(outcome(record([*LOSSES[:-1], 3.1])), outcome(stock_record()), 0.04)["problems"] == []


def test_losses_that_nobody_saw_are_a_problem():
    report = report_of(outcome(record([None] * 5)), outcome(stock_record()))
    assert report["problems"][0].startswith("losses: unknown: 5 of 5 common steps have no loss")
    assert format_report(report)


def test_runs_of_different_length_are_a_problem():
    report = report_of(outcome(record(LOSSES[:3])), outcome(stock_record()))
    (problem,) = report["problems"]
    assert problem.startswith("steps: the script ended by itself after 3 with the flag and 5 without")
    assert report["losses"]["num_compared"] == 3


def test_a_failed_run_is_named_and_the_other_one_is_still_reported():
    failed = outcome(record(LOSSES[:2]), "the command ended with status 1, after 2 of 5", tail="Traceback\nE: boom")
    report = report_of(failed, outcome(stock_record()))
    assert report["problems"] == ["with the flag: the command ended with status 1, after 2 of 5"]
    assert report["losses"] is None
    assert report["speedup"] is None
    assert "500.0" in format_report(report)
    assert format_problems(report).splitlines() == [
        "FAILED: with the flag: the command ended with status 1, after 2 of 5",
        "End of the output with the flag:",
        "  | Traceback",
        "  | E: boom",
    ]


def test_without_any_figures_the_text_says_so():
    report = report_of(outcome(None, "a"), outcome(None, "b"))
    assert report["problems"] == ["with the flag: a", "without the flag: b"]
    assert format_report(report) == "No figures: neither run took an optimizer step."


def test_notes_are_shown_with_their_run():
    report = report_of(outcome(record()), outcome(stock_record(), notes=("2 steps were skipped.",)))
    assert "note, without the flag: 2 steps were skipped." in format_report(report)


def test_the_plot_needs_both_curves(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "losses.png"
    assert plot(report_of(outcome(None, "a"), outcome(stock_record())), path) is False
    assert plot(report_of(outcome(record([None] * 5)), outcome(stock_record())), path) is False
    assert not path.exists()
    assert plot(report_of(outcome(record(LOSSES[:4])), outcome(stock_record())), path) is True
    assert path.read_bytes().startswith(b"\x89PNG")
