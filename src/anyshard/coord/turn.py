"""Turns: the ranks of a group agree on one thing at a time, so the threads of a process use it one after the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from anyshard.errors import OperationFailed


class Turn:
    """Lets one operation of a group go on in this process; others wait for their turn, up to a time."""

    def __init__(self) -> None:
        # Reentrant: a signal handler may run at any moment of the thread that it interrupts, in `take` too.
        self._lock = threading.RLock()
        self._holder: str | None = None
        self._thread = 0  # of the holder

    @property
    def is_free(self) -> bool:
        """Whether nobody holds the turn, as far as can be said of other threads."""
        return self._holder is None

    @contextmanager
    def take(self, what: str, timeout_s: float) -> Iterator[None]:
        """Hold the turn for `what`, a call in words. Raises `OperationFailed` after `timeout_s`, and at once within another."""
        if not self._lock.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX)):
            raise OperationFailed(
                f"{what}: expected the turn of its group within {timeout_s:g} s, found another thread still in {self._holder}. "
                "Ranks agree on one thing at a time: let that one return, or allow more time with timeout_s",
                {},
            )
        try:
            self.check_outside(what)
            self._holder, self._thread = what, threading.get_ident()
            try:
                yield
            finally:
                self._holder = None
        finally:
            self._lock.release()

    def check_outside(self, what: str) -> None:
        """Raise `OperationFailed` if this thread holds the turn: `what` would wait for what it was called from."""
        holder = self._holder
        if holder is not None and self._thread == threading.get_ident():
            raise OperationFailed(
                f"{what}: expected to be called when the group is free, found this thread in {holder}, from within which it was "
                "called (by a signal handler, a state_dict, a sink). Do it when that one has returned: a signal handler sets a "
                "flag, and the training loop saves",
                {},
            )
