"""Draws a Chrome trace of the engine as a picture: `python -m comparisons.timeline TRACE.json PICTURE.png`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

Spans = dict[str, list[tuple[float, float]]]
COLOURS = {"compute": "#4c72b0", "h2d": "#55a868", "d2h": "#c44e52", "update": "#dd8452", "wait": "#999999"}


def read_spans(path: Path) -> Spans:
    """Spans per track of a trace, (start, length) in milliseconds."""
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    spans: Spans = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            spans[names[event["tid"]]].append((event["ts"] / 1e3, event["dur"] / 1e3))
    return spans


def draw(spans: Spans, picture: Path, title: str) -> None:
    """One row a track."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 2.6))
    tracks = [track for track in COLOURS if spans.get(track)]
    for row, track in enumerate(reversed(tracks)):
        axes.broken_barh(spans[track], (row - 0.4, 0.8), facecolors=COLOURS[track], edgecolor="white", linewidth=0.3)
    axes.set_yticks(range(len(tracks)), list(reversed(tracks)))
    axes.set(xlabel="ms", title=title)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


def main() -> None:
    """Read, draw."""
    parser = argparse.ArgumentParser(prog="python -m comparisons.timeline", description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--title", default="")
    arguments = parser.parse_args()
    draw(read_spans(arguments.trace), arguments.picture, arguments.title)


if __name__ == "__main__":
    main()
