"""The recorded order: three iterations in full, repeats, dropped graphs, wrong records."""

from __future__ import annotations

import gc

from megatrain_ds.runtime.schedule import Schedule


class Call:
    """Stands for a run of a unit's forward; the schedule keeps it weakly."""


def iterate(schedule: Schedule, order: list[int], ahead: int = 1) -> list[tuple[str, int, list[int]]]:
    """One forward and backward; what was said to come next after each start."""
    schedule.begin_forward()
    said = [("begin", -1, schedule.first_forward(ahead))]
    calls = []
    for unit in order:
        calls.append((unit, Call()))
        schedule.observe_forward(unit, calls[-1][1])
        said.append(("forward", unit, schedule.next_forward(ahead)))
    for unit, call in reversed(calls):
        schedule.observe_backward(call)
        said.append(("backward", unit, schedule.next_backward(ahead)))
    return said


def test_three_iterations():
    schedule = Schedule()
    backward = [("backward", 2, [1]), ("backward", 1, [0]), ("backward", 0, [0])]
    # Nothing is recorded yet: the guess is the backward of what ran, the last unit first.
    assert iterate(schedule, [0, 1, 2]) == [
        ("begin", -1, []),
        ("forward", 0, [0]),
        ("forward", 1, [1]),
        ("forward", 2, [2]),
        *backward,
    ]
    for _ in range(2):
        assert iterate(schedule, [0, 1, 2]) == [
            ("begin", -1, [0]),
            ("forward", 0, [1]),
            ("forward", 1, [2]),
            ("forward", 2, [2]),  # the last forward is the first backward
            *backward,
        ]


def test_depth_two_reaches_over_both_turns():
    schedule = Schedule()
    iterate(schedule, [0, 1, 2], ahead=2)
    said = iterate(schedule, [0, 1, 2], ahead=2)
    # While unit 1 runs, unit 2 is next; then, of the backwards known to come, that of unit 1 is the first.
    assert [ahead for _, _, ahead in said] == [[0, 1], [1, 2], [2, 1], [2, 1], [1, 0], [0, 0], [0, 1]]


def test_a_unit_that_runs_twice_is_recorded_twice():
    schedule = Schedule()
    iterate(schedule, [0, 1, 0, 2])
    said = iterate(schedule, [0, 1, 0, 2])
    assert [ahead for _, _, ahead in said] == [[0], [1], [0], [2], [2], [0], [1], [0], [0]]
    assert schedule.order == [0, 1, 0, 2]


def test_a_skipped_unit_and_another_order_move_the_cursor():
    schedule = Schedule()
    iterate(schedule, [0, 1, 2, 3])
    schedule.begin_forward()
    keep = []
    said = []
    for unit in [0, 2, 1, 3]:
        keep.append(Call())
        schedule.observe_forward(unit, keep[-1])
        said.append(schedule.next_forward(1))
    assert said == [[1], [3], [2], [3]]
    schedule.begin_forward()
    assert schedule.first_forward(4) == [0, 2, 1, 3]


def test_an_unknown_unit_keeps_the_place():
    schedule = Schedule()
    iterate(schedule, [0, 1, 2])
    schedule.begin_forward()
    schedule.observe_forward(0, None)
    schedule.observe_forward(9, None)
    assert schedule.next_forward(1) == [1]


def test_a_forward_without_backward_expects_none():
    schedule = Schedule()
    for _ in range(2):
        schedule.begin_forward()
        for unit in [0, 1]:
            schedule.observe_forward(unit, None)
    assert schedule.next_forward(2) == []
    # What comes after it is the next forward.
    assert schedule.next_backward(2) == [0, 1]


def test_a_dropped_graph_is_forgotten():
    schedule = Schedule()
    schedule.begin_forward()
    calls = [Call(), Call()]
    for unit, call in enumerate(calls):
        schedule.observe_forward(unit, call)
    assert [schedule.pending(0), schedule.pending(1)] == [True, True]
    del call
    calls.pop()
    gc.collect()
    assert [schedule.pending(0), schedule.pending(1)] == [True, False]
    schedule.begin_forward()
    assert schedule.next_backward(2) == [0, 0]  # the live call, then the forward under way (as recorded)
    calls.clear()
    gc.collect()
    schedule.begin_forward()
    assert schedule.next_backward(2) == [0, 1]


def test_backward_in_another_order_takes_the_right_call():
    schedule = Schedule()
    schedule.begin_forward()
    calls = [Call() for _ in range(3)]
    for unit, call in enumerate(calls):
        schedule.observe_forward(unit, call)
    schedule.observe_backward(calls[0])
    assert schedule.next_backward(2) == [2, 1]
    assert [schedule.pending(unit) for unit in range(3)] == [False, True, True]
    schedule.observe_backward(calls[0])
    assert schedule.next_backward(2) == [2, 1]


def test_an_empty_forward_keeps_the_record():
    schedule = Schedule()
    iterate(schedule, [0, 1])
    schedule.begin_forward()
    schedule.begin_forward()
    assert schedule.order == [0, 1]
