"""Tables and plots of records: ratios, failures, groups, and where the time went."""

from __future__ import annotations

import json
from typing import Any

import pytest

from comparisons.__main__ import finish
from comparisons.plots import causes, plots
from comparisons.report import markdown


def record(label: str, step_s: float, **more: Any) -> dict[str, Any]:
    return {
        "system": label,
        "label": label,
        "status": "ok",
        "model": "m",
        "sequence": 16,
        "clip": 1.0,
        "device": "a device",
        "cores": 2,
        "versions": {"torch": "2"},
        "commit": "abc",
        "date": "2026-01-02T03:04:05",
        "num_parameters": 1000,
        "batch": 2,
        "steps": 5,
        "warmup": 1,
        "step_s": step_s,
        "step_s_median": step_s / 2,
        "tokens_per_s": 32 / step_s,
        "model_tflops": 1.0,
        "losses": [4.0],
        "device_peak_bytes": 2**30,
        "host_peak_bytes": 2**31,
        "breakdown": [],
        **more,
    }


def rows(table: str) -> dict[str, list[str]]:
    lines = [line for line in table.splitlines() if line.startswith("|") and "---" not in line]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {line[0]: line[1:] for line in cells}


def test_a_ratio_is_taken_within_a_batch():
    records = [record("zero3", 3.0), record("ours", 2.0), record("zero3", 8.0, batch=4), record("ours8", 2.0, batch=4)]
    table = rows(markdown(records))
    assert table["ours"][:6] == ["2", "5 after 1", "2.000 (1.000)", "16", "1", "1.50"]
    assert table["ours8"][5] == "4.00"
    assert table["ours"][6:] == ["", "2.0 (2147483.6)", "1.0", "1 agree"]


def test_the_ceiling_is_compiled_for_what_is_compiled():
    fast = {"compile": True}
    records = [
        record("resident", 1.0),
        record("top", 0.5, system="resident", options=fast),
        record("ours", 2.0),
        record("ours+", 1.0, system="ours", options=fast),
    ]
    shares = {label: cells[6] for label, cells in rows(markdown(records)).items()}
    assert shares["ours"] == "50%"
    assert shares["ours+ (ours, compile: true)"] == "50%"
    assert shares["top (resident, compile: true)"] == "100%"


def test_without_the_base_there_is_no_ratio():
    assert rows(markdown([record("ours", 2.0)]))["ours"][5] == ""


@pytest.mark.parametrize("key", ["model", "clip", "sequence", "device"])
def test_what_may_not_be_compared_is_in_another_table(key):
    table = markdown([record("zero3", 3.0), record("ours", 2.0, **{key: 7})])
    assert table.count("| system |") == 2
    assert rows(table)["ours"][5] == ""


def test_few_steps_are_marked():
    assert rows(markdown([record("ours", 2.0, steps=4)]))["ours"][1] == "4 after 1 (fewer than 5: no claim)"
    assert rows(markdown([record("ours", 2.0, steps=5)]))["ours"][1] == "5 after 1"


def test_a_failure_is_a_row_and_void_losses_are_marked():
    failed = {"label": "bad", "system": "bad", "status": "failed", "reason": "a|b", "batch": 2, "model": "m"}
    group = {key: record("zero3", 3.0)[key] for key in ("sequence", "clip", "device")}
    table = rows(markdown([record("zero3", 3.0), {**failed, **group}, record("ours", 2.0, losses=[5.0])]))
    assert table["bad"][1] == "**failed**: a/b"
    assert table["ours"][-1].endswith("void**")
    assert table["ours"][5] == "void"


def test_a_breakdown_is_scaled_to_the_timed_step():
    steps = [{"seconds": 1.0, "causes_s": {"a": 0.25, "b": 0.75}}, {"seconds": 3.0, "causes_s": {"a": 2.75, "b": 0.25}}]
    assert causes(record("ours", 2.0, breakdown=steps)) == pytest.approx({"a": 1.5, "b": 0.5})
    assert causes(record("zero3", 2.0)) == {"not told": 2.0}
    older = record("older", 2.0)
    del older["breakdown"]
    assert causes(older) == {"not told": 2.0}


def test_plots_are_written_for_every_table(tmp_path):
    steps = [{"seconds": 1.0, "causes_s": {"a": 0.25, "b": 0.75}}]
    records = [record("zero3", 3.0), record("ours", 2.0, breakdown=steps), record("ours", 2.0, clip=0.0)]
    written = plots(records, tmp_path)
    assert len(written) == 8
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    assert {path.name.split("_")[1] for path in written} == {"clip1", "noclip"}
    assert plots([{"status": "failed"}], tmp_path) == []


def test_losses_are_compared_within_one_clipping(tmp_path):
    """Without clipping losses are others, and right."""
    records = [
        record(label, 1.0, clip=clip, losses=[4.0, 4.0 - clip]) for label in ("zero3", "ours") for clip in (0.0, 1.0)
    ]

    def judge() -> int:
        for index, found in enumerate(records):
            (tmp_path / f"{index}.json").write_text(json.dumps(found))
        return finish(records, tmp_path, "zero3")

    assert judge() == 0
    records[-1]["losses"] = [4.0, 4.0]
    assert judge() == 1
