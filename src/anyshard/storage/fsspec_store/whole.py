"""Blobs that are handed over in one piece: created if absent where the backend can refuse, put otherwise."""

from __future__ import annotations

import errno
import io
import os
from contextlib import suppress
from typing import Any

from fsspec.implementations.memory import MemoryFile

from anyshard.errors import StorageUnguarded
from anyshard.storage.fsspec_store.traits import Traits

_NO_LINKS = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK})


def create_whole(filesystem: Any, path: str, data: bytes, *, traits: Traits, temporary: str) -> None:
    """Create `path` with `data` if absent, atomically for readers; an error of the backend if it is taken.

    `StorageUnguarded` if the class cannot: it would look first and then replace what another writer made in between.
    """
    if traits.in_memory:
        _create_in_memory(filesystem, path, data)
    elif traits.on_disk:
        _create_by_link(filesystem, path, data, temporary)
    elif traits.guarded is None:
        filesystem.pipe_file(path, data, mode="create")
    else:
        raise StorageUnguarded(
            f"{path}: expected a store that refuses a taken key, found {type(filesystem).__name__}, which looks and then writes. "
            "Save without require_guarded, or to a local path, S3, GCS or Azure",
            file=path,
        )


def put_whole(filesystem: Any, path: str, data: bytes, *, traits: Traits, temporary: str) -> None:
    """Write `path`, whether it is there or not; atomically for readers wherever the backend has a way for that."""
    if traits.whole and not traits.on_disk:
        filesystem.pipe_file(path, data)
    elif traits.renames:
        _put_by_moving(filesystem, path, data, temporary)
    else:
        _write(filesystem, path, data, mode="wb")


def sync_file(file: Any) -> None:
    """Flush, and make durable if there is a descriptor to do it by; elsewhere what closing promises has to be enough."""
    file.flush()
    try:
        descriptor = file.fileno()
    except (OSError, AttributeError):  # io.UnsupportedOperation is an OSError
        return
    os.fsync(descriptor)


def sync_parent(path: str) -> None:
    """Make the name of a file on this host's disks durable."""
    descriptor = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _create_in_memory(filesystem: Any, path: str, data: bytes) -> None:
    # Its `pipe_file` looks and then writes, but a dictionary has a way to do both at once.
    file = MemoryFile(filesystem, path, data)
    if filesystem.isdir(path):
        raise IsADirectoryError(path)
    if filesystem.store.setdefault(path, file) is not file:
        raise FileExistsError(path)


def _create_by_link(filesystem: Any, path: str, data: bytes, temporary: str) -> None:
    try:
        _write(filesystem, temporary, data, mode="xb")
        _link(filesystem, temporary, path)
    finally:
        with suppress(OSError):
            filesystem.rm_file(temporary)
    sync_parent(path)


def _link(filesystem: Any, source: str, path: str) -> None:
    try:
        filesystem.link(source, path)
    except OSError as error:
        if error.errno in _NO_LINKS:
            raise NotImplementedError("this filesystem has no hard links") from error
        raise


def _put_by_moving(filesystem: Any, path: str, data: bytes, temporary: str) -> None:
    try:
        _write(filesystem, temporary, data, mode="wb")
        _move(filesystem, temporary, path)
    except BaseException:
        with suppress(Exception):
            filesystem.rm_file(temporary)
        raise
    if os.path.isabs(path) and getattr(filesystem, "local_file", False):
        sync_parent(path)


def _move(filesystem: Any, source: str, path: str) -> None:
    """Move, over what is there; some backends refuse that, and some of them do not even say so."""
    try:
        filesystem.mv(source, path)
    except OSError:
        if not filesystem.exists(path):
            raise
    else:
        if not filesystem.exists(source):
            return
    filesystem.rm_file(path)
    filesystem.mv(source, path)


def _write(filesystem: Any, path: str, data: bytes, *, mode: str) -> None:
    with filesystem.open(path, mode) as file:
        write_all(file, memoryview(data))
        sync_file(file)


def write_all(file: Any, view: memoryview) -> None:
    """Write all of `view`, also to a file whose `write` may take less, or says nothing about how much it took."""
    while view.nbytes:
        piece = bytes(view[: io.DEFAULT_BUFFER_SIZE * 1024])  # a copy: some clients keep what they were given until they send it
        written = file.write(piece)
        view = view[len(piece) if written is None else written :]


def read_at_most(file: Any, nbytes: int) -> bytes:
    """The next `nbytes` bytes of a file whose `read` may give less, or what there is up to its end."""
    pieces: list[bytes] = []
    while nbytes > 0 and (piece := file.read(nbytes)):
        pieces.append(bytes(piece))
        nbytes -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
