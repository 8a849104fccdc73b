"""One background thread that runs tasks in order.

Its first error stops it: later tasks are dropped, and every caller that waits or submits gets that error, with its
traceback, instead of waiting for ever. It stops by sentinel.
"""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

from megatrain_ds.errors import StateError, add_note

if TYPE_CHECKING:
    from collections.abc import Callable


class Worker:
    """Runs tasks first in, first out.

    Args:
        name: thread name.
    """

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[int, Callable[[], None], str] | None] = queue.SimpleQueue()
        self._progress = threading.Condition()
        self._submitted = 0
        self._completed = 0
        self._error: BaseException | None = None
        self._raised = False
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], None], label: str) -> int:
        """Queue a task.

        Args:
            task: called on the worker's thread.
            label: what it is for; added to its error as a note.

        Returns:
            Its ticket, a count from 1 for `wait`.

        Raises:
            StateError: the worker was stopped; nothing would ever run the task.
            BaseException: the first error of any task, as it was raised.
        """
        self._raise_error()
        if self._stopped:
            raise StateError(f"submit of {label}", ("running",), "stopped", "Finish the step before destroy()")
        self._submitted += 1
        self._tasks.put((self._submitted, task, label))
        return self._submitted

    def done(self, ticket: int) -> bool:
        """Whether the task with this ticket, and so every earlier one, has run."""
        return self._completed >= ticket

    def wait(self, ticket: int) -> None:
        """Block until the task with this ticket has run.

        Raises:
            BaseException: the first error of any task, as it was raised.
        """
        if self._completed < ticket:
            with self._progress:
                self._progress.wait_for(lambda: self._completed >= ticket or self._error is not None)
        self._raise_error()

    def wait_all(self) -> None:
        """Block until every submitted task has run; raises as `wait`."""
        self.wait(self._submitted)

    def stop(self) -> BaseException | None:
        """Finish what is queued and end the thread; idempotent. Never raises.

        Returns:
            The first error of any task, if no caller has got it.
        """
        self._stopped = True
        if self._thread.is_alive():
            self._tasks.put(None)
            self._thread.join()
        error, self._raised = None if self._raised else self._error, True
        return error

    def _raise_error(self) -> None:
        if self._error is not None:
            self._raised = True
            raise self._error

    def _run(self) -> None:
        while (item := self._tasks.get()) is not None:
            ticket, task, label = item
            if self._error is None:
                try:
                    task()
                except BaseException as error:  # noqa: BLE001 - raised again in every caller
                    add_note(error, f"megatrain: raised in the host worker during {label}")
                    with self._progress:
                        self._error = error
                        self._progress.notify_all()
                    continue
            with self._progress:
                if self._error is None:
                    self._completed = ticket
                self._progress.notify_all()
