"""Draws loss curves above their distances to one of them; knows nothing about what was trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def draw(
    path: Path,
    *,
    reference: tuple[str, Sequence[float]],
    curve: tuple[str, Sequence[float]],
    gaps: Mapping[str, Sequence[float]],
    ylabel: str,
    gap_label: str,
) -> None:
    """Draw both curves and, below, the distances on a logarithmic scale; write a PNG to `path`.

    Args:
        path: The file.
        reference: Label and losses, one a step; drawn broad.
        curve: Label and losses to compare with it.
        gaps: Label -> distance from the reference at each step.
        ylabel: What the losses are.
        gap_label: What the distances are.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, gap) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 6), height_ratios=(2, 1))
    for (label, losses), style in ((reference, {"linewidth": 3, "alpha": 0.5}), (curve, {"linewidth": 1})):
        curves.plot(range(1, len(losses) + 1), losses, label=label, **style)
    curves.set_ylabel(ylabel)
    curves.legend()
    for label, distances in gaps.items():
        gap.plot(range(1, len(distances) + 1), distances, label=label)
    gap.set_yscale("symlog", linthresh=1e-7)
    gap.set_ylabel(gap_label)
    gap.set_xlabel("step")
    gap.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
