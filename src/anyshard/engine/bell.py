"""A bell: wakes threads that wait for something to change.

Instead of `threading.Condition`, which an interrupt (Ctrl-C in the main thread) can leave half done: with its lock held for
ever, or released twice. Here every step is a single C call. For the same reason the engine enters plain locks only.
"""

from __future__ import annotations

from contextlib import suppress
from queue import Empty, SimpleQueue

_MAX_RINGS = 256  # that nobody heard yet: more would only wake threads in vain


class Bell:
    """Each `ring` ends one `wait`, now or later; a waiter looks again for itself, for it may have been woken in vain."""

    def __init__(self) -> None:
        self._rings: SimpleQueue[None] = SimpleQueue()

    def ring(self) -> None:
        """Wake one waiter, or the next one to come."""
        if self._rings.qsize() < _MAX_RINGS:
            self._rings.put(None)

    def wait(self, timeout_s: float | None) -> None:
        """Return at the next ring, or after `timeout_s`."""
        with suppress(Empty):
            self._rings.get(timeout=timeout_s)
