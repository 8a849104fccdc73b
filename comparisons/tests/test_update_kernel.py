"""The update kernel's benchmark: what it reports follows from the seconds of its rounds."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NUMEL, THREADS, ROUNDS = 1 << 18, 2, 5
FUSED = "native, bf16 gradient and bf16 copy in one pass"
COPY = "torch copy, fp32"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """The report as JSON, and what was printed."""
    out = tmp_path_factory.mktemp("kernel") / "report.json"
    command = [sys.executable, "-m", "comparisons.update_kernel", "--json", str(out)]
    command += ["--numel", str(NUMEL), "--threads", str(THREADS), "--rounds", str(ROUNDS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(out.read_text()), done.stdout


@pytest.fixture
def report(run: tuple[dict[str, Any], str]) -> dict[str, Any]:
    return run[0]


def rounds_of(report: dict[str, Any], name: str) -> list[float]:
    (row,) = [row for row in report["rows"] if row["candidate"] == name]
    assert len(row["round_s"]) == ROUNDS
    assert min(row["round_s"]) > 0.0
    return row["round_s"]


def test_the_fused_pass_moves_28_bytes_an_element(report: dict[str, Any]) -> None:
    found = report["yardstick"]
    assert found["kernel"] == FUSED
    # Gradient 2; master, exp_avg and exp_avg_sq read and written in fp32; compute copy 2.
    assert found["kernel_bytes_per_element"] == 2 + 3 * (4 + 4) + 2
    assert sum(found["kernel_bytes"].values()) == 28
    assert found["kernel_bytes_per_s"] == pytest.approx(28 * NUMEL / statistics.median(rounds_of(report, FUSED)))


def test_the_copy_is_counted_with_and_without_write_allocate(report: dict[str, Any]) -> None:
    found, median = report["yardstick"], statistics.median(rounds_of(report, COPY))
    assert found["copy"] == COPY
    assert found["copy_bytes_per_element"] == {"read_write": 8, "with_write_allocate": 12}
    assert found["copy_bytes_per_s"]["read_write"] == pytest.approx(8 * NUMEL / median)
    assert found["copy_bytes_per_s"]["with_write_allocate"] == pytest.approx(12 * NUMEL / median)


@pytest.mark.parametrize(("counted", "copy_bytes"), [("read_write", 8), ("with_write_allocate", 12)])
def test_the_ratio_is_the_median_over_rounds_of_that_round(
    report: dict[str, Any], counted: str, copy_bytes: int
) -> None:
    pairs = zip(rounds_of(report, FUSED), rounds_of(report, COPY), strict=True)
    expected = statistics.median((28 * NUMEL / ours) / (copy_bytes * NUMEL / copy) for ours, copy in pairs)
    assert report["yardstick"]["of_copy"][counted] == pytest.approx(expected)
    (row,) = [row for row in report["rows"] if row["candidate"] == FUSED]
    assert row["of_copy"][counted] == pytest.approx(expected)


def test_the_stricter_count_is_the_yardstick(report: dict[str, Any]) -> None:
    found = report["yardstick"]
    assert found["of_copy"][found["honest"]] == min(found["of_copy"].values())
    assert "read each line before they overwrite it" in found["why"]
    assert found["goal"] == 0.92


def test_copy_and_kernel_have_the_same_threads(report: dict[str, Any]) -> None:
    assert report["environment"]["threads"] == report["environment"]["copy_threads"] == THREADS


def test_speedups_are_medians_of_ratios_within_a_round(report: dict[str, Any]) -> None:
    for ratio in report["ratios"]:
        pairs = zip(rounds_of(report, ratio["ours"]), rounds_of(report, ratio["theirs"]), strict=True)
        assert ratio["speedup"] == pytest.approx(statistics.median(theirs / ours for ours, theirs in pairs))


def test_the_printed_table_has_the_yardstick(run: tuple[dict[str, Any], str]) -> None:
    report, printed = run
    found = report["yardstick"]
    for counted, words in (("read_write", "read + write"), ("with_write_allocate", "with the write-allocate read")):
        rate, ratio = found["copy_bytes_per_s"][counted] / 1e9, found["of_copy"][counted]
        each = found["copy_bytes_per_element"][counted]
        assert f"| threaded copy of fp32, {words} | {each} | {rate:.1f} | {ratio:.2f} |" in printed
    assert f"| 28 | {found['kernel_bytes_per_s'] / 1e9:.1f} |" in printed
    assert found["why"] in printed


def test_small_buffers_are_no_figure_of_dram(run: tuple[dict[str, Any], str]) -> None:
    report, printed = run
    assert not report["yardstick"]["in_dram"]
    assert "nothing here is a figure of DRAM" in printed
