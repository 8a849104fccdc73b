"""Plots from records: throughput by batch, memory, and where the time of a step went."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from comparisons.report import group

if TYPE_CHECKING:
    from pathlib import Path

_LINES = (
    ("throughput", "tokens_per_s", "tokens/s", 1.0),
    ("host_memory", "host_peak_bytes", "GiB, host peak", 2.0**-30),
    ("device_memory", "device_peak_bytes", "GiB, device peak", 2.0**-30),
)


def plots(records: list[dict[str, Any]], folder: Path) -> list[Path]:
    """PNG files of every model and clipping in `folder`.

    Returns:
        The files written; none where nothing succeeded.
    """
    done = [record for record in records if record["status"] == "ok"]
    written = []
    for key in dict.fromkeys(group(record) for record in done):
        same = [record for record in done if group(record) == key]
        clip = f"clip{same[0]['clip']:g}" if same[0]["clip"] else "noclip"
        stem = f"{same[0]['model']}_{clip}"
        title = f"{same[0]['model']}, sequence {same[0]['sequence']}, clipping {same[0]['clip'] or 'off'}"
        for name, field, unit, scale in _LINES:
            written.append(_lines(same, field, unit, scale, title, folder / f"{stem}_{name}.png"))
        written.append(_breakdown(same, title, folder / f"{stem}_breakdown.png"))
    return written


def _figure(width: float = 7.0) -> tuple[Any, Any]:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(width, 4))


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _lines(records: list[dict[str, Any]], field: str, unit: str, scale: float, title: str, path: Path) -> Path:
    figure, axes = _figure()
    for label in dict.fromkeys(record["label"] for record in records):
        points = sorted((record["batch"], record[field] * scale) for record in records if record["label"] == label)
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=label)
    axes.set(xlabel="sequences a step", ylabel=unit, ylim=(0, None), title=title)
    axes.legend()
    return _save(figure, path)


def _breakdown(records: list[dict[str, Any]], title: str, path: Path) -> Path:
    # A bar a record: of a system that tells, its causes (of untimed, traced steps) scaled to the timed step.
    rows = sorted(records, key=lambda record: (record["batch"], record["label"]))
    names = [f"{record['label']}\nbatch {record['batch']}" for record in rows]
    parts = [causes(record) for record in rows]
    figure, axes = _figure(max(7.0, 1.2 * len(rows)))
    bottom = [0.0] * len(rows)
    for cause in dict.fromkeys(cause for part in parts for cause in part):
        heights = [part.get(cause, 0.0) for part in parts]
        axes.bar(names, heights, bottom=bottom, label=cause)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set(ylabel="s/step", title=title)
    axes.legend(fontsize="small")
    return _save(figure, path)


def causes(record: dict[str, Any]) -> dict[str, float]:
    """Seconds of the timed step per cause, from the shares in the traced steps; {"not told": all} without a trace."""
    steps = record.get("breakdown") or []
    total = sum(step["seconds"] for step in steps)
    if not total:
        return {"not told": record["step_s"]}
    found: dict[str, float] = {}
    for step in steps:
        for cause, seconds in step["causes_s"].items():
            found[cause] = found.get(cause, 0.0) + seconds / total * record["step_s"]
    return found
