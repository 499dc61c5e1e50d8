"""The store on fsspec: keys are paths below a root of any filesystem that fsspec knows."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any, final

from anyshard.errors import BlobNotFound, LimitExceeded, StorageError
from anyshard.storage.fsspec_store.faults import Border
from anyshard.storage.fsspec_store.instances import Instances
from anyshard.storage.fsspec_store.reader import FsspecBlobReader
from anyshard.storage.fsspec_store.target import Target
from anyshard.storage.fsspec_store.traits import Traits
from anyshard.storage.fsspec_store.writer import FsspecBlobWriter
from anyshard.storage.keys import check_token, is_key, split_key, split_prefix
from anyshard.storage.protocol import Capabilities, Entry, Listing

_MAX_BLOB_NBYTES = 1 << 30
_READ_GAP_NBYTES = 1 << 20
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "modified", "modify", "created")


@final
class FsspecStore:
    """A `Store` on a filesystem of fsspec, made by `open_fsspec_store`.

    Threads may share it, and a forked child may go on with it: each process has its own filesystem object. Links on this
    host's disks are not listed, but followed where a key leads through one: the local store is stricter.
    """

    def __init__(self, instances: Instances, traits: Traits, border: Border, *, root: str, site: str) -> None:
        self._instances = instances
        self._traits = traits
        self._border = border
        self._root = root
        self._site = site

    @property
    def url(self) -> str:
        """The URL without credentials and query."""
        return self._border.url

    @property
    def site(self) -> str:
        """Scheme, host or bucket, and endpoint; on disks the filesystem."""
        return self._site

    @property
    def capabilities(self) -> Capabilities:
        """Front to back; not guarded where the class is known to look and then write, else nobody knows yet."""
        near = self._traits.in_memory or self._traits.on_disk
        return Capabilities(
            parallel_writes=False,
            guarded=self._traits.guarded,
            max_blob_nbytes=_MAX_BLOB_NBYTES,
            read_gap_nbytes=None if near else _READ_GAP_NBYTES,
        )

    def prepare(self, prefixes: Sequence[str]) -> None:
        """Make the root and `prefixes` where there are directories. A bucket is never made."""
        for prefix in ("", *prefixes):
            path = self._path("/".join(split_prefix(prefix)))
            if path and not self._traits.bucket:
                self._border.ask("make the directories of", prefix, partial(self._make_directories, path))
        self._border.announce("prepare.done", "")

    def create(self, key: str, data: bytes, *, token: str) -> None:
        """Create `key` with `data` if absent; `StorageUnguarded` where the backend cannot refuse a taken key."""
        self._target(key).create(data, token=check_token(token))

    def put(self, key: str, data: bytes, *, token: str) -> None:
        """Write `key`; atomically for readers on object stores, and where a file can be moved into place."""
        self._target(key).put(data, token=check_token(token))

    def create_blob(self, key: str, *, nbytes: int | None) -> FsspecBlobWriter:
        """Start a blob; a key that is taken now is `BlobExists`, and so is one taken later as far as the backend looks."""
        return FsspecBlobWriter(self._target(key), nbytes=nbytes)

    def read(self, key: str, *, max_nbytes: int) -> bytes:
        """All bytes of a small blob, looked up first: more than `max_nbytes` is `LimitExceeded`, and never transferred."""
        target = self._target(key)
        nbytes = target.look()
        if nbytes > max_nbytes:
            raise LimitExceeded(f"{self._border.path(key)}: expected at most {max_nbytes} bytes, found {nbytes}. Check the path")
        data = target.read(0, nbytes)
        if len(data) != nbytes:
            raise StorageError(
                f"{self._border.path(key)}: expected {nbytes} bytes, found {len(data)}. It was cut or replaced: try again",
                file=key,
            )
        return data

    def open_blob(self, key: str) -> FsspecBlobReader:
        """Look a blob up for ranged reads, each of which is one request and a look whether the blob is still the same."""
        return FsspecBlobReader(self._target(key))

    def list(self, prefix: str) -> Listing:
        """Entries and prefixes directly below `prefix`, asked of the backend anew. Names that are no keys are left out."""
        path = self._path("/".join(split_prefix(prefix)))
        try:
            found = self._border.ask("list", prefix, partial(self._ask_for_listing, path))
        except BlobNotFound:
            return Listing((), ())
        return _to_listing(found, path, prefix)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete blobs one by one, in this order; a directory if the backend has any and removes none that is not empty."""
        for key in keys:
            if not key.endswith("/"):
                with suppress(BlobNotFound):
                    self._target(key).remove()
                    self._border.announce("deleted", key)
                continue
            path = self._path("/".join(split_prefix(key)))
            if self._traits.safe_rmdir:
                with suppress(BlobNotFound):
                    self._border.ask("remove", key, partial(self._remove_directory, path))

    def now_s(self) -> float:
        """This host's clock, for few backends tell theirs: compare with wide margins."""
        return time.time()

    def free_nbytes(self) -> int | None:
        """Not known."""
        return None

    def _make_directories(self, path: str) -> None:
        with self._instances.lent() as filesystem:
            filesystem.makedirs(path, exist_ok=True)

    def _remove_directory(self, path: str) -> None:
        with self._instances.lent() as filesystem:
            if not filesystem.ls(path, detail=False):
                filesystem.rmdir(path)

    def _ask_for_listing(self, path: str) -> Sequence[Mapping[str, Any]]:
        with self._instances.lent() as filesystem:
            filesystem.invalidate_cache()
            found: Sequence[Mapping[str, Any]] = filesystem.ls(path, detail=True)
            return found

    def _target(self, key: str) -> Target:
        split_key(key)
        return Target(self._instances, self._traits, self._border, self._path(key), key)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root


def _to_listing(found: Sequence[Mapping[str, Any]], path: str, prefix: str) -> Listing:
    entries: list[Entry] = []
    prefixes: set[str] = set()
    for info in found:
        parent, _, name = str(info["name"]).strip("/").rpartition("/")
        if parent != path.strip("/") or not is_key(name) or info.get("islink"):
            continue  # a mark of the prefix itself, a blob of the prefix's name, or nothing that anyshard could have made
        if info.get("type") == "directory":
            prefixes.add(f"{prefix}{name}/")
        elif info.get("type") == "file":
            entries.append(Entry(prefix + name, int(info.get("size") or 0), _find_modified_s(info)))
    return Listing(tuple(sorted(entries, key=lambda entry: entry.key)), tuple(sorted(prefixes)))


def _find_modified_s(info: Mapping[str, Any]) -> float:
    """When a blob was written, as far as the backend tells; else now, so that nothing is ever taken for old."""
    for value in (info[name] for name in _TIMES if info.get(name)):
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, str):
            with suppress(ValueError):
                return datetime.fromisoformat(value).timestamp()
        if isinstance(value, int | float):
            return float(value)
    milliseconds = info.get("modificationTime")
    return milliseconds / 1000 if isinstance(milliseconds, int) else time.time()
