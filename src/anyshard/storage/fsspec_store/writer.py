"""Writing one blob: a short one is handed over whole when it is finished, a longer one is streamed and looked up afterwards."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Self, final

from fsspec.spec import AbstractBufferedFile

from anyshard.errors import BlobNotFound, StorageError, StorageUnguarded
from anyshard.storage.buffers import flat_bytes
from anyshard.storage.coverage import Coverage
from anyshard.storage.fsspec_store.target import Target
from anyshard.storage.fsspec_store.whole import sync_file, sync_parent, write_all

WHOLE_NBYTES = 16 << 20
_PART_NBYTES = 16 << 20


@final
class FsspecBlobWriter:
    """A `BlobWriter` front to back. Durable means: closed, and found there with its length."""

    def __init__(self, target: Target, *, nbytes: int | None) -> None:
        self._target = target
        self._coverage = Coverage(target.name, nbytes)
        self._held = bytearray()
        self._next = 0
        self._stream: _Stream | None = None
        self._durable = False
        target.refuse_taken()

    def write_at(self, position: int, buffer: memoryview) -> None:
        """Take a copy of all of `buffer`."""
        view = flat_bytes(buffer)
        self._coverage.check(position, view.nbytes)
        if position != self._next:
            raise StorageError(
                f"{self._target.key}: expected a single write at {self._next}, found one at {position}. "
                "This store has no parallel_writes",
                file=self._target.key,
            )
        if self._stream is None and (self._target.traits.in_memory or len(self._held) + view.nbytes <= WHOLE_NBYTES):
            self._held += view
        else:
            self._send(view)
        self._next += view.nbytes
        self._coverage.add(position, view.nbytes)
        self._target.announce("blob.written", view.nbytes)

    def finish(self) -> None:
        """Hand over what is held, or close the stream; then the key has to be there with the length that was written."""
        nbytes = self._coverage.check_complete()
        if self._stream is None:
            self._create(bytes(self._held))
        else:
            self._stream.close()
        found = self._target.look()
        if found != nbytes:
            raise StorageError(
                f"{self._target.name}: expected the {nbytes} bytes that were written, found {found}. "
                "The backend lost some, or another program writes here",
                file=self._target.key,
            )
        self._durable = True
        self._target.announce("blob.durable", nbytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._held = bytearray()
        if not self._durable and self._stream is not None:
            with suppress(Exception):  # what cannot be removed is recognised by its name
                self._stream.discard()
                self._target.announce("blob.discarded")

    def _send(self, view: memoryview) -> None:
        if self._stream is None:
            self._stream = _Stream(self._target)
            self._stream.write(memoryview(self._held))
            self._held = bytearray()
        self._stream.write(view)

    def _create(self, data: bytes) -> None:
        try:
            self._target.create(data)
        except BlobNotFound:  # the directory was removed since it was prepared, because it was empty
            self._target.make_directory()
            self._target.create(data)
        except StorageUnguarded:
            self._target.refuse_taken()
            self._target.put(data)


class _Stream:
    """A file of fsspec that is being written to the key itself."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._written = 0
        self._filesystem: Any = None
        try:
            self._file = self._open()
        except BlobNotFound:  # as above
            target.make_directory()
            self._file = self._open()
        target.announce("blob.created")
        self._identity = target.identify() if target.traits.on_disk else None

    def write(self, view: memoryview) -> None:
        self._target.border.call("write", self._target.key, partial(write_all, self._file, view))
        self._written += view.nbytes

    def close(self) -> None:
        """Close; a key that was taken meanwhile is `BlobExists` as far as that can be seen."""
        target = self._target
        if target.traits.whole:
            target.refuse_taken()
        try:
            target.border.call("finish", target.key, self._close_file)
        except BlobNotFound:
            # A client that repeats the end of an upload by itself finds none when the first answer was lost. Whether it is
            # there is looked up next.
            if not target.traits.repeats:
                raise
            if isinstance(self._file, AbstractBufferedFile):
                self._file.closed = True  # or the garbage collector would close it again
        target.instances.give(self._filesystem)
        if self._identity is not None and self._identity != target.identify():
            raise target.taken()

    def discard(self) -> None:
        """Give up what is not there yet, and remove what is if it is ours."""
        if isinstance(self._file, AbstractBufferedFile):
            self._give_up_upload(self._file)
        else:
            self._file.close()
        if not self._target.traits.whole and self._is_ours():
            self._target.remove()

    def _open(self) -> Any:
        mode = "xb" if self._target.traits.on_disk else "wb"

        def send() -> Any:
            with self._target.instances.taken() as self._filesystem:  # nobody else may use it while the file is open
                return self._filesystem.open(self._target.path, mode, block_size=_PART_NBYTES)

        return self._target.border.create(self._target.key, send)

    def _close_file(self) -> None:
        if self._target.traits.on_disk:
            sync_file(self._file)
        self._file.close()
        if self._target.traits.on_disk:
            sync_parent(self._target.path)

    def _give_up_upload(self, file: Any) -> None:
        try:
            file.discard()
        finally:
            file.closed = True  # or the garbage collector would close it, and so publish what was given up

    def _is_ours(self) -> bool:
        if self._identity is not None:
            return bool(self._identity == self._target.identify())
        return self._target.look() <= self._written  # nothing was there at first, and keys are unique to a writer
