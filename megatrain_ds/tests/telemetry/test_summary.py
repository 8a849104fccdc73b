"""What limited a step: every moment has one cause, waits are named, spans are cut at the ends of a step."""

from __future__ import annotations

import pytest

from megatrain_ds.telemetry.summary import CAUSES, OUTSIDE, StepSummary, summarize


def only(spans: list[tuple[str, str, float, float]], end: float = 10.0) -> StepSummary:
    (step,) = summarize(spans, [0.0, end])
    return step


@pytest.mark.parametrize("track", list(CAUSES))
def test_a_track_that_is_busy_alone_is_the_cause(track):
    step = only([(track, "x", 1.0, 8.0)])
    assert step.causes_s[CAUSES[track]] == pytest.approx(7.0)
    assert step.causes_s[OUTSIDE] == pytest.approx(3.0)
    assert step.limited_by == CAUSES[track]
    assert step.busy_s[track] == pytest.approx(7.0)


def test_nothing_recorded_is_work_outside_the_blocks():
    assert only([]).limited_by == OUTSIDE


def test_compute_hides_everything_and_copies_hide_updates():
    step = only([("compute", "f", 0.0, 4.0), ("h2d", "w", 2.0, 6.0), ("update", "u", 0.0, 9.0)])
    causes = [step.causes_s[CAUSES[track]] for track in ("compute", "h2d", "update")]
    assert causes == pytest.approx([4.0, 2.0, 3.0])
    assert sum(step.causes_s.values()) == pytest.approx(step.seconds)


def test_spans_that_overlap_on_one_track_count_once():
    step = only([("compute", "outer", 0.0, 6.0), ("compute", "inner", 1.0, 2.0), ("compute", "late", 5.0, 7.0)])
    assert step.busy_s["compute"] == pytest.approx(7.0)


def test_spans_belong_to_the_steps_they_lie_in():
    first, second = summarize([("update", "u", 1.0, 5.0)], [0.0, 3.0, 7.0], first_step=4)
    assert (first.step, second.step) == (4, 5)
    assert (first.busy_s["update"], second.busy_s["update"]) == pytest.approx((2.0, 2.0))
    assert second.seconds == pytest.approx(4.0)


def test_waits_are_named_longest_first():
    waits = [("wait", "update of a", 0.0, 1.0), ("wait", "update of b", 2.0, 5.0), ("wait", "update of a", 6.0, 6.5)]
    step = only(waits)
    assert step.waits_s == pytest.approx({"update of a": 1.5, "update of b": 3.0})
    line = step.line()
    assert "waited for update of b 3000 ms, update of a 1500 ms" in line
    assert "step 0: 10000 ms, limited by work outside the blocks 55%, host waits 45%" in line
    assert CAUSES["compute"] not in line
    assert "waited" not in only([]).line()


def test_it_survives_json():
    step = only([("h2d", "w", 0.0, 9.0)])
    assert step.as_dict()["limited_by"] == CAUSES["h2d"]
    assert step.as_dict()["seconds"] == step.seconds
