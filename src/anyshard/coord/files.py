"""The file key-value store: one small file per key in a directory that all ranks see, for jobs without a store of torch."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from anyshard.errors import KeyValueStoreLost


class FileKeyValueStore:
    """A `KeyValueStore` in `directory`, which must be there, belong to this run of the job alone and take hard links.

    A network file system must show new files at once (NFS: `lookupcache=none` or `noac`), or every wait lasts as long as its
    caches do. Nothing is synced: what the ranks agree on matters to processes that are alive.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)

    @property
    def can_hang(self) -> bool:
        """On a network file system whose server is gone."""
        return True

    def set(self, key: str, value: bytes) -> None:
        """Write a file beside and rename it over the key's."""
        with self._written(key, value) as temporary:
            temporary.replace(self._path(key))

    def get(self, key: str) -> bytes | None:
        """Read the key's file."""
        try:
            with self._answering(key):
                return self._path(key).read_bytes()
        except FileNotFoundError:
            return None

    def get_many(self, keys: Sequence[str]) -> tuple[bytes | None, ...]:
        """One after the other."""
        return tuple(map(self.get, keys))

    def set_if_absent(self, key: str, value: bytes) -> bytes:
        """Write a file beside and link it to the key's name, which only one can."""
        with self._written(key, value) as temporary:
            while True:
                try:
                    self._path(key).hardlink_to(temporary)
                    return value
                except FileExistsError:
                    stored = self.get(key)
                    if stored is not None:  # else it was deleted a moment ago
                        return stored

    def delete(self, key: str) -> None:
        """Remove the key's file."""
        with self._answering(key):
            self._path(key).unlink(missing_ok=True)

    def clone(self) -> FileKeyValueStore:
        """Another object over the same directory."""
        return FileKeyValueStore(self._directory)

    def _path(self, key: str) -> Path:
        return self._directory / quote(key, safe="")

    @contextmanager
    def _written(self, key: str, value: bytes) -> Iterator[Path]:
        temporary = self._directory / f".{secrets.token_hex(8)}.tmp"
        with self._answering(key):
            try:
                temporary.write_bytes(value)
                yield temporary
            finally:
                temporary.unlink(missing_ok=True)

    @contextmanager
    def _answering(self, key: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            if self._directory.is_dir():
                raise
            raise KeyValueStoreLost(
                f"expected the directory {self._directory}, found none. Make it before the job starts", {}
            ) from None
        except KeyValueStoreLost:
            raise
        except OSError as error:
            raise KeyValueStoreLost(
                f"expected to reach the key {key} in {self._directory}, found {type(error).__name__}: {error}. The directory "
                "must be writable, on every host, and take hard links",
                {},
            ) from error
