"""Steps that saves of this process are at, which retention leaves alone; and those that retention is at: saves wait for it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import final

from anyshard.engine.bell import Bell
from anyshard.errors import StillPending

_POLL_S = 0.1


@final
class BusySteps(AbstractSet[int]):
    """The steps that are claimed now, as a set. Saves claim on any thread, passes of retention hold steps, several at once."""

    def __init__(self) -> None:
        self._claims: Counter[int] = Counter()
        self._held: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._bell = Bell()

    def __contains__(self, step: object) -> bool:
        return step in self._snapshot()

    def __iter__(self) -> Iterator[int]:
        return iter(self._snapshot())

    def __len__(self) -> int:
        return len(self._snapshot())

    def claim(self, step: int, timeout_s: float) -> None:
        """Keep retention from a step until `release`; a save calls it before it begins. Every claim has a release of its own.

        Waits while retention is at this very step, whose next generation it takes. Raises `StillPending` if that takes longer
        than `timeout_s`; then nothing is claimed.
        """
        deadline = time.monotonic() + timeout_s
        while not self._try_claim(step):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise StillPending(
                    f"step {step}: expected retention to have deleted or thinned what was there within {timeout_s:g} s, found it "
                    "at it still. Check that the storage answers, then save again"
                )
            self._bell.wait(min(left_s, _POLL_S))

    def release(self, step: int) -> None:
        """Give a claim back, once the save has ended."""
        with self._lock:
            self._claims[step] -= 1
            if self._claims[step] <= 0:
                del self._claims[step]

    @contextmanager
    def holding(self, step: int) -> Iterator[bool]:
        """For retention: keep saves from a step during the body; false if the step is claimed, and must be left alone."""
        with self._lock:
            is_free = not self._claims[step]
            if is_free:
                self._held[step] += 1
        try:
            yield is_free
        finally:
            if is_free:
                with self._lock:
                    self._held[step] -= 1
                self._bell.ring()

    def _try_claim(self, step: int) -> bool:
        with self._lock:
            if self._held[step]:
                return False
            self._claims[step] += 1
            return True

    def _snapshot(self) -> frozenset[int]:
        with self._lock:
            return frozenset(step for step, num in self._claims.items() if num > 0)
