"""Stores whose create-if-absent cannot be relied upon in one way or another, and that do not know it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from anyshard.errors import BlobExists, StorageUnguarded
from anyshard.storage.protocol import Capabilities, Store
from anyshard.storage.wrappers import Call, WrapperStore

T = TypeVar("T")


class HonouringStore(WrapperStore):
    """Asks for the condition, which is heard."""

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, guarded=None)


class IgnoringStore(HonouringStore):
    """The condition is passed over: every create is a put."""

    def create(self, key: str, data: bytes, *, token: str) -> None:
        self.put(key, data, token=token)


class RefusingStore(HonouringStore):
    """The condition is not implemented: nothing is created."""

    def create(self, key: str, data: bytes, *, token: str) -> None:
        raise StorageUnguarded(f"{key}: 501 Not Implemented", file=key)


class LyingStore(HonouringStore):
    """Says that the key is there, and replaces it all the same."""

    def create(self, key: str, data: bytes, *, token: str) -> None:
        is_there = any(entry.key == key for entry in self.inner.list("").entries)
        self.put(key, data, token=token)
        if is_there:
            raise BlobExists(f"{key} is there", file=key)


class GappedStore(HonouringStore):
    """Looks and writes in two steps: of creates at the same moment, on threads of their own, all go through."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self._between = threading.Barrier(4)

    def create(self, key: str, data: bytes, *, token: str) -> None:
        if any(entry.key == key for entry in self.inner.list("").entries):
            raise BlobExists(f"{key} is there", file=key)
        if threading.current_thread() is not threading.main_thread():
            self._between.wait(60)
        self.put(key, data, token=token)


class JitteryStore(WrapperStore):
    """Each call waits a random time of up to `most_s`, before it is done or after."""

    def __init__(self, inner: Store, *, seed: int, most_s: float = 0.001) -> None:
        super().__init__(inner)
        self._random = random.Random(seed)
        self._most_s = most_s

    def around(self, call: Call, run: Callable[[], T]) -> T:
        self.pause()
        result = run()
        self.pause()
        return result

    def pause(self) -> None:
        """Wait, and let others run."""
        threading.Event().wait(self._random.random() * self._most_s)
