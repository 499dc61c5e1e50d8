"""The memory store: blobs are bytes in a dictionary of this process. For tests and rehearsals."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Self

from anyshard.errors import BlobExists, BlobNotFound, LimitExceeded, StorageError
from anyshard.storage.buffers import flat_bytes
from anyshard.storage.coverage import Coverage
from anyshard.storage.keys import check_token, split_key, split_prefix
from anyshard.storage.protocol import Capabilities, Entry, Listing


@dataclass(frozen=True, slots=True)
class _Blob:
    data: bytes | bytearray
    modified_s: float


class MemoryStore:
    """A `Store` in memory. Whoever holds the object shares its blobs; nothing is copied but what is written."""

    def __init__(
        self,
        blobs: Mapping[str, bytes] = MappingProxyType({}),
        *,
        url: str = "memory:",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._url = url
        self._site = f"memory:{secrets.token_hex(8)}"
        self._clock = clock
        self._blobs = {key: _Blob(data, clock()) for key, data in blobs.items()}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """The name given at construction."""
        return self._url

    @property
    def site(self) -> str:
        """This very object."""
        return self._site

    @property
    def capabilities(self) -> Capabilities:
        """Writes in any order, guarded."""
        return Capabilities(parallel_writes=True, guarded=True)

    def snapshot(self) -> dict[str, bytes]:
        """All blobs as they are now; give a changed copy to a new `MemoryStore` to damage a checkpoint."""
        with self._lock:
            return {key: bytes(blob.data) for key, blob in self._blobs.items()}

    def prepare(self, prefixes: Sequence[str]) -> None:
        """Check the prefixes; there is nothing to make."""
        for prefix in prefixes:
            split_prefix(prefix)

    def create(self, key: str, data: bytes, *, token: str) -> None:
        """Create `key` with `data` if absent."""
        split_key(key)
        check_token(token)
        self._put(key, bytes(data))

    def put(self, key: str, data: bytes, *, token: str) -> None:
        """Set `key` to `data`."""
        split_key(key)
        check_token(token)
        with self._lock:
            self._blobs[key] = _Blob(bytes(data), self._clock())

    def create_blob(self, key: str, *, nbytes: int | None) -> MemoryBlobWriter:
        """Start a blob; a key that is taken now or at `finish` is `BlobExists`."""
        split_key(key)
        with self._lock:
            self._check_absent(key)
        return MemoryBlobWriter(self._put, key, nbytes=nbytes)

    def read(self, key: str, *, max_nbytes: int) -> bytes:
        """The bytes themselves."""
        data = self._get(key)
        if len(data) > max_nbytes:
            raise LimitExceeded(f"{self._url}/{key}: expected at most {max_nbytes} bytes, found {len(data)}. Check the path")
        return bytes(data)

    def open_blob(self, key: str) -> MemoryBlobReader:
        """A reader of the bytes that are there now."""
        return MemoryBlobReader(key, self._get(key))

    def list(self, prefix: str) -> Listing:
        """Entries and prefixes directly below `prefix`."""
        split_prefix(prefix)
        with self._lock:
            below = {key[len(prefix) :]: blob for key, blob in self._blobs.items() if key.startswith(prefix)}
        entries = (Entry(prefix + name, len(blob.data), blob.modified_s) for name, blob in below.items() if "/" not in name)
        prefixes = {f"{prefix}{name.partition('/')[0]}/" for name in below if "/" in name}
        return Listing(tuple(sorted(entries, key=lambda entry: entry.key)), tuple(sorted(prefixes)))

    def delete(self, keys: Sequence[str]) -> None:
        """Forget these blobs; prefixes have nothing to remove."""
        for key in keys:
            split_key(key.removesuffix("/"))
            with self._lock:
                self._blobs.pop(key, None)

    def now_s(self) -> float:
        """The clock given at construction."""
        return self._clock()

    def free_nbytes(self) -> int | None:
        """Not known."""
        return None

    def _get(self, key: str) -> bytes | bytearray:
        split_key(key)
        with self._lock:
            blob = self._blobs.get(key)
        if blob is None:
            raise BlobNotFound(f"expected a blob at {self._url}/{key}, found nothing. Check the path", file=key)
        return blob.data

    def _put(self, key: str, data: bytes | bytearray) -> None:
        with self._lock:
            self._check_absent(key)
            self._blobs[key] = _Blob(data, self._clock())

    def _check_absent(self, key: str) -> None:
        if key in self._blobs:
            raise BlobExists(f"expected nothing at {self._url}/{key}, found a blob. Nothing was overwritten", file=key)


class MemoryBlobWriter:
    """A `BlobWriter` that collects bytes and hands them to the store at `finish`."""

    def __init__(self, put: Callable[[str, bytearray], None], key: str, *, nbytes: int | None) -> None:
        self._put = put
        self._key = key
        self._data = bytearray(nbytes or 0)
        self._coverage = Coverage(key, nbytes)
        self._lock = threading.Lock()

    def write_at(self, position: int, buffer: memoryview) -> None:
        """Copy `buffer` into place."""
        view = flat_bytes(buffer)
        self._coverage.check(position, view.nbytes)
        with self._lock:
            missing = position + view.nbytes - len(self._data)
            self._data.extend(bytes(max(missing, 0)))
            self._data[position : position + view.nbytes] = view
        self._coverage.add(position, view.nbytes)

    def finish(self) -> None:
        """Make the blob visible."""
        self._coverage.check_complete()
        self._put(self._key, self._data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._data = bytearray()


class MemoryBlobReader:
    """A `BlobReader` over bytes that never change."""

    def __init__(self, key: str, data: bytes | bytearray) -> None:
        self._key = key
        self._data = memoryview(data)

    @property
    def nbytes(self) -> int:
        """Length of the blob."""
        return self._data.nbytes

    def read_into(self, position: int, buffer: memoryview) -> None:
        """Fill all of `buffer`; a blob that ends earlier is a `StorageError`."""
        view = flat_bytes(buffer)
        if position < 0 or position + view.nbytes > self.nbytes:
            raise StorageError(
                f"{self._key}: expected {view.nbytes} bytes at {position}, found a blob of {self.nbytes} bytes. "
                "It was cut, or is not the blob that its manifest names",
                file=self._key,
            )
        view[:] = self._data[position : position + view.nbytes]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        return None
