"""Tables from records: one a model, sequence, clipping and device, a row a record, failures included."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from comparisons.losses import NUM_COMPARED, RELATIVE_TOLERANCE, choose_reference, describe

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

BASE = "zero3"
ENOUGH_STEPS = 5
LEGEND = """\
Seconds are the mean of the timed steps with every update waited for, and what is derived from seconds is derived from
that mean. The speedup is against {base} of the same batch. The ceiling is the system 'resident', compiled for a row
that is: no offload and no optimizer. TFLOP/s = 6 x parameters x tokens / time. Memory is the peak of the process.
Losses may differ by {tolerance:.1e}, relative, over the first {compared} steps that both systems recorded; a row whose
losses differ more is void.
"""
COLUMNS = (
    "system",
    "batch",
    "timed steps",
    "s/step (median)",
    "tokens/s",
    "TFLOP/s",
    "speedup",
    "of the ceiling",
    "host GiB (bytes/param)",
    "device GiB",
    "losses",
)


def markdown(records: list[dict[str, Any]], base: str = BASE) -> str:
    """A legend and the tables.

    Args:
        records: what the children wrote, failures included.
        base: label of the system that ratios are taken against, within the same model, batch, clipping and machine.
    """
    return "\n".join([legend(base), *tables(records, base)])


def legend(base: str = BASE) -> str:
    """What the columns of every table mean."""
    return LEGEND.format(base=base, tolerance=RELATIVE_TOLERANCE, compared=NUM_COMPARED)


def tables(records: list[dict[str, Any]], base: str = BASE, source: str = "") -> list[str]:
    """A table a group, each under a heading with its hardware and versions.

    Args:
        records: as `markdown` takes them.
        base: likewise.
        source: a sentence that says where the records are.
    """
    keys = dict.fromkeys(group(record) for record in records)
    return [table([record for record in records if group(record) == key], base, source) for key in keys]


def group(record: dict[str, Any]) -> tuple[Any, ...]:
    """What records of one table share: model, sequence, clipping, device."""
    return record.get("model"), record.get("sequence"), record.get("clip"), record.get("device")


def table(records: list[dict[str, Any]], base: str, source: str) -> str:
    """The table of one group."""
    first = records[0]
    clip = first.get("clip")
    clipping = "not recorded" if clip is None else clip or "off"
    lines = [
        f"### {first.get('model', 'unnamed')}, sequence {first.get('sequence', 'not recorded')}, clipping {clipping}",
        "",
        " ".join(part for part in (_facts(records), source) if part),
        "",
        line(COLUMNS),
        line(["---"] * len(COLUMNS)),
    ]
    rows = sorted(records, key=lambda record: (record["batch"], record["label"]))
    return "\n".join([*lines, *(line(_row(record, records, base)) for record in rows), ""])


def line(cells: Iterable[str]) -> str:
    """A row of Markdown."""
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


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


def _row(record: dict[str, Any], records: list[dict[str, Any]], base: str) -> list[str]:
    head = [_label(record), str(record["batch"])]
    if record["status"] != "ok":
        reason = " ".join(str(record.get("reason", "")).split())[:120]
        failure = f"**{record['status']}**" + (f": {reason}" if reason else "")
        return [*head, failure, *[""] * (len(COLUMNS) - len(head) - 1)]
    peers = [other for other in records if other["batch"] == record["batch"] and other["status"] == "ok"]
    agreement = describe(record, choose_reference(peers))
    median = f" ({record['step_s_median']:.3f})" if "step_s_median" in record else ""
    few = "" if record["steps"] >= ENOUGH_STEPS else f" (fewer than {ENOUGH_STEPS}: no claim)"
    host = record["host_peak_bytes"]
    return [
        *head,
        f"{record['steps']} after {record['warmup']}{few}",
        f"{record['step_s']:.3f}{median}",
        f"{record['tokens_per_s']:.0f}",
        f"{record['model_tflops']:.0f}",
        _speedup(record, peers, base),
        _ceiling(record, peers),
        f"{host / 2**30:.1f} ({host / record['num_parameters']:.1f})",
        f"{record['device_peak_bytes'] / 2**30:.1f}",
        f"**{agreement}**" if _is_void(agreement) else agreement,
    ]


def _label(record: dict[str, Any]) -> str:
    options = record.get("options") or {}
    said = ", ".join(f"{name}: {json.dumps(value)}" for name, value in options.items())
    system = "" if record["label"] == record["system"] else f"{record['system']}, "
    told = f"{system}{said}".removesuffix(", ")
    return f"{record['label']} ({told})" if told else record["label"]


def _speedup(record: dict[str, Any], peers: list[dict[str, Any]], base: str) -> str:
    against = next((other for other in peers if other["label"] == base), None)
    if against is None:
        return ""
    reference = choose_reference(peers)
    if any(_is_void(describe(side, reference)) for side in (record, against)):
        return "void"
    return f"{against['step_s'] / record['step_s']:.2f}"


def _ceiling(record: dict[str, Any], peers: list[dict[str, Any]]) -> str:
    """Share of the resident system's speed, compiled if this one is; "" without one."""
    compiled = _is_compiled(record)
    top = next((r for r in peers if r["system"] == "resident" and _is_compiled(r) == compiled), None)
    return f"{top['step_s'] / record['step_s']:.0%}" if top else ""


def _is_compiled(record: dict[str, Any]) -> bool:
    return bool((record.get("options") or {}).get("compile"))


def _is_void(agreement: str) -> bool:
    return agreement.endswith("void")
