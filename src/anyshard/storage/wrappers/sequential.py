"""Order of writes: a store that takes them front to back only, as object stores and HDFS do."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import TracebackType
from typing import Self

from anyshard.errors import StorageError
from anyshard.storage.protocol import BlobWriter, Capabilities, Store
from anyshard.storage.wrappers.forward import WrapperStore


class SequentialStore(WrapperStore):
    """A store without `parallel_writes` that fails every write out of order or beside another one of the same blob.

    It says that one blob takes `streams_per_blob` streams, which only tells callers how many blobs to write at once.
    """

    def __init__(self, inner: Store, *, streams_per_blob: int = 1) -> None:
        super().__init__(inner)
        self._streams_per_blob = streams_per_blob

    @property
    def capabilities(self) -> Capabilities:
        """Those of the inner store without `parallel_writes`."""
        return replace(self.inner.capabilities, parallel_writes=False, streams_per_blob=self._streams_per_blob)

    def create_blob(self, key: str, *, nbytes: int | None) -> BlobWriter:
        """Forward; the writer checks the order."""
        return _SequentialWriter(key, super().create_blob(key, nbytes=nbytes))


class _SequentialWriter:
    def __init__(self, key: str, inner: BlobWriter) -> None:
        self._key = key
        self._inner = inner
        self._next = 0
        self._lock = threading.Lock()

    def write_at(self, position: int, buffer: memoryview) -> None:
        if not self._lock.acquire(blocking=False):
            raise self._refused(f"found one at {position} while another one ran")
        try:
            if position != self._next:
                raise self._refused(f"found one at {position}")
            self._inner.write_at(position, buffer)
            self._next += buffer.nbytes
        finally:
            self._lock.release()

    def finish(self) -> None:
        self._inner.finish()

    def __enter__(self) -> Self:
        self._inner.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._inner.__exit__(kind, error, traceback)

    def _refused(self, found: str) -> StorageError:
        return StorageError(
            f"{self._key}: expected a single write at {self._next}, {found}. This store has no parallel_writes", file=self._key
        )
