"""Throttling: bytes flow no faster than a given rate."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from anyshard.storage.protocol import Store
from anyshard.storage.wrappers.forward import Call, WrapperStore

T = TypeVar("T")


class ThrottledStore(WrapperStore):
    """A store whose calls each move at most `nbytes_per_s`, as one connection would; calls in parallel add up."""

    def __init__(self, inner: Store, *, nbytes_per_s: float, sleep: Callable[[float], object] = time.sleep) -> None:
        super().__init__(inner)
        self._nbytes_per_s = nbytes_per_s
        self._sleep = sleep

    def around(self, call: Call, run: Callable[[], T]) -> T:
        """Do the call, then sleep for as long as its bytes would have taken."""
        result = run()
        nbytes = len(result) if isinstance(result, bytes) else call.nbytes
        if nbytes > 0:
            self._sleep(nbytes / self._nbytes_per_s)
        return result
