"""The Store protocol: where bytes go. A store knows keys and bytes, never a plan, a manifest or a tensor.

Call sequence of a save: `prepare`, then per blob `create_blob` -> `write_at`... -> `finish` (durable) from worker threads, then
`create` for the index and last for the manifest. Of a load: `list`, `read`, `open_blob` -> `read_into`... from worker threads.

Keys are relative, `/`-separated, of components that are not empty, `.` or `..`; a store rejects any other. All verbs may be
called from several threads. Errors are `StorageError` and its leaves, naming the key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a store can do; the same for as long as the object lives, but for a `guarded` that turns out to be false.

    `parallel_writes`: `write_at` may be called in any order and from several threads. `guarded`: `create` really is
    create-if-absent; None: it asks for that, and nobody knows yet whether it is heard (see commit/guard.py).
    `max_blob_nbytes`: a longer blob should be made as several, since all of it is sent again when its upload fails.
    `streams_per_blob`: requests that one blob being written keeps in flight. `read_gap_nbytes`: as many bytes are read as
    quickly as another request is made.
    """

    parallel_writes: bool
    guarded: bool | None
    max_blob_nbytes: int | None = None
    streams_per_blob: int = 1
    read_gap_nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """One blob in a listing; `modified_s` is by the store's own clock (Unix time)."""

    key: str
    nbytes: int
    modified_s: float


@dataclass(frozen=True, slots=True)
class Listing:
    """Blobs directly below a prefix, and the prefixes (with trailing `/`) below it. Both sorted."""

    entries: tuple[Entry, ...]
    prefixes: tuple[str, ...]


class BlobWriter(Protocol):
    """A new blob being written front to back; it exists for readers after `finish` at the latest.

    The calls of `write_at` cover [0, nbytes) exactly once; a write outside of it, or a `finish` before all of it is written, is
    a `StorageError`. Without `parallel_writes` they come in rising order from one thread at a time. Leaving the context without a
    successful `finish` gives the blob up and removes what was written (if it can), never what another writer wrote.
    """

    def write_at(self, position: int, buffer: memoryview) -> None:
        """Write all of `buffer` (contiguous, of any format); it may be reused after return."""
        ...

    def finish(self) -> None:
        """Make the blob durable under its key; called once, when all writes have returned. `BlobExists` if the key was taken."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class BlobReader(Protocol):
    """An open blob; what it reads stays the same even if the key is replaced or deleted meanwhile (or `CheckpointReplaced`)."""

    @property
    def nbytes(self) -> int:
        """Length of the blob when it was opened."""
        ...

    def read_into(self, position: int, buffer: memoryview) -> None:
        """Fill all of `buffer` from `position`; a blob that ends earlier is a `StorageError`."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


class Store(Protocol):
    """A backend holding blobs under keys below one root (one checkpoint's directory or prefix)."""

    @property
    def url(self) -> str:
        """What the user called it, without credentials; for messages."""
        ...

    @property
    def site(self) -> str:
        """Which server and bucket, or which filesystem, this is, without credentials: on one site all stores can do the same."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What this store can do."""
        ...

    def prepare(self, prefixes: Sequence[str]) -> None:
        """Make the root, its parents and `prefixes` exist, durably. Nothing to do on object stores."""
        ...

    def create(self, key: str, data: bytes, *, token: str) -> None:
        """Create `key` with `data` if absent, atomically and durably: the one primitive of every commit.

        `token` (letters and digits) goes into temporary names, so that writers never share one. Raises `BlobExists` if the key
        is there; after any error the caller reads the key back.
        """
        ...

    def put(self, key: str, data: bytes, *, token: str) -> None:
        """Write `key` durably, atomically for readers, whether it is there or not.

        Only for stores on which `create` cannot be relied upon (see commit/guard.py): nothing else ever replaces a key.
        """
        ...

    def create_blob(self, key: str, *, nbytes: int | None) -> BlobWriter:
        """Start a new blob of `nbytes` (None: not known). Raises `BlobExists` now or at `finish`."""
        ...

    def read(self, key: str, *, max_nbytes: int) -> bytes:
        """All bytes of a small blob; more than `max_nbytes` is `LimitExceeded`, nothing there `BlobNotFound`."""
        ...

    def open_blob(self, key: str) -> BlobReader:
        """Open a blob for ranged reads; nothing there is `BlobNotFound`."""
        ...

    def list(self, prefix: str) -> Listing:
        """Entries directly below `prefix` ("" or ending in `/`). A prefix without entries is empty, not an error."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Delete blobs, in the order given; keys that are not there are passed over. Never follows links.

        A key that ends in `/` names a prefix: its directory is removed if the backend has one and it is empty. Nothing else ever
        removes a directory, since another save may be about to write there.
        """
        ...

    def now_s(self) -> float:
        """The store's own clock as Unix time, for ages of entries."""
        ...

    def free_nbytes(self) -> int | None:
        """Bytes that can still be written, or None if the store cannot tell."""
        ...
