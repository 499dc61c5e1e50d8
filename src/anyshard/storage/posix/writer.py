"""Writing one blob: direct where memory, position and length allow it, buffered otherwise, synced once at the end."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from types import TracebackType
from typing import Self

from anyshard.errors import StorageError
from anyshard.storage.buffers import flat_bytes
from anyshard.storage.coverage import Coverage
from anyshard.storage.posix.directories import sync_directory
from anyshard.storage.posix.new_file import NewFile, create_file
from anyshard.storage.posix.site import Site
from anyshard.storage.posix.syscalls import allocate, is_aligned, reopen_direct


class LocalBlobWriter:
    """A `BlobWriter` over one new file; `write_at` may be called from several threads in any order.

    Owns the descriptor of the directory, of the file and, if there is one, of the file for direct I/O. Direct and buffered writes
    never share a page (see `DIRECT_ALIGNMENT`), and the sync of the file covers both.
    """

    def __init__(self, site: Site, file: NewFile, *, direct: int | None, nbytes: int | None) -> None:
        self._site = site
        self._file = file
        self._direct = direct
        self._use_direct = direct is not None
        self._nbytes = nbytes
        self._coverage = Coverage(site.path, nbytes)
        self._durable = False

    def write_at(self, position: int, buffer: memoryview) -> None:
        """Write all of `buffer`; it may be reused after return."""
        view = flat_bytes(buffer)
        self._coverage.check(position, view.nbytes)
        with self._site.translated("write", needed=self._nbytes):
            written = 0
            while written < view.nbytes:
                written += self._write_some(position + written, view[written:])
        self._coverage.add(position, view.nbytes)
        self._site.announce("blob.written", nbytes=view.nbytes)

    def finish(self) -> None:
        """Make bytes, length and name durable; a file that was removed or replaced meanwhile is a `StorageError`."""
        nbytes = self._coverage.check_complete()
        with self._site.translated("sync", needed=nbytes):
            os.fsync(self._file.descriptor)
            self._site.announce("blob.synced", nbytes=nbytes)
            sync_directory(self._file.parent)
            if not self._file.is_named():
                raise self._removed()
        self._durable = True
        self._site.announce("blob.durable", nbytes=nbytes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            if not self._durable:
                self._give_up()
        finally:
            for descriptor in (self._direct, self._file.descriptor, self._file.parent):
                if descriptor is not None:
                    os.close(descriptor)

    def _write_some(self, position: int, view: memoryview) -> int:
        if self._use_direct and self._direct is not None and is_aligned(position, view):
            try:
                return os.pwrite(self._direct, view, position)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._use_direct = False  # the filesystem opens for direct I/O but wants another alignment
        return os.pwrite(self._file.descriptor, view, position)

    def _removed(self) -> StorageError:
        return StorageError(
            f"{self._site.path}: expected the file that was being written, found it removed or replaced. "
            "Nothing of anyshard deletes files of a save that may go on: look for another program that cleans here",
            file=self._site.key,
        )

    def _give_up(self) -> None:
        with suppress(OSError):  # what cannot be removed is recognised by its name
            self._file.discard()
            self._site.announce("blob.discarded")


def open_writer(site: Site, parent: int, *, nbytes: int | None, direct: bool, is_space_known: bool = True) -> LocalBlobWriter:
    """A writer of the site's key in directory `parent`, whose descriptor it takes over, with its space reserved."""
    file = create_file(parent, site.key.rpartition("/")[2])
    try:
        allocate(file.descriptor, nbytes or 0, is_space_known=is_space_known)
        second = reopen_direct(file.descriptor, os.O_WRONLY) if direct else None
        site.announce("blob.created", nbytes=nbytes)
    except BaseException:
        with suppress(OSError):
            file.discard()
        os.close(file.descriptor)
        raise
    return LocalBlobWriter(site, file, direct=second, nbytes=nbytes)
