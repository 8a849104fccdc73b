"""Ends a program from the inside, in the middle of a training step, as if it had ended by itself.

[Note: Why not SystemExit] An exception runs the user's `finally` and `except` blocks, which save models over the ones
that are there, push them, or swallow it; in a thread it ends that thread alone; Trainer and launchers print it. So the
process ends here, and no line of the script after the step runs. What a normal end runs outside the script does run:
exit handlers (temporary folders, trackers), the end of the process group, and the flush of the output.
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
"""Seconds after which the process ends even if an exit handler hangs."""


def end_process(limit_s: float = LIMIT_S) -> NoReturn:
    """End this process with status 0, from any thread, within `limit_s` seconds."""
    watchdog = threading.Timer(limit_s, os._exit, (0,))
    watchdog.daemon = True
    watchdog.start()
    try:
        _ignore_ended_children()
        atexit._run_exitfuncs()
        _destroy_process_group()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(0)


def _ignore_ended_children() -> None:
    # Exit handlers end the workers of data loaders; PyTorch's handler of that signal raises for a worker it did not
    # expect to end. Only the main thread may change it.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _destroy_process_group() -> None:
    """After the exit handlers, one of which may do the same. Every rank comes here after the same step."""
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        with contextlib.suppress(RuntimeError, ValueError):
            torch.distributed.destroy_process_group()
