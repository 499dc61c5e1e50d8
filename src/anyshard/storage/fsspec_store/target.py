"""One key of a store on fsspec, as a writer sees it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from anyshard.errors import BlobExists, BlobNotFound, StorageError
from anyshard.storage.fsspec_store.faults import Border
from anyshard.storage.fsspec_store.instances import Instances
from anyshard.storage.fsspec_store.traits import Traits
from anyshard.storage.fsspec_store.whole import create_whole, put_whole, read_at_most


@dataclass(frozen=True, slots=True)
class Target:
    """A key, where it is, and what its backend can do. Every verb raises a `StorageError`."""

    instances: Instances
    traits: Traits
    border: Border
    path: str
    key: str

    @property
    def name(self) -> str:
        """The full name, for messages only."""
        return self.border.path(self.key)

    def announce(self, point: str, nbytes: int | None = None) -> None:
        """Emit `storage.<point>` for this key."""
        self.border.announce(point, self.key, nbytes=nbytes)

    def look(self) -> int:
        """The length of what is there; `BlobNotFound` if nothing is."""
        return blob_nbytes(self.find_info(), self.border, self.key)

    def find_info(self) -> Mapping[str, Any]:
        """What the backend tells about what is there."""

        def send() -> Mapping[str, Any]:
            with self.instances.lent() as filesystem:
                info: Mapping[str, Any] = filesystem.info(self.path)
                return info

        return self.border.ask("look up", self.key, send)

    def identify(self) -> object:
        """The number of the file of this name on a disk."""
        return self.find_info()["ino"]

    def read(self, position: int, nbytes: int) -> bytes:
        """At most `nbytes` bytes from `position`."""

        def send() -> bytes:
            with self.instances.lent() as filesystem:
                if self.traits.is_async or self.traits.in_memory:
                    return bytes(filesystem.cat_file(self.path, start=position, end=position + nbytes))
                # That of other classes opens, seeks and reads as well, but the one for HDFS opens files that it cannot seek in.
                with filesystem.open(self.path, "rb") as file:
                    file.seek(position)
                    return read_at_most(file, nbytes)

        return self.border.ask("read", self.key, send) if nbytes else b""

    def create(self, data: bytes, *, token: str = "") -> None:
        """Create the key if absent; see `create_whole`.

        A client that repeats requests by itself meets its own blob when the first answer was lost: there equal bytes are ours.
        """

        def send() -> None:
            with self.instances.lent() as filesystem:
                create_whole(filesystem, self.path, data, traits=self.traits, temporary=self._temporary(token))

        try:
            self.border.create(self.key, send)
        except BlobExists:
            if not (self.traits.repeats and self._holds(data)):
                raise

    def put(self, data: bytes, *, token: str = "") -> None:
        """Write the key; see `put_whole`."""

        def send() -> None:
            with self.instances.lent() as filesystem:
                put_whole(filesystem, self.path, data, traits=self.traits, temporary=self._temporary(token))

        self.border.ask("write", self.key, send)

    def make_directory(self) -> None:
        """Make what is above the key, if the backend has directories."""

        def send() -> None:
            with self.instances.lent() as filesystem:
                filesystem.makedirs(self.path.rpartition("/")[0], exist_ok=True)

        if not self.traits.bucket:
            self.border.ask("make the directory of", self.key, send)

    def remove(self) -> None:
        """Remove what is there."""

        def send() -> None:
            with self.instances.lent() as filesystem:
                filesystem.rm_file(self.path)

        self.border.ask("remove", self.key, send)

    def refuse_taken(self) -> None:
        """`BlobExists` if something is there."""
        with suppress(BlobNotFound):
            self.look()
            raise self.taken()

    def taken(self) -> BlobExists:
        """The error for a key that somebody else has."""
        return BlobExists(f"expected nothing at {self.name}, found a blob. Nothing was overwritten", file=self.key)

    def _holds(self, data: bytes) -> bool:
        with suppress(BlobNotFound):
            return self.look() == len(data) and self.read(0, len(data)) == data
        return False

    def _temporary(self, token: str) -> str:
        return f"{self.path}.{token or secrets.token_hex(8)}.tmp"


def blob_nbytes(info: Mapping[str, Any], border: Border, key: str) -> int:
    """The length of the blob that `info` describes; anything that is no blob is a `StorageError`."""
    nbytes = info.get("size")
    if info.get("type", "file") != "file" or not isinstance(nbytes, int):
        raise StorageError(
            f"{border.path(key)}: expected a blob of known length, found a {info.get('type', 'thing')} of length {nbytes}. "
            "Check the path",
            file=key,
        )
    return nbytes
