"""Directories below one root: opened component by component without following a link, made durably."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from anyshard.errors import InvalidPath
from anyshard.storage.posix.site import nearest_existing

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY
# What filesystems answer that cannot sync a directory at all (some FUSE and network mounts); there is nothing more to do there.
_CANNOT_SYNC = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})


def open_directory(root: str, components: Sequence[str]) -> int:
    """A descriptor of the directory at `components` below `root`. The root may be a link, nothing below it."""
    descriptor = open_root(root)
    try:
        for component in components:
            below = open_below(descriptor, component)
            os.close(descriptor)
            descriptor = below
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def opened_directory(root: str, components: Sequence[str]) -> Iterator[int]:
    """`open_directory` that closes the descriptor afterwards."""
    descriptor = open_directory(root, components)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_root(root: str) -> int:
    """A descriptor of the root; a root that is no directory is `InvalidPath`."""
    try:
        return os.open(root, _DIRECTORY)
    except NotADirectoryError:
        raise _no_directory(root) from None


def open_below(parent: int, name: str) -> int:
    """A descriptor of a directory directly below `parent`; a link is refused as ELOOP whatever it points at."""
    try:
        return os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    except NotADirectoryError:
        refuse_link(parent, name)
        raise


def refuse_link(parent: int, name: str) -> None:
    """Raise ELOOP if `name` is a symbolic link."""
    if stat.S_ISLNK(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
        raise OSError(errno.ELOOP, "is a symbolic link", name)


def refuse_irregular(mode: int, name: str) -> None:
    """Raise EISDIR for a directory and ENXIO for a pipe, socket or device where a regular file has to be."""
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, "is a directory, not a regular file", name)
    if not stat.S_ISREG(mode):
        raise OSError(errno.ENXIO, "is a pipe, socket or device, not a regular file", name)


def sync_directory(descriptor: int) -> None:
    """Make names in this directory durable, as far as its filesystem can."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise


def make_root(root: str) -> None:
    """Make the root and its parents exist, durably. A root that was there is synced again: its maker may have died before."""
    existing = nearest_existing(root)
    try:
        os.makedirs(root, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise _no_directory(root) from None
    path = root
    while True:
        _sync_path(path)
        if path == os.path.dirname(existing) or path == os.path.dirname(path):
            return
        path = os.path.dirname(path)


def make_below(root: str, *paths: Sequence[str]) -> None:
    """Make the directories at these paths below the root exist, durably. Each is made and synced once, however many share it."""
    descriptor = open_root(root)
    try:
        _make_in(descriptor, paths, at=root)
    finally:
        os.close(descriptor)


def _make_in(parent: int, paths: Sequence[Sequence[str]], *, at: str) -> None:
    below: dict[str, list[Sequence[str]]] = {}
    for path in filter(None, paths):
        below.setdefault(path[0], []).append(path[1:])
    for name in below:
        with suppress(FileExistsError):
            os.mkdir(name, dir_fd=parent)
    sync_directory(parent)
    for name, rest in below.items():
        try:
            directory = open_below(parent, name)
        except NotADirectoryError:
            raise _no_directory(f"{at}/{name}") from None
        try:
            _make_in(directory, rest, at=f"{at}/{name}")
        finally:
            os.close(directory)


def _sync_path(path: str) -> None:
    # Directories above the root may be others' and closed to us: then their owner made them, and made them durable.
    with suppress(PermissionError):
        descriptor = os.open(path, _DIRECTORY)
        try:
            sync_directory(descriptor)
        finally:
            os.close(descriptor)


def _no_directory(path: str) -> InvalidPath:
    return InvalidPath(
        f"expected a directory at {path}, found a file there or on the way. Choose another path, or move the file away"
    )
