"""Tables from records."""

from __future__ import annotations

from typing import Any

from comparisons.losses import NUM_COMPARED, RELATIVE_TOLERANCE, choose_reference, describe

ENOUGH_STEPS = 5
COLUMNS = (
    "| system | batch | s/step (median) | tokens/s | TFLOP/s | x of {base} | host GiB (B/param) | device GiB | losses |"
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
            f"{first['device']}, {first['cores']} cores; {versions}; commit {first['commit']}; {first['date'][:10]}. "
            f"{first['num_parameters'] / 1e9:.3f} B parameters; {first['steps']} timed steps after {first['warmup']}; "
            "s/step, and with it every ratio, is the mean of the timed steps with nothing left to do at the end; the "
            "median of the steps is beside it. TFLOP/s = 6 x parameters x tokens / time. Memory is the peak of the "
            f"process. Losses: of the first {NUM_COMPARED}, relative difference at most {RELATIVE_TOLERANCE:.1e}.",
            "",
        ]
    lines += [COLUMNS.format(base=base), "| --- " * 9 + "|"]
    for record in sorted(records, key=lambda record: (record["batch"], record["label"])):
        lines.append(_row(record, records, base))
    return "\n".join(lines) + "\n"


def _row(record: dict[str, Any], records: list[dict[str, Any]], base: str) -> str:
    if record["status"] != "ok":
        reason = str(record.get("reason", "")).replace("|", "/")[:120]
        return f"| {record['label']} | {record['batch']} | {record['status']}: {reason} | | | | | | |"
    same_batch = [other for other in records if other["batch"] == record["batch"] and other["status"] == "ok"]
    against = next((other for other in same_batch if other["label"] == base), None)
    ratio = f"{against['step_s'] / record['step_s']:.2f}" if against else ""
    host = record["host_peak_bytes"]
    label = record["label"] + (" (fewer than 5 steps timed)" if record["steps"] < ENOUGH_STEPS else "")
    return (
        f"| {label} | {record['batch']} | {record['step_s']:.3f} ({record['step_s_median']:.3f}) "
        f"| {record['tokens_per_s']:.0f} | {record['model_tflops']:.0f} | {ratio} "
        f"| {host / 2**30:.1f} ({host / record['num_parameters']:.1f}) "
        f"| {record['device_peak_bytes'] / 2**30:.1f} | {describe(record, choose_reference(same_batch))} |"
    )
