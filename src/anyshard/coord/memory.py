"""The memory key-value store: a dictionary of this process, for thread ranks and for a job of one rank."""

from __future__ import annotations

import threading
from collections.abc import Sequence


class MemoryKeyValueStore:
    """A `KeyValueStore` of the threads that hold the object."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    @property
    def can_hang(self) -> bool:
        """Never."""
        return False

    def keys(self) -> tuple[str, ...]:
        """All keys that are there now, sorted."""
        with self._lock:
            return tuple(sorted(self._values))

    def set(self, key: str, value: bytes) -> None:
        """Store `value` under `key`."""
        with self._lock:
            self._values[key] = value

    def get(self, key: str) -> bytes | None:
        """The value under `key`, or None."""
        with self._lock:
            return self._values.get(key)

    def get_many(self, keys: Sequence[str]) -> tuple[bytes | None, ...]:
        """The values under `keys`, all of one moment."""
        with self._lock:
            return tuple(map(self._values.get, keys))

    def set_if_absent(self, key: str, value: bytes) -> bytes:
        """The first value wins and is returned."""
        with self._lock:
            return self._values.setdefault(key, value)

    def delete(self, key: str) -> None:
        """Forget the key."""
        with self._lock:
            self._values.pop(key, None)

    def clone(self) -> MemoryKeyValueStore:
        """The object itself, which any number of threads may use."""
        return self
