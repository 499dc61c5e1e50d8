"""Counting: what was asked of a store, how many bytes moved, how many calls ran at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from anyshard.storage.protocol import Store
from anyshard.storage.wrappers.forward import Call, Verb, WrapperStore

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Count:
    """Calls of one verb: begun, bytes of those that succeeded, running now, most that ever ran at once."""

    calls: int = 0
    nbytes: int = 0
    in_flight: int = 0
    max_in_flight: int = 0


class CountingStore(WrapperStore):
    """A store that counts per verb; `count` may be asked at any time."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._counts = dict.fromkeys(Verb, Count())
        self._lock = threading.Lock()

    def count(self, verb: Verb) -> Count:
        """The counts of one verb now."""
        with self._lock:
            return self._counts[verb]

    def around(self, call: Call, run: Callable[[], T]) -> T:
        """Count the call while it runs and its bytes once it succeeded."""
        self._begin(call.verb)
        nbytes = 0
        try:
            result = run()
            nbytes = len(result) if isinstance(result, bytes) else call.nbytes
            return result
        finally:
            self._end(call.verb, nbytes)

    def _begin(self, verb: Verb) -> None:
        with self._lock:
            count = self._counts[verb]
            running = count.in_flight + 1
            most = max(count.max_in_flight, running)
            self._counts[verb] = replace(count, calls=count.calls + 1, in_flight=running, max_in_flight=most)

    def _end(self, verb: Verb, nbytes: int) -> None:
        with self._lock:
            count = self._counts[verb]
            self._counts[verb] = replace(count, nbytes=count.nbytes + nbytes, in_flight=count.in_flight - 1)
