"""The local store: blobs are files below one directory of a POSIX filesystem, disks and network mounts alike."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from anyshard.errors import LimitExceeded
from anyshard.monitor.events import SILENT, Emitter
from anyshard.storage.keys import check_token, is_key, split_key, split_prefix
from anyshard.storage.posix.directories import (
    make_below,
    make_root,
    open_directory,
    open_root,
    opened_directory,
    refuse_irregular,
    refuse_link,
)
from anyshard.storage.posix.mounts import Mount, find_mount
from anyshard.storage.posix.publish import PRIMITIVES, Primitive, by_replacing, publish
from anyshard.storage.posix.reader import LocalBlobReader, open_reader, open_regular
from anyshard.storage.posix.site import Site, free_nbytes, nearest_existing
from anyshard.storage.posix.visibility import Visibility, retry_stale
from anyshard.storage.posix.writer import LocalBlobWriter, open_writer
from anyshard.storage.protocol import Capabilities, Entry, Listing

_READ_NBYTES = 1 << 20


class LocalStore:
    """A `Store` on a directory. What `finish` and `create` reported survives a power loss; no link below the root is followed.

    `direct=False` keeps direct I/O off (it is also off for each file whose filesystem refuses it). `primitives` are the ways to
    publish a file, tried in order. `visibility_timeout_s` is how long `open_blob` and `create_blob` wait for the file and for the
    root that another host has made and this one does not see yet, by default none on a local filesystem, 90 s on NFS and 10 s
    elsewhere.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        events: Emitter = SILENT,
        direct: bool = True,
        primitives: Sequence[Primitive] = PRIMITIVES,
        visibility_timeout_s: float | None = None,
    ) -> None:
        self._root = str(Path(root).absolute())
        self._events = events
        self._direct = direct
        self._primitives = tuple(primitives)
        self._visibility_timeout_s = visibility_timeout_s

    @property
    def url(self) -> str:
        """The absolute path of the root."""
        return self._root

    @property
    def site(self) -> str:
        """The filesystem that the root is or will be on, by the number of its device."""
        with self._site("").translated("find the filesystem of"):
            return f"file:{os.stat(nearest_existing(self._root)).st_dev}"

    @property
    def capabilities(self) -> Capabilities:
        """Writes in any order; guarded as far as the kind of filesystem is known (see posix/mounts.py)."""
        return Capabilities(parallel_writes=True, guarded=self._mount.guarded)

    @cached_property
    def _mount(self) -> Mount:
        return find_mount(self._root)  # once: what a store can do never changes

    @cached_property
    def _visibility(self) -> Visibility:
        given_s = self._visibility_timeout_s
        return Visibility(self._mount.visibility_timeout_s if given_s is None else given_s)

    def prepare(self, prefixes: Sequence[str]) -> None:
        """Make the root, its parents and `prefixes` exist; their names are durable afterwards."""
        site = self._site("")
        with site.translated("make the directories of"):
            make_root(self._root)
            if prefixes:
                make_below(self._root, *map(split_prefix, prefixes))
        site.announce("prepare.done")

    def create(self, key: str, data: bytes, *, token: str) -> None:
        """Create `key` with `data` if absent, atomically and durably, by the first primitive that the filesystem has."""
        *directories, name = split_key(key)
        temporary = f"{name}.{check_token(token)}.tmp"
        site = self._site(key)
        with site.translated("create", needed=len(data)), opened_directory(self._root, directories) as parent:
            publish(site, parent, data, temporary=temporary, primitives=self._primitives)

    def put(self, key: str, data: bytes, *, token: str) -> None:
        """Write `key` under a temporary name and rename that, durably."""
        *directories, name = split_key(key)
        temporary = f"{name}.{check_token(token)}.tmp"
        site = self._site(key)
        with site.translated("write", needed=len(data)), opened_directory(self._root, directories) as parent:
            publish(site, parent, data, temporary=temporary, primitives=(by_replacing,))

    def create_blob(self, key: str, *, nbytes: int | None) -> LocalBlobWriter:
        """Make the file with its space reserved. A taken key is `BlobExists`, a full disk `StorageFull`, both now.

        A directory that was removed since it was prepared, because it was empty, is made again.
        """
        *directories, _ = split_key(key)
        site = self._site(key)
        with site.translated("create", needed=nbytes):
            parent = self._open_or_make(directories)
            try:
                is_known = self._mount.tells_free_space
                return open_writer(site, parent, nbytes=nbytes, direct=self._direct, is_space_known=is_known)
            except BaseException:
                os.close(parent)
                raise

    def read(self, key: str, *, max_nbytes: int) -> bytes:
        """All bytes of a small file; more than `max_nbytes` is `LimitExceeded`, and no more than that is ever held."""
        *directories, name = split_key(key)
        site = self._site(key)

        def read() -> bytes:
            with opened_directory(self._root, directories) as parent:
                return _read_at_most(open_regular(parent, name), max_nbytes + 1)

        with site.translated("read"):
            data = retry_stale(read)
        if len(data) > max_nbytes:
            raise LimitExceeded(
                f"{site.path}: expected at most {max_nbytes} bytes, found more. Nothing that anyshard wrote here is that large: "
                "check the path, or copy the file again from its origin"
            )
        return data

    def open_blob(self, key: str) -> LocalBlobReader:
        """Open a file for ranged reads; it stays the same file whatever happens to its name.

        One that is not there yet is waited for (see `Visibility`), for only a record can have named it. Not so by `read`, which
        commits ask for records that may not exist.
        """
        *directories, _ = split_key(key)
        site = self._site(key)

        def find() -> LocalBlobReader:
            with opened_directory(self._root, directories) as parent:
                return open_reader(site, parent, direct=self._direct)

        with site.translated("open"):
            return self._visibility.find(find, site, directories)

    def list(self, prefix: str) -> Listing:
        """Files and directories directly below `prefix`. Links, pipes and names that are no keys are not listed."""
        components = split_prefix(prefix)

        def find() -> Listing:
            with opened_directory(self._root, components) as directory:
                return _list_directory(directory, prefix)

        with self._site(prefix).translated("list"):
            try:
                return retry_stale(find)
            except (FileNotFoundError, NotADirectoryError):
                return Listing((), ())

    def delete(self, keys: Sequence[str]) -> None:
        """Remove regular files, and for keys ending in `/` empty directories; anything else under a key is `StorageError`.

        Names are not synced: after a power loss a deleted file may be back, which every reader of a checkpoint must bear anyway.
        """
        for key in keys:
            site = self._site(key)
            with site.translated("delete"), suppress(FileNotFoundError, NotADirectoryError):
                *directories, name = split_prefix(key) if key.endswith("/") else split_key(key)
                with opened_directory(self._root, directories) as parent:
                    _remove_directory(parent, name) if key.endswith("/") else _remove_file(parent, name)
                site.announce("deleted")

    def now_s(self) -> float:
        """This host's clock. Of a network mount it may differ from the server's by their skew: compare with wide margins."""
        return time.time()

    def free_nbytes(self) -> int | None:
        """Bytes that an ordinary user can still write here, or None if the filesystem cannot tell or makes numbers up (FUSE)."""
        return free_nbytes(self._root) if self._mount.tells_free_space else None

    def _open_or_make(self, directories: Sequence[str]) -> int:
        try:
            return open_directory(self._root, directories)
        except FileNotFoundError:
            self._await_root()
            make_below(self._root, directories)
            return open_directory(self._root, directories)

    def _await_root(self) -> None:
        """Return once this host sees the root, which another one may have made a moment ago."""
        self._visibility.find(lambda: os.close(open_root(self._root)), self._site(""), ())

    def _site(self, key: str) -> Site:
        return Site(self._root, key, self._events)


def _read_at_most(descriptor: int, nbytes: int) -> bytes:
    pieces: list[bytes] = []
    with open(descriptor, "rb", buffering=0) as file:
        while nbytes > 0 and (piece := file.read(min(nbytes, _READ_NBYTES))):
            pieces.append(piece)
            nbytes -= len(piece)
    return b"".join(pieces)


def _list_directory(directory: int, prefix: str) -> Listing:
    entries: list[Entry] = []
    prefixes: list[str] = []
    with os.scandir(directory) as found:
        for item in found:
            if not is_key(item.name):
                continue
            if item.is_dir(follow_symlinks=False):
                prefixes.append(f"{prefix}{item.name}/")
            elif item.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):  # deleted since the scan saw it
                    status = item.stat(follow_symlinks=False)
                    entries.append(Entry(prefix + item.name, status.st_size, status.st_mtime))
    return Listing(tuple(sorted(entries, key=lambda entry: entry.key)), tuple(sorted(prefixes)))


def _remove_file(parent: int, name: str) -> None:
    refuse_link(parent, name)
    refuse_irregular(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode, name)
    os.unlink(name, dir_fd=parent)


def _remove_directory(parent: int, name: str) -> None:
    try:
        os.rmdir(name, dir_fd=parent)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
