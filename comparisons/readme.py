"""README's results: tables made from records on disk, between two marker comments, and nothing else of the file.

It measures nothing and knows no system by name but the one that speedups are taken against.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from comparisons.losses import NUM_COMPARED, RELATIVE_TOLERANCE, choose_reference, describe
from comparisons.report import group
from comparisons.update_kernel import BYTES_PER_PARAM, COPY, COPY_BYTES, HONEST, NATIVE_BF16, WHY
from megatrain_ds.errors import explain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

BEGIN = "<!-- results: begin -->"
END = "<!-- results: end -->"
BASE = "zero3"
# Where `run` writes unless told otherwise: measurements of whoever works here, which are nobody's published results.
LOCAL = "local"
NOTES = "notes.md"
NEEDED = ("num_parameters", "steps", "warmup", "step_s", "tokens_per_s", "model_tflops", "losses")
NEEDED_MEMORY = ("host_peak_bytes", "device_peak_bytes")
LEGEND = f"""\
Seconds are the mean of the timed steps with every update waited for; what is derived from seconds is derived from the
mean. TFLOP/s = 6 x parameters x tokens / time. Memory is the peak of the process. The speedup is against {BASE} of the
same batch. Losses may differ by {RELATIVE_TOLERANCE:.1e}, relative, over the first {NUM_COMPARED} steps
that both systems recorded; a row whose losses differ more is void.
"""
COLUMNS = (
    "system",
    "batch",
    "timed steps",
    "s/step (median)",
    "tokens/s",
    "TFLOP/s",
    "speedup",
    "host bytes/param",
    "device GiB",
    "losses",
)


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
    return "\n".join([LEGEND, *parts])


def _folder(folder: Path, place: str) -> list[str]:
    found = {path: _read(path) for path in sorted(folder.glob("*.json"))}
    records = [_complete(path, content) for path, content in found.items() if "status" in content]
    parts = []
    for key in dict.fromkeys(group(record) for record in records):
        parts.append(_table([record for record in records if group(record) == key], place))
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


def _table(records: list[dict[str, Any]], place: str) -> str:
    first = records[0]
    clip = first.get("clip")
    clipping = "not recorded" if clip is None else clip or "off"
    lines = [
        f"### {first.get('model', 'unnamed')}, sequence {first.get('sequence', 'not recorded')}, clipping {clipping}",
        "",
        f"{_facts(records)} Records: [{place}]({place}).",
        "",
        _line(COLUMNS),
        _line(["---"] * len(COLUMNS)),
    ]
    rows = sorted(records, key=lambda record: (record["batch"], record["label"]))
    return "\n".join([*lines, *(_line(_row(record, records)) for record in rows), ""])


def _facts(records: list[dict[str, Any]]) -> str:
    """Hardware, versions, dates and commits of all rows, each said once."""
    facts = (
        _distinct(records, lambda r: f"{r['num_parameters'] / 1e9:.3f} B parameters" if "num_parameters" in r else ""),
        _distinct(records, _hardware),
        _distinct(records, lambda r: ", ".join(f"{name} {found}" for name, found in r.get("versions", {}).items())),
        _distinct(records, lambda r: str(r.get("date", ""))[:10]),
        "commit " + _distinct(records, lambda r: str(r.get("commit") or "not recorded"), ", "),
    )
    return "; ".join(fact for fact in facts if fact) + "."


def _hardware(record: dict[str, Any]) -> str:
    parts = [str(record.get("device", "hardware not recorded"))]
    parts += [f"{record['cores']} cores"] if "cores" in record else []
    memory = record.get("host_memory_bytes")
    return ", ".join([*parts, f"{memory / 2**30:.0f} GiB of host memory"] if memory else parts)


def _distinct(records: list[dict[str, Any]], value: Callable[[dict[str, Any]], str], between: str = " or ") -> str:
    return between.join(sorted({value(record) for record in records} - {""}))


def _row(record: dict[str, Any], records: list[dict[str, Any]]) -> list[str]:
    head = [_label(record), str(record["batch"])]
    if record["status"] != "ok":
        reason = " ".join(str(record.get("reason", "")).split())[:120]
        failure = f"**{record['status']}**" + (f": {reason}" if reason else "")
        return [*head, failure, *[""] * (len(COLUMNS) - len(head) - 1)]
    peers = [other for other in records if other["batch"] == record["batch"]]
    agreement = describe(record, choose_reference(peers))
    median = f" ({record['step_s_median']:.3f})" if "step_s_median" in record else ""
    return [
        *head,
        f"{record['steps']} after {record['warmup']}",
        f"{record['step_s']:.3f}{median}",
        f"{record['tokens_per_s']:.0f}",
        f"{record['model_tflops']:.0f}",
        _speedup(record, peers),
        f"{record['host_peak_bytes'] / record['num_parameters']:.1f}",
        f"{record['device_peak_bytes'] / 2**30:.1f}",
        f"**{agreement}**" if _is_void(agreement) else agreement,
    ]


def _label(record: dict[str, Any]) -> str:
    options = record.get("options") or {}
    said = ", ".join(f"{name}: {json.dumps(value)}" for name, value in options.items())
    return f"{record['label']} ({said})" if said else record["label"]


def _speedup(record: dict[str, Any], peers: list[dict[str, Any]]) -> str:
    base = next((other for other in peers if other["label"] == BASE and other["status"] == "ok"), None)
    if base is None:
        return ""
    reference = choose_reference(peers)
    if any(_is_void(describe(side, reference)) for side in (record, base)):
        return "void"
    return f"{base['step_s'] / record['step_s']:.2f}"


def _is_void(agreement: str) -> bool:
    return agreement.endswith("void")


def _kernel(report: dict[str, Any]) -> str:
    facts = report["environment"]
    lines = [
        "### Update kernel alone",
        "",
        f"{facts['cpu']}, {facts['threads']} threads, {facts['numel'] / 2**20:g} Mi parameters, median of "
        f"{facts['rounds']} rounds; {facts['native']}; torch {facts['torch']}, deepspeed {facts['deepspeed']}; "
        f"{facts['date']}.",
        "",
        _line(("update", "against", "speedup")),
        _line(["---"] * 3),
        *(_line((ratio["ours"], ratio["theirs"], f"{ratio['speedup']:.3f}")) for ratio in report["ratios"]),
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


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"
