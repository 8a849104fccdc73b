"""README's results: never stale, made from the records alone, and with every row that means nothing marked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from comparisons.readme import BEGIN, END, ReadmeError, render, update

ROOT = Path(__file__).parents[2]
LOSSES = [5.5, 5.4, 5.3, 5.2, 5.1]
RECORD = {
    "system": "zero3",
    "label": "zero3",
    "status": "ok",
    "model": "tiny",
    "num_parameters": 1_000_000,
    "batch": 2,
    "sequence": 64,
    "clip": 1.0,
    "options": {},
    "steps": 5,
    "warmup": 2,
    "step_s": 0.5,
    "step_s_median": 0.475,
    "tokens_per_s": 256.0,
    "model_tflops": 3.0,
    "losses": LOSSES,
    "device_peak_bytes": 3 * 2**30,
    "host_peak_bytes": 27_200_000,
    "device": "Some GPU",
    "cores": 4,
    "host_memory_bytes": 64 * 2**30,
    "versions": {"torch": "2.13.0"},
    "commit": "abc1234",
    "date": "2026-12-01T10:00:00+00:00",
}
OURS = {**RECORD, "system": "megatrain", "label": "megatrain", "step_s": 0.2, "commit": "def5678"}


class Place:
    """A README and a folder of records."""

    def __init__(self, folder: Path) -> None:
        self.readme, self.results = folder / "README.md", folder / "comparisons" / "results"
        self.readme.write_text(f"# Title\n\nprose, \u00fc\n\n{BEGIN}\nold table\n{END}\n\nmore prose\n")
        self.put(zero3=RECORD, megatrain=OURS)

    def put(self, folder: str = "box", **records: dict[str, Any]) -> None:
        (self.results / folder).mkdir(parents=True, exist_ok=True)
        for name, record in records.items():
            (self.results / folder / f"{name}.json").write_text(json.dumps(record))

    def update(self, *, check: bool = False) -> bool:
        return update(self.readme, self.results, check=check)

    def rows(self) -> dict[str, list[str]]:
        """Cells by label and batch, of all tables."""
        lines = [line.strip("| ").split(" | ") for line in render(self.results).splitlines() if line.startswith("| ")]
        return {f"{cells[0]} {cells[1]}": cells for cells in lines}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_the_readme_says_what_the_records_say() -> None:
    stale = update(ROOT / "README.md", ROOT / "comparisons" / "results", check=True)
    assert not stale, "run `python -m comparisons readme`"


def test_only_what_stands_between_the_markers_is_written(place: Place) -> None:
    before = place.readme.read_text()
    assert place.update()
    after = place.readme.read_text()
    assert after.partition(BEGIN)[0] == before.partition(BEGIN)[0]
    assert after.partition(END)[2] == before.partition(END)[2]
    assert after.partition(BEGIN)[2].partition(END)[0] == "\n" + render(place.results)
    assert "old table" not in after


def test_a_second_update_changes_nothing(place: Place) -> None:
    assert place.update()
    once = place.readme.read_bytes()
    assert not place.update()
    assert place.readme.read_bytes() == once


def test_a_check_writes_nothing(place: Place) -> None:
    before = place.readme.read_bytes()
    assert place.update(check=True)
    assert place.readme.read_bytes() == before


@pytest.mark.parametrize(
    "change",
    [{"step_s": 0.21}, {"losses": [6.5, *LOSSES[1:]]}, {"commit": "0000000"}, {"device": "Another GPU"}, {"steps": 4}],
    ids=lambda change: next(iter(change)),
)
def test_a_changed_record_makes_the_readme_stale(place: Place, change: dict[str, Any]) -> None:
    place.update()
    assert not place.update(check=True)
    place.put(megatrain={**OURS, **change})
    assert place.update(check=True)


def test_a_row_has_the_figures_of_its_record(place: Place) -> None:
    assert place.rows()["megatrain 2"] == [
        *("megatrain", "2", "5 after 2", "0.200 (0.475)", "256", "3"),
        *("2.50", "", "0.0 (27.2)", "3.0", "5 agree"),
    ]
    assert place.rows()["zero3 2"][6] == "1.00"


def test_a_table_says_hardware_versions_date_and_every_commit(place: Place) -> None:
    text = render(place.results)
    assert "### tiny, sequence 64, clipping 1.0\n" in text
    assert (
        "0.001 B parameters; Some GPU, 4 cores, 64 GiB of host memory; torch 2.13.0; 2026-12-01; "
        "commit abc1234, def5678. Records: [comparisons/results/box](comparisons/results/box)."
    ) in text


def test_a_row_whose_losses_differ_is_marked_and_has_no_speedup(place: Place) -> None:
    place.put(megatrain={**OURS, "losses": [5.5, 5.4, 5.3, 5.2, 5.2]})
    cells = place.rows()["megatrain 2"]
    assert cells[6] == "void"
    assert cells[10].startswith("**differ from zero3's by 2.0e-02")
    assert cells[10].endswith("void**")


def test_nothing_is_compared_with_a_base_whose_losses_differ(place: Place) -> None:
    place.put(plain={**RECORD, "system": "plain", "label": "plain"}, zero3={**RECORD, "losses": [9.0, *LOSSES[1:]]})
    rows = place.rows()
    assert rows["zero3 2"][10].startswith("**differ from plain's")
    assert rows["megatrain 2"][10] == "5 agree"
    assert {rows[name][6] for name in ("megatrain 2", "zero3 2", "plain 2")} == {"void"}


def test_a_failed_record_is_a_row_that_says_so(place: Place) -> None:
    failed = {name: RECORD[name] for name in ("system", "label", "model", "sequence", "clip", "device")}
    place.put(zero3_b32={**failed, "batch": 32, "status": "out of memory", "reason": "tried | to\nallocate"})
    place.put(megatrain_b32={**OURS, "batch": 32})
    rows = place.rows()
    assert rows["zero3 32"][2].rstrip("| ") == "**out of memory**: tried / to allocate"
    assert rows["megatrain 32"][6] == "", "a speedup needs the base's figures"


def test_records_of_other_settings_or_machines_have_tables_of_their_own(place: Place) -> None:
    for index, other in enumerate(({"sequence": 128}, {"clip": 0.0}, {"device": "Another GPU"}, {"model": "large"})):
        place.put(**{f"other{index}": {**OURS, **other}})
    place.put("second", megatrain=OURS)
    text = render(place.results)
    assert text.count("### tiny, sequence 64, clipping 1.0\n") == 3
    for heading in ("tiny, sequence 128, clipping 1.0", "tiny, sequence 64, clipping off", "large, sequence 64"):
        assert f"### {heading}" in text
    assert text.count("| 2.50 |") == 1, "only one row has a base in its own table"


def test_options_of_a_system_are_in_its_row(place: Place) -> None:
    place.put(compiled={**OURS, "label": "compiled", "options": {"compile": True}})
    assert "compiled (megatrain, compile: true) 2" in place.rows()


def test_records_without_the_newer_fields_are_printed(place: Place) -> None:
    place.put(megatrain={name: value for name, value in OURS.items() if name not in ("label", "step_s_median")})
    assert place.rows()["megatrain 2"][3] == "0.200"


def test_local_records_are_nobodys_results_and_notes_stand_below_the_tables(place: Place) -> None:
    text = render(place.results)
    place.put("local", megatrain={**OURS, "batch": 64})
    assert render(place.results) == text
    (place.results / "box" / "notes.md").write_text("How the peer was tuned.\n")
    assert render(place.results) == text + "\nHow the peer was tuned.\n"


def kernel_report(**more: Any) -> dict[str, Any]:
    facts = {"cpu": "Some CPU", "threads": 4, "numel": 2**26, "rounds": 15, "native": "avx512", "torch": "2.13.0"}
    fused = {"candidate": "native, bf16 gradient and bf16 copy in one pass", "bytes_per_s": 160e9}
    copy = {"candidate": "torch copy, fp32", "bytes_per_s": 100e9, "fraction_of_copy_bandwidth": 1.0}
    return {
        "environment": {**facts, "deepspeed": "0.19.8", "date": "2026-12-01"},
        "rows": [{**fused, "fraction_of_copy_bandwidth": 1.5}, copy],
        "ratios": [{"ours": "native", "theirs": "DeepSpeedCPUAdam", "speedup": 1.25, "goal": 1.0}],
        **more,
    }


def test_the_update_kernel_is_reported_from_its_file(place: Place) -> None:
    yardstick = {
        "kernel_bytes_per_element": 28,
        "kernel_bytes_per_s": 140e9,
        "copy_bytes_per_element": {"read_write": 8, "with_write_allocate": 12},
        "copy_bytes_per_s": {"read_write": 100e9, "with_write_allocate": 150e9},
        "of_copy": {"read_write": 1.41, "with_write_allocate": 0.94},
        "honest": "with_write_allocate",
        "why": "it is so",
        "in_dram": True,
    }
    place.put(update_kernel=kernel_report(yardstick=yardstick))
    text = render(place.results)
    assert "Some CPU, 4 threads, 64 Mi parameters, median of 15 rounds" in text
    assert "| native | DeepSpeedCPUAdam | 1.250 |" in text
    assert "28 bytes a parameter at 140 GB/s, 0.94 of what a copy with the same threads reaches: 150 GB/s at 12" in text
    assert "counted as 8 bytes, 1.41" in text
    assert "caches" not in text
    place.put(update_kernel=kernel_report(yardstick={**yardstick, "in_dram": False}))
    assert "may fit into caches" in render(place.results)


def test_an_update_kernel_report_from_before_the_yardstick_is_converted(place: Place) -> None:
    place.put(update_kernel=kernel_report())
    text = render(place.results)
    # 1.5 x 8 / 12 and 100 GB/s x 12 / 8.
    assert "28 bytes a parameter at 160 GB/s, 1.00 of what a copy with the same threads reaches: 150 GB/s at 12" in text
    assert "counted as 8 bytes, 1.50" in text


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("no markers", f"must hold {BEGIN} once, and holds it 0 times"),
        (BEGIN, f"must hold {END} once, and holds it 0 times"),
        (f"{BEGIN}{END}{BEGIN}{END}", f"must hold {BEGIN} once, and holds it 2 times"),
        (f"{END}{BEGIN}", f"{END} stands before {BEGIN}"),
    ],
)
def test_missing_markers_are_named_with_file_rule_and_next_action(place: Place, text: str, rule: str) -> None:
    place.readme.write_text(text)
    with pytest.raises(ReadmeError) as caught:
        place.update()
    message = str(caught.value)
    assert message.startswith(f"readme = {str(place.readme)!r}: {rule}. ")
    assert message.partition(f"{rule}. ")[2].startswith(("Put ", "Swap "))
    assert place.readme.read_text() == text


def test_unreadable_and_absent_records_are_named(place: Place) -> None:
    path = place.results / "box" / "megatrain.json"
    path.write_text("{")
    with pytest.raises(ReadmeError, match=r"megatrain\.json': is not JSON .*Measure it again"):
        place.update()
    place.put(megatrain={name: value for name, value in OURS.items() if name != "step_s"})
    with pytest.raises(ReadmeError, match=r"megatrain\.json': .*step_s, and this one does not"):
        place.update()
    for record in (path, path.with_name("zero3.json")):
        record.unlink()
    with pytest.raises(ReadmeError, match=r"results': holds no records"):
        place.update()
    assert "old table" in place.readme.read_text()
