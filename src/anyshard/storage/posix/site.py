"""Where an operation happens, and the one border at which the operating system's errors become ours."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType

from anyshard.errors import AnyshardError, BlobExists, BlobNotFound, StorageDenied, StorageError, StorageFull
from anyshard.monitor.events import Emitter

_KINDS = MappingProxyType(
    {
        errno.ENOENT: BlobNotFound,
        errno.ENOTDIR: BlobNotFound,
        errno.EEXIST: BlobExists,
        errno.EACCES: StorageDenied,
        errno.EPERM: StorageDenied,
        errno.EROFS: StorageDenied,
        errno.ELOOP: StorageDenied,
        errno.ENOSPC: StorageFull,
        errno.EDQUOT: StorageFull,
    }
)

_ADVICE = MappingProxyType(
    {
        errno.ENOENT: "Check the path, that nobody removed it meanwhile, and that the directory is the same on all hosts",
        errno.ENOTDIR: "A file stands where a directory is needed: check the path",
        errno.EEXIST: "Nothing was overwritten",
        errno.EACCES: "Check owner and mode of the file and of the directories above it",
        errno.EPERM: "Check owner, mode and attributes of the file and of the directories above it",
        errno.EROFS: "The filesystem is mounted read-only: choose another place",
        errno.ELOOP: "Below a checkpoint's directory symbolic links are never followed: put the file itself there",
        errno.ENOSPC: "Free space or choose another place, then save again",
        errno.EDQUOT: "Free space, ask for a larger quota or choose another place, then save again",
        errno.EIO: "The device or the file server failed: look at its log (dmesg) before you trust it again",
        errno.ESTALE: "The file server replaced or removed the file: open the checkpoint again",
        errno.EMFILE: "Too many open files: raise `ulimit -n`",
        errno.EFBIG: "The file is larger than the filesystem or `ulimit -f` allows: lower max_blob_nbytes",
        errno.EISDIR: "Nothing of anyshard makes a directory of this name: move it away, then try again",
        errno.ENXIO: "Nothing of anyshard makes such a thing: move it away, then try again",
        errno.ENAMETOOLONG: "The filesystem takes no name of this length: use shorter section names or another place",
    }
)


@dataclass(frozen=True, slots=True)
class Site:
    """Where an operation of a local store happens: what errors and events name."""

    url: str
    key: str
    events: Emitter

    @property
    def path(self) -> str:
        """The full path, for messages only."""
        return f"{self.url}/{self.key}" if self.key else self.url

    def announce(self, point: str, *, nbytes: int | None = None) -> None:
        """Emit `storage.<point>` for this key."""
        self.events.event(f"storage.{point}", nbytes=nbytes, file=self.key)

    @contextmanager
    def translated(self, doing: str, *, needed: int | None = None) -> Iterator[None]:
        """Turn every `OSError` from inside into the `StorageError` that fits; ours pass."""
        try:
            yield
        except AnyshardError:
            raise
        except OSError as error:
            raise self._error(doing, error, needed) from error

    def _error(self, doing: str, error: OSError, needed: int | None) -> StorageError:
        code = error.errno or errno.EIO
        kind = _KINDS.get(code, StorageError)
        facts = f" ({space_facts(self.url, needed)})" if kind is StorageFull else ""
        advice = _ADVICE.get(code, "Look up this error of the operating system, then try again")
        return kind(f"could not {doing} {self.path}: {error.strerror or error}{facts}. {advice}", file=self.key, errno=code)


def space_facts(path: str, needed: int | None) -> str:
    """How much is needed and how much is free, in words; if it is inodes that are used up, that."""
    status = _read_status(path)
    if status is not None and status.f_files and not status.f_favail:
        return f"all {status.f_files} inodes are used up: remove files, however small"
    return f"needed {_in_words(needed)}, free {_in_words(free_nbytes(path))}"


def free_nbytes(path: str) -> int | None:
    """Bytes an ordinary user can still write where `path` is or would be; None if the filesystem cannot tell."""
    status = _read_status(path)
    return status.f_bavail * status.f_frsize if status is not None and status.f_blocks else None


def _read_status(path: str) -> os.statvfs_result | None:
    try:
        return os.statvfs(nearest_existing(path))
    except OSError:
        return None


def nearest_existing(path: str) -> str:
    """The path itself, or the deepest directory above it that is there."""
    while not os.path.lexists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return path


def _in_words(nbytes: int | None) -> str:
    return "an unknown number of bytes" if nbytes is None else f"{nbytes} bytes"
