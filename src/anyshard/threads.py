"""Threads: starting them when the interpreter is about to end, and keeping those of background saves from trainers' cores.

From Python 3.12 on an interpreter that is ending starts none: exit handlers may save, too.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress

_ENDING = "interpreter shutdown"  # in the message of Python's error, which has no other mark before 3.13


def start_thread(thread: threading.Thread) -> bool:
    """Start a thread; false if the interpreter is ending and starts none any more: whoever asks does the work itself.

    Raises `RuntimeError` if the system has no thread to give.
    """
    try:
        thread.start()
    except RuntimeError as error:
        if _ENDING not in str(error):
            raise
        return False
    return True


def yield_to_training() -> None:
    """From now on this thread, and those that it starts, take the core of no running thread when they wake up (Linux).

    Their share of the cores stays what it was: less of it might starve a thread that holds the interpreter's lock.
    """
    with suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
