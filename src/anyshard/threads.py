"""Starting threads when the interpreter is about to end, which from Python 3.12 on starts none: exit handlers may save, too."""

from __future__ import annotations

import threading

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
