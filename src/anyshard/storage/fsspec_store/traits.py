"""What kind of store a filesystem class of fsspec is, as far as the class itself tells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

_BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "oci", "tos", "tosfs", "hf"})
_SAFE_RMDIR = frozenset({"sftp", "ssh", "ftp", "smb"})  # on HDFS, for one, it takes all that is in a directory along


@dataclass(frozen=True, slots=True)
class Traits:
    """What a filesystem class can do.

    `in_memory`, `on_disk`: fsspec's own two classes. `bucket`: keys without directories. `safe_rmdir`: a directory that is not
    empty is not removed. `whole`: the class hands blobs over in its own way, so that readers see all of one or nothing, and a
    taken key may be refused. `renames`: a file can be moved into place. `is_async`: requests run in fsspec's own thread.
    """

    in_memory: bool
    on_disk: bool
    bucket: bool
    safe_rmdir: bool
    whole: bool
    renames: bool
    is_async: bool

    @property
    def shared(self) -> bool:
        """Whether one object of the class may serve several threads at once."""
        return self.is_async or self.in_memory or self.on_disk

    @property
    def repeats(self) -> bool:
        """Whether the client makes requests again by itself, creates too: all those for object stores do."""
        return self.bucket

    @property
    def guarded(self) -> bool | None:
        """False where it is known that a taken key is not refused: fsspec's own `pipe_file` looks and then writes. Else None."""
        return None if self.in_memory or self.on_disk or self.whole else False


def find_traits(kind: type[Any], scheme: str) -> Traits:
    """The traits of `kind`, which is what fsspec has for `scheme`."""
    in_memory, on_disk = issubclass(kind, MemoryFileSystem), issubclass(kind, LocalFileSystem)
    return Traits(
        in_memory=in_memory,
        on_disk=on_disk,
        bucket=scheme in _BUCKETS,
        safe_rmdir=in_memory or on_disk or scheme in _SAFE_RMDIR,
        whole=_has_own(kind, "pipe_file"),
        renames=_has_own(kind, "mv"),
        is_async=issubclass(kind, AsyncFileSystem),
    )


def _has_own(kind: type[Any], verb: str) -> bool:
    """Whether `kind` does `verb` in its own way, and not in one that fsspec has for those that lack it."""
    if issubclass(kind, AsyncFileSystem) and hasattr(AsyncFileSystem, f"_{verb}"):
        return getattr(kind, f"_{verb}") is not getattr(AsyncFileSystem, f"_{verb}")
    return getattr(kind, verb) is not getattr(AbstractFileSystem, verb)
