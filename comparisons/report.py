"""Tables and plots from records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from comparisons.losses import check, choose_reference

COLUMNS = "| system | batch | s/step | tokens/s | TFLOP/s | x of {base} | host GiB (B/param) | device GiB | losses |"


def markdown(records: list[dict[str, Any]], base: str = "zero3") -> str:
    """A table per model, a row per record, with hardware and versions above it.

    Args:
        records: what the children wrote, failures included.
        base: label of the system that ratios are taken against, within the same model, batch, clipping and machine.
    """
    parts = []
    for key in dict.fromkeys(_group(record) for record in records):
        group = [record for record in records if _group(record) == key]
        parts.append(_table(group, base))
    return "\n".join(parts)


def _group(record: dict[str, Any]) -> tuple[Any, ...]:
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
            "TFLOP/s = 6 x parameters x tokens / time.",
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
    problem = check(record, choose_reference(same_batch))
    return (
        f"| {record['label']} | {record['batch']} | {record['step_s']:.3f} | {record['tokens_per_s']:.0f} "
        f"| {record['model_tflops']:.0f} | {ratio} | {host / 2**30:.1f} ({host / record['num_parameters']:.1f}) "
        f"| {record['device_peak_bytes'] / 2**30:.1f} | {problem or 'agree'} |"
    )


def plots(records: list[dict[str, Any]], folder: Path) -> list[Path]:
    """PNG files: throughput by batch, and memory.

    Returns:
        The files written; none where nothing succeeded.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    done = [record for record in records if record["status"] == "ok"]
    if not done:
        return []
    labels = list(dict.fromkeys(record["label"] for record in done))
    written = []
    for name, key, unit, scale in (
        ("throughput", "tokens_per_s", "tokens/s", 1.0),
        ("host_memory", "host_peak_bytes", "GiB, host peak", 2.0**-30),
        ("device_memory", "device_peak_bytes", "GiB, device peak", 2.0**-30),
    ):
        figure, axes = pyplot.subplots(figsize=(7, 4))
        for label in labels:
            points = sorted((r["batch"], r[key] * scale) for r in done if r["label"] == label)
            axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=label)
        axes.set(xlabel="sequences a step", ylabel=unit, ylim=(0, None), title=done[0]["model"])
        axes.legend()
        figure.tight_layout()
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=120)
        pyplot.close(figure)
        written.append(path)
    return written
