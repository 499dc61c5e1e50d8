"""Reading one blob: direct into aligned memory while it is not cached, else through the page cache."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from anyshard.errors import CheckpointReplaced, StorageError
from anyshard.storage.buffers import flat_bytes
from anyshard.storage.posix.directories import refuse_irregular
from anyshard.storage.posix.site import Site
from anyshard.storage.posix.syscalls import is_aligned, is_resident, reopen_direct


def open_regular(parent: int, name: str) -> int:
    """A descriptor for reading a regular file in directory `parent`; links are ELOOP, other kinds of file EISDIR or ENXIO."""
    # O_NONBLOCK: a pipe under this name must not make us wait for its writer.
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=parent)
    try:
        refuse_irregular(os.fstat(descriptor).st_mode, name)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class LocalBlobReader:
    """A `BlobReader` over one open file: replacing or deleting its name changes nothing for it. Usable from several threads."""

    def __init__(self, site: Site, descriptor: int, *, nbytes: int, direct: bool) -> None:
        self._site = site
        self._descriptor = descriptor
        self._nbytes = nbytes
        self._direct: int | None = None
        self._try_direct = direct
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Length of the file when it was opened."""
        return self._nbytes

    def read_into(self, position: int, buffer: memoryview) -> None:
        """Fill all of `buffer` from `position`; a file that ends earlier is a `StorageError`."""
        view = flat_bytes(buffer)
        if position < 0 or position + view.nbytes > self._nbytes:
            raise self._too_short(position, view.nbytes, self._nbytes)
        if view.nbytes == 0:
            return
        with self._translated():
            direct = is_aligned(position, view) and not self._is_cached(position, view.nbytes)
            done = 0
            while done < view.nbytes:
                count = self._read_some(position + done, view[done:], direct=direct)
                if count == 0:
                    raise self._too_short(position, view.nbytes, position + done)
                done += count

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for descriptor in (self._direct, self._descriptor):
            if descriptor is not None:
                os.close(descriptor)

    def _is_cached(self, position: int, nbytes: int) -> bool:
        # Without direct I/O nothing would follow from the answer, and asking costs a mapping.
        return self._direct_descriptor() is None or is_resident(self._descriptor, position, nbytes)

    def _read_some(self, position: int, view: memoryview, *, direct: bool) -> int:
        second = self._direct_descriptor() if direct and is_aligned(position, view) else None
        if second is not None:
            try:
                return os.preadv(second, [view], position)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._try_direct = False  # the filesystem opens for direct I/O but wants another alignment
        return os.preadv(self._descriptor, [view], position)

    def _direct_descriptor(self) -> int | None:
        with self._lock:
            if self._try_direct and self._direct is None:
                self._direct = reopen_direct(self._descriptor, os.O_RDONLY)
                self._try_direct = self._direct is not None
            return self._direct if self._try_direct else None

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            with self._site.translated("read"):
                yield
        except StorageError as error:
            if error.errno != errno.ESTALE:
                raise
            raise CheckpointReplaced(
                f"{self._site.path} was replaced or removed while it was open. Open the checkpoint again"
            ) from error

    def _too_short(self, position: int, nbytes: int, found: int) -> StorageError:
        return StorageError(
            f"{self._site.path}: expected {nbytes} bytes at {position}, found a file of {found} bytes. "
            "It was cut, or is not the file that its manifest names: copy it again from its origin",
            file=self._site.key,
        )


def open_reader(site: Site, parent: int, *, direct: bool) -> LocalBlobReader:
    """A reader of the site's key in directory `parent`."""
    descriptor = open_regular(parent, site.key.rpartition("/")[2])
    return LocalBlobReader(site, descriptor, nbytes=os.fstat(descriptor).st_size, direct=direct)
