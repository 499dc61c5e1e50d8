"""A store whose root lies below that of another one: a step of a run, with the client and the limits of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar, final

from anyshard.errors import StorageError
from anyshard.storage.keys import split_key
from anyshard.storage.protocol import BlobReader, BlobWriter, Capabilities, Listing, Store
from anyshard.storage.wrappers.forward import Call, Verb, WrapperStore

T = TypeVar("T")


@final
class StoreBelow(WrapperStore):
    """The keys of `outer` that begin with `prefix` (which ends in `/`), without it. Messages name them by their full URL."""

    def __init__(self, outer: Store, prefix: str) -> None:
        super().__init__(_Keys(outer, prefix))
        self._prefix = prefix

    def around(self, call: Call, run: Callable[[], T]) -> T:
        """Do the call; errors name the key as this store has it."""
        try:
            return run()
        except StorageError as error:
            error.file = error.file.removeprefix(self._prefix)
            raise

    def delete(self, keys: Sequence[str]) -> None:
        """Forward all keys at once, as many stores delete them."""
        self.around(Call(Verb.DELETE, keys[0] if keys else ""), partial(self.inner.delete, keys))


@final
class _Keys:
    """The same keys, but the errors name them as the outer store has them."""

    def __init__(self, outer: Store, prefix: str) -> None:
        self._outer = outer
        self._prefix = prefix
        self.url = f"{outer.url.rstrip('/')}/{prefix.rstrip('/')}"

    @property
    def site(self) -> str:
        return self._outer.site

    @property
    def capabilities(self) -> Capabilities:
        return self._outer.capabilities

    def prepare(self, prefixes: Sequence[str]) -> None:
        self._outer.prepare([self._prefix, *(self._prefix + prefix for prefix in prefixes)])

    def create(self, key: str, data: bytes, *, token: str) -> None:
        self._outer.create(self._key(key), data, token=token)

    def put(self, key: str, data: bytes, *, token: str) -> None:
        self._outer.put(self._key(key), data, token=token)

    def create_blob(self, key: str, *, nbytes: int | None) -> BlobWriter:
        return self._outer.create_blob(self._key(key), nbytes=nbytes)

    def read(self, key: str, *, max_nbytes: int) -> bytes:
        return self._outer.read(self._key(key), max_nbytes=max_nbytes)

    def open_blob(self, key: str) -> BlobReader:
        return self._outer.open_blob(self._key(key))

    def list(self, prefix: str) -> Listing:
        found, cut = self._outer.list(self._prefix + prefix), len(self._prefix)
        entries = tuple(replace(entry, key=entry.key[cut:]) for entry in found.entries)
        return Listing(entries, tuple(one[cut:] for one in found.prefixes))

    def delete(self, keys: Sequence[str]) -> None:
        self._outer.delete([self._key(key) for key in keys])

    def now_s(self) -> float:
        return self._outer.now_s()

    def free_nbytes(self) -> int | None:
        return self._outer.free_nbytes()

    def _key(self, key: str) -> str:
        split_key(key.removesuffix("/"))  # an empty one would be the prefix itself
        return self._prefix + key
