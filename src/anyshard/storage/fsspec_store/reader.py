"""Reading one blob by ranges, and telling that it was replaced meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self, final

from anyshard.errors import BlobNotFound, CheckpointReplaced, StorageError
from anyshard.storage.buffers import flat_bytes
from anyshard.storage.fsspec_store.target import Target, blob_nbytes

# What changes when a key gets other content. The time of creation is the last resort: a disk changes it for a new link too.
_MARKS = (
    "ETag",
    "etag",
    "generation",
    "VersionId",
    "md5Hash",
    "ino",
    "mtime",
    "LastModified",
    "last_modified",
    "modificationTime",
)


@final
class FsspecBlobReader:
    """A `BlobReader` of single ranged reads, each from any thread; what was read is compared with the blob as it was opened."""

    def __init__(self, target: Target) -> None:
        self._target = target
        info = target.find_info()
        self._nbytes = blob_nbytes(info, target.border, target.key)
        self._mark = mark_of(info)

    @property
    def nbytes(self) -> int:
        """Length of the blob when it was opened."""
        return self._nbytes

    def read_into(self, position: int, buffer: memoryview) -> None:
        """Fill all of `buffer` by one request, and look whether the blob is still the one that was opened."""
        view = flat_bytes(buffer)
        stop = position + view.nbytes
        if position < 0 or stop > self._nbytes:
            raise self._wrong(view.nbytes, position, f"a blob of {self._nbytes} bytes")
        if not view.nbytes:
            return
        try:
            data = self._target.read(position, view.nbytes)
            same = self._mark == mark_of(self._target.find_info())
        except BlobNotFound as error:
            raise self._replaced("removed") from error
        if not same:
            raise self._replaced("replaced")
        if len(data) != view.nbytes:
            raise self._wrong(view.nbytes, position, f"{len(data)} bytes")
        view[:] = data

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        return None

    def _wrong(self, nbytes: int, position: int, found: str) -> StorageError:
        return StorageError(
            f"{self._target.name}: expected {nbytes} bytes at {position}, found {found}. "
            "It was cut, or is not the blob that its manifest names",
            file=self._target.key,
        )

    def _replaced(self, how: str) -> CheckpointReplaced:
        return CheckpointReplaced(
            f"{self._target.name}: expected the blob that was opened, found it {how} while it was being read. "
            "Open the checkpoint again"
        )


def mark_of(info: Mapping[str, Any]) -> tuple[str, ...]:
    """What tells one content of a key from the next, as far as the backend has such a thing."""
    marks = tuple(str(info[name]) for name in _MARKS if info.get(name))
    return (str(info.get("size")), *(marks or (str(info.get("created")),)))
