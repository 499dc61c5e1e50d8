"""Readers of many blobs with few files open: closed while nobody uses them, opened again when they are needed.

A file stays open for as long as a thread uses it, also one that was left behind in a broken storage: whoever lets go last closes
it, so no thread ever reads from a file descriptor that has become another file's.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from anyshard.engine.crew import Crew
from anyshard.errors import BlobNotFound, CheckpointDamaged, CheckpointReplaced, StorageError
from anyshard.records.manifest import BlobEntry
from anyshard.storage.protocol import BlobReader, Store


class OpenFiles:
    """Bounds how many blobs are open at once: of those that nobody uses, the `max_idle` used last stay open."""

    def __init__(self, max_idle: int = 128) -> None:
        self._max_idle = max_idle
        self._idle: OrderedDict[int, SharedReader] = OrderedDict()
        self._lock = threading.Lock()

    def take(self, shared: SharedReader) -> None:
        """Keep this one open until `put_back`; called once more for each user."""
        with self._lock:
            if shared.is_closed:
                raise StorageError(
                    f"{shared.entry.name}: expected an open checkpoint, found a closed one", file=shared.entry.name
                )
            shared.num_users += 1
            self._idle.pop(id(shared), None)

    def put_back(self, shared: SharedReader) -> None:
        """One user less; the last one makes it idle, or closes it if it was given up meanwhile."""
        with self._lock:
            shared.num_users -= 1
            if not shared.num_users and not shared.is_closed and shared.reader is not None:
                self._idle[id(shared)] = shared
            surplus = self._pick_surplus(shared)
        _close(surplus)

    def give_up(self, shared: SharedReader) -> None:
        """Close this one for good, or have its last user do it."""
        with self._lock:
            shared.is_closed = True
            self._idle.pop(id(shared), None)
            surplus = self._pick_surplus(shared)
        _close(surplus)

    def _pick_surplus(self, shared: SharedReader) -> BlobReader | None:
        if shared.is_closed and not shared.num_users:
            return _detach(shared)
        return _detach(self._idle.popitem(last=False)[1]) if len(self._idle) > self._max_idle else None


class SharedReader:
    """The reader of one blob, for several threads. What it reads is the blob that was opened first, or `CheckpointReplaced`."""

    def __init__(self, store: Store, entry: BlobEntry, files: OpenFiles) -> None:
        self.entry = entry
        self.reader: BlobReader | None = None
        self.num_users = 0
        self.is_closed = False
        self._store = store
        self._files = files
        self._was_open = False
        self._opening = threading.Lock()

    def read(self, position: int, out: memoryview, *, crew: Crew) -> None:
        """Fill all of `out` from `position`, on a thread of the crew."""
        with self._using(crew) as reader, crew.call("read", file=self.entry.name, position=position):
            reader.read_into(position, out)

    def close(self) -> None:
        """No further read; the file is closed once no thread reads from it."""
        self._files.give_up(self)

    @contextmanager
    def _using(self, crew: Crew) -> Iterator[BlobReader]:
        self._files.take(self)
        try:
            with self._opening:
                if self.reader is None:
                    with crew.call("open", file=self.entry.name):
                        self.reader = self._open_again() if self._was_open else self._open()
                    self._was_open = True
            yield self.reader
        finally:
            self._files.put_back(self)

    def _open_again(self) -> BlobReader:
        # A name holds a random attempt and is never used twice. What is read is compared with the digests of the tail anyway.
        try:
            return self._open()
        except CheckpointDamaged as damage:
            raise CheckpointReplaced(
                f"{self.entry.name}: expected the blob that was opened before: it was replaced or removed while it was being "
                "read. Open the checkpoint again"
            ) from damage

    def _open(self) -> BlobReader:
        reader = _open_listed(self._store, self.entry)
        if reader.nbytes == self.entry.nbytes:
            return reader
        found = reader.nbytes
        _close(reader)
        raise CheckpointDamaged(
            f"{self.entry.name}: expected a length of {self.entry.nbytes}, found {found}. Load another checkpoint or copy",
            file=self.entry.name,
        )


def _open_listed(store: Store, entry: BlobEntry) -> BlobReader:
    try:
        return store.open_blob(entry.name).__enter__()
    except BlobNotFound as error:
        raise CheckpointDamaged(
            f"{entry.name}: expected the blob that the manifest lists, found no such file; this is an incomplete copy",
            file=entry.name,
        ) from error


def _detach(shared: SharedReader) -> BlobReader | None:
    reader, shared.reader = shared.reader, None
    return reader


def _close(reader: BlobReader | None) -> None:
    if reader is not None:
        reader.__exit__(None, None, None)
