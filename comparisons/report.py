"""Tables from records."""

from __future__ import annotations

import json
from typing import Any

from comparisons.losses import NUM_COMPARED, RELATIVE_TOLERANCE, choose_reference, describe

ENOUGH_STEPS = 5
COLUMNS = (
    "| system | batch | s/step (median) | tokens/s | TFLOP/s | x of {base} | of the ceiling | host GiB (B/param) "
    "| device GiB | losses | commit, date |"
)


def markdown(records: list[dict[str, Any]], base: str = "zero3") -> str:
    """A table per model, a row per record, with hardware and versions above it.

    Args:
        records: what the children wrote, failures included.
        base: label of the system that ratios are taken against, within the same model, batch, clipping and machine.
    """
    parts = []
    for key in dict.fromkeys(group(record) for record in records):
        parts.append(_table([record for record in records if group(record) == key], base))
    return "\n".join(parts)


def group(record: dict[str, Any]) -> tuple[Any, ...]:
    """What records of one table share: model, sequence, clipping, device."""
    return record.get("model"), record.get("sequence"), record.get("clip"), record.get("device")


def _table(records: list[dict[str, Any]], base: str) -> str:
    done = [record for record in records if record["status"] == "ok"]
    lines = []
    if done:
        first = done[0]
        versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
        lines += [
            f"### {first['model']}, sequence {first['sequence']}, clipping {first['clip'] or 'off'}",
            "",
            f"{first['device']}, {first['cores']} cores; {versions}. "
            f"{first['num_parameters'] / 1e9:.3f} B parameters; {first['steps']} timed steps after {first['warmup']}; "
            "s/step, and with it every ratio, is the mean of the timed steps with nothing left to do at the end; the "
            "median of the steps is beside it. The ceiling is the system 'resident', compiled for systems that are: no "
            "offload and no optimizer. TFLOP/s = 6 x parameters x tokens / time. Memory is the peak of the "
            f"process. Losses: of the first {NUM_COMPARED}, relative difference at most {RELATIVE_TOLERANCE:.1e}.",
            *_options(records),
            "",
        ]
    lines += [COLUMNS.format(base=base), "| --- " * COLUMNS.count(" |") + "|"]
    for record in sorted(records, key=lambda record: (record["batch"], record["label"])):
        lines.append(_row(record, records, base))
    return "\n".join(lines) + "\n"


def _options(records: list[dict[str, Any]]) -> list[str]:
    """What the labels stand for, where they say more than a system's name."""
    told = {r["label"]: (r["system"], r.get("options") or {}) for r in records}
    return [
        f"{label}: {system}" + (f" with {json.dumps(options)}" if options else "") + "."
        for label, (system, options) in sorted(told.items())
        if options or label != system
    ]


def _ceiling(record: dict[str, Any], same_batch: list[dict[str, Any]]) -> str:
    """Share of the resident system's speed, compiled if this one is; "" without one."""
    compiled = _is_compiled(record)
    top = next((r for r in same_batch if r["system"] == "resident" and _is_compiled(r) == compiled), None)
    return f"{top['step_s'] / record['step_s']:.0%}" if top else ""


def _is_compiled(record: dict[str, Any]) -> bool:
    return bool((record.get("options") or {}).get("compile"))


def _row(record: dict[str, Any], records: list[dict[str, Any]], base: str) -> str:
    if record["status"] != "ok":
        reason = str(record.get("reason", "")).replace("|", "/")[:120]
        failure = f"{record['status']}: {reason}"
        return f"| {record['label']} | {record['batch']} | {failure} | | | | | | | | {_origin(record)} |"
    same_batch = [other for other in records if other["batch"] == record["batch"] and other["status"] == "ok"]
    against = next((other for other in same_batch if other["label"] == base), None)
    ratio = f"{against['step_s'] / record['step_s']:.2f}" if against else ""
    host = record["host_peak_bytes"]
    label = record["label"] + (" (fewer than 5 steps timed)" if record["steps"] < ENOUGH_STEPS else "")
    return (
        f"| {label} | {record['batch']} | {record['step_s']:.3f} ({record['step_s_median']:.3f}) "
        f"| {record['tokens_per_s']:.0f} | {record['model_tflops']:.0f} | {ratio} "
        f"| {_ceiling(record, same_batch)} "
        f"| {host / 2**30:.1f} ({host / record['num_parameters']:.1f}) "
        f"| {record['device_peak_bytes'] / 2**30:.1f} | {describe(record, choose_reference(same_batch))} "
        f"| {_origin(record)} |"
    )


def _origin(record: dict[str, Any]) -> str:
    return f"{record.get('commit') or '?'}, {str(record.get('date') or '?')[:10]}"
