"""README's results: tables made from records on disk, between two marker comments, and nothing else of the file.

It measures nothing; what a table of systems looks like is the report's to say.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from comparisons.report import legend, line, tables
from comparisons.update_kernel import BYTES_PER_PARAM, COPY, COPY_BYTES, HONEST, NATIVE_BF16, WHY
from megatrain_ds.errors import explain

if TYPE_CHECKING:
    from pathlib import Path

BEGIN = "<!-- results: begin -->"
END = "<!-- results: end -->"
# Where `run` writes unless told otherwise: measurements of whoever works here, which are nobody's published results.
LOCAL = "local"
NOTES = "notes.md"
NEEDED = ("num_parameters", "steps", "warmup", "step_s", "tokens_per_s", "model_tflops", "losses")
NEEDED_MEMORY = ("host_peak_bytes", "device_peak_bytes")


class ReadmeError(ValueError):
    """README or a record is not what the tables can be written to or made from."""


def update(readme: Path, results: Path, *, check: bool) -> bool:
    """Write the tables between README's markers.

    Args:
        readme: a file with both markers, each once.
        results: folder of folders with records.
        check: write nothing.

    Returns:
        Whether the file was stale: what stood between the markers was not what the records say.

    Raises:
        ReadmeError: markers or records are missing, or a record cannot be read.
    """
    text = readme.read_text()
    before, after = _around_markers(readme, text)
    fresh = f"{before}{BEGIN}\n{render(results)}{END}{after}"
    if fresh != text and not check:
        readme.write_text(fresh)
    return fresh != text


def _around_markers(readme: Path, text: str) -> tuple[str, str]:
    for marker in (BEGIN, END):
        if text.count(marker) != 1:
            rule = f"must hold {marker} once, and holds it {text.count(marker)} times"
            raise ReadmeError(explain("readme", str(readme), rule, f"Put {BEGIN} and, below it, {END} where tables go"))
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ReadmeError(explain("readme", str(readme), f"{END} stands before {BEGIN}", "Swap the two lines"))
    return before, after


def render(results: Path) -> str:
    """The tables: for each folder of records one a model, sequence, clipping and device, then the update kernel's.

    Args:
        results: holds the folders. `local` is left out, and a folder's notes.md stands below its tables.

    Raises:
        ReadmeError: there are no records, or one cannot be read.
    """
    parts = []
    for folder in sorted({path.parent for path in results.rglob("*.json")}):
        place = folder.relative_to(results.parent)
        if LOCAL not in place.parts:
            parts += _folder(folder, f"{results.parent.name}/{place.as_posix()}")
    if not parts:
        rule = "holds no records, and without them the tables would be emptied"
        raise ReadmeError(explain("results", str(results), rule, "Measure into it: `python -m comparisons run --out`"))
    return "\n".join([legend(), *parts])


def _folder(folder: Path, place: str) -> list[str]:
    found = {path: _read(path) for path in sorted(folder.glob("*.json"))}
    records = [_complete(path, content) for path, content in found.items() if "status" in content]
    parts = tables(records, source=f"Records: [{place}]({place}).")
    notes = folder / NOTES
    if parts and notes.is_file():
        parts.append(notes.read_text())
    return parts + [_kernel(content) for content in found.values() if "ratios" in content]


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        rule = f"is not JSON ({error})"
        raise ReadmeError(explain("record", str(path), rule, "Measure it again or remove it")) from error
    return content if isinstance(content, dict) else {}


def _complete(path: Path, record: dict[str, Any]) -> dict[str, Any]:
    """The record, with the label that older ones lack."""
    wanted = ("system", "batch", *(NEEDED + NEEDED_MEMORY if record["status"] == "ok" else ()))
    missing = [name for name in wanted if name not in record]
    if missing:
        rule = f"a record of status {record['status']!r} names {', '.join(missing)}, and this one does not"
        raise ReadmeError(explain("record", str(path), rule, "Measure it again or remove it"))
    return {"label": record["system"], **record}


def _kernel(report: dict[str, Any]) -> str:
    facts = report["environment"]
    lines = [
        "### Update kernel alone",
        "",
        f"{facts['cpu']}, {facts['threads']} threads, {facts['numel'] / 2**20:g} Mi parameters, median of "
        f"{facts['rounds']} rounds; {facts['native']}; torch {facts['torch']}, deepspeed {facts['deepspeed']}; "
        f"{facts['date']}.",
        "",
        line(("update", "against", "speedup")),
        line(["---"] * 3),
        *(line((ratio["ours"], ratio["theirs"], f"{ratio['speedup']:.3f}")) for ratio in report["ratios"]),
        "",
        _against_copy(report.get("yardstick") or _old_yardstick(report)),
        "",
    ]
    return "\n".join(lines)


def _old_yardstick(report: dict[str, Any]) -> dict[str, Any]:
    """The yardstick from a report without one: it gave the copy's bandwidth as read + write alone."""
    rows = {row["candidate"]: row for row in report["rows"]}
    then = BYTES_PER_PARAM[COPY]
    fraction, rate = rows[NATIVE_BF16]["fraction_of_copy_bandwidth"], rows[COPY]["bytes_per_s"]
    return {
        "kernel_bytes_per_element": BYTES_PER_PARAM[NATIVE_BF16],
        "kernel_bytes_per_s": rows[NATIVE_BF16]["bytes_per_s"],
        "copy_bytes_per_element": COPY_BYTES,
        "copy_bytes_per_s": {counted: rate * each / then for counted, each in COPY_BYTES.items()},
        "of_copy": {counted: fraction * then / each for counted, each in COPY_BYTES.items()},
        "honest": HONEST,
        "why": WHY,
        "in_dram": True,
    }


def _against_copy(found: dict[str, Any]) -> str:
    each, of, rates, honest = (found[n] for n in ("copy_bytes_per_element", "of_copy", "copy_bytes_per_s", "honest"))
    others = [f"counted as {each[name]} bytes, {of[name]:.2f}" for name in each if name != honest]
    return (
        f"The fused pass moves {found['kernel_bytes_per_element']} bytes a parameter at "
        f"{found['kernel_bytes_per_s'] / 1e9:.0f} GB/s, {of[honest]:.2f} of what a copy with the same threads reaches: "
        f"{rates[honest] / 1e9:.0f} GB/s at {each[honest]} bytes an element ({'; '.join(others)}). Why so: "
        f"{found['why']}." + ("" if found["in_dram"] else " Buffers this small may fit into caches: no figure of DRAM.")
    )
