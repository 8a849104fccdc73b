"""Ends a program from the inside, in the middle of a training step, as if it had ended by itself.

[Note: Why not SystemExit] An exception runs the user's `finally` and `except` blocks, which save models over the ones
that are there, push them, or swallow it; in a thread it ends that thread alone; Trainer and launchers print it. So the
process ends here, and no line of the script after the step runs. What a normal end runs outside the script does run:
threads that are at work finish (a checkpoint written in the background is then whole), exit handlers (temporary
folders, trackers), the end of the process group, and the flush of the output.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from typing import NoReturn

LIMIT_S = 60.0
"""Seconds after which the process ends even if a thread or an exit handler hangs."""


def end_process(limit_s: float = LIMIT_S) -> NoReturn:
    """End this process with status 0, from any thread, within `limit_s` seconds."""
    watchdog = threading.Timer(limit_s, os._exit, (0,))
    watchdog.daemon = True
    watchdog.start()
    phases = (
        _ignore_ended_children,
        _wait_for_threads,
        atexit._run_exitfuncs,
        _destroy_process_group,
        sys.stdout.flush,
        sys.stderr.flush,
    )
    try:
        for phase in phases:
            # As at a normal end, one that fails keeps none of the others from running.
            with contextlib.suppress(Exception):
                phase()
    finally:
        os._exit(0)


def _ignore_ended_children() -> None:
    # Exit handlers end the workers of data loaders; PyTorch's handler of that signal raises for a worker it did not
    # expect to end. Only the main thread may change it.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _wait_for_threads() -> None:
    """Tell executors that nothing more comes, and wait for every thread that a normal end waits for."""
    # Any other thread would wait for itself, and for the main thread, which has no reason to end.
    if threading.current_thread() is threading.main_thread():
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]


def _destroy_process_group() -> None:
    """After the exit handlers, one of which may do the same. Every rank comes here after the same step."""
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
