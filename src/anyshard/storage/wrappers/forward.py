"""The wrapper that changes nothing: every verb of the inner store goes through one method, `around`, which others override."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

from anyshard.storage.protocol import BlobReader, BlobWriter, Capabilities, Listing, Store

T = TypeVar("T")


class Verb(enum.StrEnum):
    """What a store, its writers and its readers are asked to do."""

    PREPARE = "prepare"
    CREATE = "create"
    PUT = "put"
    CREATE_BLOB = "create_blob"
    WRITE_AT = "write_at"
    FINISH = "finish"
    READ = "read"
    OPEN_BLOB = "open_blob"
    READ_INTO = "read_into"
    LIST = "list"
    DELETE = "delete"
    FREE_NBYTES = "free_nbytes"


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a verb. `nbytes` is what it moves as far as known before; `position` and `buffer` are those of ranged verbs."""

    verb: Verb
    key: str
    nbytes: int = 0
    position: int = 0
    buffer: memoryview | None = None


class WrapperStore:
    """A `Store` that forwards to another one. Subclasses override `around`, which sees every call and runs it (or does not)."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner

    def around(self, call: Call, run: Callable[[], T]) -> T:
        """Do the call: `run()` asks the inner store. Called on the caller's thread, from several threads at once."""
        return run()

    @property
    def url(self) -> str:
        """That of the inner store."""
        return self.inner.url

    @property
    def site(self) -> str:
        """That of the inner store."""
        return self.inner.site

    @property
    def capabilities(self) -> Capabilities:
        """Those of the inner store."""
        return self.inner.capabilities

    def prepare(self, prefixes: Sequence[str]) -> None:
        """Forward, with the prefixes joined by spaces as the key of the call."""
        self.around(Call(Verb.PREPARE, " ".join(prefixes)), lambda: self.inner.prepare(prefixes))

    def create(self, key: str, data: bytes, *, token: str) -> None:
        """Forward."""
        self.around(Call(Verb.CREATE, key, len(data)), lambda: self.inner.create(key, data, token=token))

    def put(self, key: str, data: bytes, *, token: str) -> None:
        """Forward."""
        self.around(Call(Verb.PUT, key, len(data)), lambda: self.inner.put(key, data, token=token))

    def create_blob(self, key: str, *, nbytes: int | None) -> BlobWriter:
        """Forward; the writer forwards `write_at` and `finish` through `around` too."""
        writer = self.around(Call(Verb.CREATE_BLOB, key), lambda: self.inner.create_blob(key, nbytes=nbytes))
        return _WrapperWriter(self, key, writer)

    def read(self, key: str, *, max_nbytes: int) -> bytes:
        """Forward."""
        return self.around(Call(Verb.READ, key), lambda: self.inner.read(key, max_nbytes=max_nbytes))

    def open_blob(self, key: str) -> BlobReader:
        """Forward; the reader forwards `read_into` through `around` too."""
        return _WrapperReader(self, key, self.around(Call(Verb.OPEN_BLOB, key), lambda: self.inner.open_blob(key)))

    def list(self, prefix: str) -> Listing:
        """Forward."""
        return self.around(Call(Verb.LIST, prefix), lambda: self.inner.list(prefix))

    def delete(self, keys: Sequence[str]) -> None:
        """Forward key by key, so that a fault can leave some of them."""
        for key in keys:
            self._delete_one(key)

    def now_s(self) -> float:
        """That of the inner store."""
        return self.inner.now_s()

    def free_nbytes(self) -> int | None:
        """Forward."""
        return self.around(Call(Verb.FREE_NBYTES, ""), self.inner.free_nbytes)

    def _delete_one(self, key: str) -> None:
        self.around(Call(Verb.DELETE, key), lambda: self.inner.delete((key,)))


class _WrapperWriter:
    def __init__(self, store: WrapperStore, key: str, inner: BlobWriter) -> None:
        self._store = store
        self._key = key
        self._inner = inner

    def write_at(self, position: int, buffer: memoryview) -> None:
        call = Call(Verb.WRITE_AT, self._key, buffer.nbytes, position, buffer)
        self._store.around(call, lambda: self._inner.write_at(position, buffer))

    def finish(self) -> None:
        self._store.around(Call(Verb.FINISH, self._key), self._inner.finish)

    def __enter__(self) -> Self:
        self._inner.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._inner.__exit__(kind, error, traceback)


class _WrapperReader:
    def __init__(self, store: WrapperStore, key: str, inner: BlobReader) -> None:
        self._store = store
        self._key = key
        self._inner = inner

    @property
    def nbytes(self) -> int:
        return self._inner.nbytes

    def read_into(self, position: int, buffer: memoryview) -> None:
        call = Call(Verb.READ_INTO, self._key, buffer.nbytes, position, buffer)
        self._store.around(call, lambda: self._inner.read_into(position, buffer))

    def __enter__(self) -> Self:
        self._inner.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._inner.__exit__(kind, error, traceback)
