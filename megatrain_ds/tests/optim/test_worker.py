"""The background worker: order, tickets, and an error that reaches every later call instead of hanging it."""

from __future__ import annotations

import sys
import threading
import time
import traceback

import pytest

from megatrain_ds.errors import StateError
from megatrain_ds.optim.worker import Worker


@pytest.fixture
def worker():
    made = Worker("megatrain-test")
    yield made
    made.stop()


def fail() -> None:
    raise FloatingPointError("lost a bit")


def test_tasks_run_in_order_on_the_named_thread(worker):
    seen = []
    for value in range(5):
        worker.submit(lambda value=value: seen.append((value, threading.current_thread().name)), "x")
    worker.wait_all()
    assert seen == [(value, "megatrain-test") for value in range(5)]


def test_a_ticket_is_done_when_its_task_and_all_before_have_run(worker):
    gate = threading.Event()
    first = worker.submit(lambda: None, "first")
    second = worker.submit(gate.wait, "second")
    third = worker.submit(lambda: None, "third")
    worker.wait(first)
    assert [first, second, third] == [1, 2, 3]
    assert [worker.done(ticket) for ticket in (0, first, second, third)] == [True, True, False, False]
    gate.set()
    worker.wait(third)
    assert worker.done(third)


def test_waiting_for_nothing_returns(worker):
    worker.wait(0)
    worker.wait_all()


def test_an_error_is_raised_at_every_later_call_with_traceback_and_note(worker):
    ticket = worker.submit(fail, "the optimizer step of layers.3")
    for call in (
        lambda: worker.wait(ticket),
        worker.wait_all,
        lambda: worker.submit(fail, "x"),
        lambda: worker.wait(0),
    ):
        with pytest.raises(FloatingPointError, match="lost a bit") as caught:
            call()
        assert "in fail" in "".join(traceback.format_exception(caught.value))
        if sys.version_info >= (3, 11):  # before, errors carry no notes
            assert caught.value.__notes__ == [
                "megatrain: raised in the host worker during the optimizer step of layers.3"
            ]


def test_tasks_after_an_error_are_dropped_and_their_waiters_woken(worker):
    gate, ran = threading.Event(), []

    def fail_late() -> None:
        gate.wait()
        fail()

    worker.submit(fail_late, "x")
    later = worker.submit(lambda: ran.append(1), "later")
    threading.Timer(0.05, gate.set).start()
    start = time.perf_counter()
    with pytest.raises(FloatingPointError):
        worker.wait(later)
    assert time.perf_counter() - start < 5.0
    assert not worker.done(later)
    worker.stop()
    assert ran == []


def test_stop_finishes_what_is_queued_ends_the_thread_and_can_be_repeated():
    worker = Worker("megatrain-stop")
    seen = []
    for value in range(3):
        worker.submit(lambda value=value: (time.sleep(0.01), seen.append(value)), "x")
    worker.stop()
    worker.stop()
    assert seen == [0, 1, 2]
    assert "megatrain-stop" not in {thread.name for thread in threading.enumerate()}
    worker.wait_all()


def test_stop_after_an_error_ends_the_thread_and_does_not_raise():
    worker = Worker("megatrain-stop")
    worker.submit(fail, "x")
    worker.submit(lambda: None, "y")
    worker.stop()
    assert "megatrain-stop" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(FloatingPointError):
        worker.wait_all()


def test_a_task_for_a_stopped_worker_is_refused(worker):
    worker.stop()
    with pytest.raises(StateError, match="submit of late work: allowed from running, but the state is stopped"):
        worker.submit(lambda: None, "late work")
