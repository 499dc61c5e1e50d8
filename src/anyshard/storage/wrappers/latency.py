"""Latency: every call of a verb takes a given time longer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from anyshard.storage.protocol import Store
from anyshard.storage.wrappers.forward import Call, Verb, WrapperStore

T = TypeVar("T")


class LatencyStore(WrapperStore):
    """A store that sleeps `seconds[verb]` before each call of that verb; tests give a `sleep` that only records."""

    def __init__(self, inner: Store, seconds: Mapping[Verb, float], *, sleep: Callable[[float], object] = time.sleep) -> None:
        super().__init__(inner)
        self._seconds = dict(seconds)
        self._sleep = sleep

    def around(self, call: Call, run: Callable[[], T]) -> T:
        """Sleep, then do the call."""
        seconds = self._seconds.get(call.verb, 0.0)
        if seconds > 0:
            self._sleep(seconds)
        return run()
