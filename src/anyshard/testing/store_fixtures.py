"""What the tests of the store contract share: how a store is made, blobs with a pattern, threads that begin together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from anyshard.errors import StorageError
from anyshard.storage.protocol import Store

MakeStore = Callable[[], Store]

TOKEN = "t1"
OTHER_TOKEN = "t2"
NUM_WRITERS = 8


def pattern(nbytes: int, seed: int = 0) -> bytes:
    """Bytes that differ at every position and between seeds, so that a misplaced piece shows."""
    words = np.arange(-(-nbytes // 4), dtype=np.uint32) * np.uint32(2654435761) + np.uint32(seed)
    return words.tobytes()[:nbytes]


def write_blob(store: Store, key: str, data: bytes) -> None:
    """Write `data` as one blob in one piece."""
    with store.create_blob(key, nbytes=len(data)) as writer:
        writer.write_at(0, memoryview(data))
        writer.finish()


def read_range(store: Store, key: str, position: int, nbytes: int) -> bytes:
    """One ranged read of a blob."""
    found = bytearray(nbytes)
    with store.open_blob(key) as reader:
        reader.read_into(position, memoryview(found))
    return bytes(found)


def keys_below(store: Store, prefix: str) -> tuple[str, ...]:
    """The keys that a listing shows."""
    return tuple(entry.key for entry in store.list(prefix).entries)


def in_threads(tasks: Sequence[Callable[[], object]]) -> list[object]:
    """Results of all tasks, begun together; a task that raised gives its error."""
    barrier = threading.Barrier(len(tasks))

    def run(task: Callable[[], object]) -> object:
        barrier.wait(timeout=30)
        try:
            return task()
        except StorageError as error:
            return error

    with ThreadPoolExecutor(len(tasks)) as pool:
        return list(pool.map(run, tasks))


class StoreFixtures:
    """The fixtures of every part of the contract."""

    @pytest.fixture
    def make_store(self) -> MakeStore:
        """Override: how an empty store is made."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, make_store: MakeStore) -> Store:
        """An empty store, prepared for keys at the top, in `data/` and in `data/model/`."""
        store = make_store()
        store.prepare(("data/", "data/model/"))
        return store
