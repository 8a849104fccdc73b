"""What limited a step: its spans, reduced to a few numbers and one line.

Every moment of a step is given to one cause: a block computed; otherwise, the host waited for something it names; else
weights were on their way, or gradients; else host updates ran alone; else none of these, which is work outside the
blocks (embeddings, head, loss, the script's own).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

Span = tuple[str, str, float, float]
"""Track, name, start, end (seconds on one clock)."""

# In this order: the first track that is busy names the cause.
CAUSES = {
    "compute": "compute in blocks",
    "wait": "host waits",
    "h2d": "weights on their way (h2d)",
    "d2h": "gradients on their way (d2h)",
    "update": "host updates alone",
}
OUTSIDE = "work outside the blocks"
_NAMED_WAITS = 2


@dataclass(frozen=True)
class StepSummary:
    """One optimizer step.

    Attributes:
        step: optimizer steps before it.
        seconds: from the end of the step before to its own end, on the host.
        busy_s: seconds in which a track was busy, spans that overlap counted once.
        waits_s: seconds per named wait.
        causes_s: seconds per cause (the values of `CAUSES`, and `OUTSIDE`); their sum is `seconds`.
    """

    step: int
    seconds: float
    busy_s: dict[str, float]
    waits_s: dict[str, float]
    causes_s: dict[str, float]

    @property
    def limited_by(self) -> str:
        """The cause that took most of the step."""
        return max(self.causes_s, key=lambda cause: self.causes_s[cause])

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "limited_by": self.limited_by}

    def line(self) -> str:
        """One line for a log."""
        shares = sorted(self.causes_s.items(), key=lambda item: -item[1])
        text = ", ".join(f"{cause} {seconds / self.seconds:.0%}" for cause, seconds in shares if seconds > 0.0)
        waits = Counter(self.waits_s).most_common(_NAMED_WAITS)
        named = "; waited for " + ", ".join(f"{name} {seconds * 1e3:.0f} ms" for name, seconds in waits)
        return f"step {self.step}: {self.seconds * 1e3:.0f} ms, limited by {text}{named if waits else ''}"


def summarize(spans: Sequence[Span], marks: Sequence[float], *, first_step: int = 0) -> list[StepSummary]:
    """Reduce spans to steps.

    Args:
        spans: in any order; they may overlap.
        marks: ends of steps, the beginning of the first one before them; rising.
        first_step: number of the first step.

    Returns:
        A summary for every pair of marks.
    """
    return [
        _summarize_step(spans, begin, end, first_step + index)
        for index, (begin, end) in enumerate(zip(marks, marks[1:], strict=False))
    ]


def _summarize_step(spans: Sequence[Span], begin: float, end: float, step: int) -> StepSummary:
    changes: list[tuple[float, str, int]] = []
    waits: Counter[str] = Counter()
    for track, name, start, stop in spans:
        start, stop = max(start, begin), min(stop, end)
        if stop > start:
            changes += [(start, track, 1), (stop, track, -1)]
            if track == "wait":
                waits[name] += stop - start  # type: ignore[assignment]
    running: Counter[str] = Counter()
    busy = dict.fromkeys(CAUSES, 0.0)
    causes = dict.fromkeys([*CAUSES.values(), OUTSIDE], 0.0)
    now = begin
    for moment, track, change in [*sorted(changes), (end, "", 0)]:
        active = [track for track in CAUSES if running[track] > 0]
        for found in active:
            busy[found] += moment - now
        causes[CAUSES[active[0]] if active else OUTSIDE] += moment - now
        running[track] += change
        now = moment
    return StepSummary(step, end - begin, busy, dict(waits), causes)
