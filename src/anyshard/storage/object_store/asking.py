"""Requests about single objects: each by key, each tried again, each error one of ours."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, TypeVar, final

import obstore

from anyshard.errors import BlobExists, BlobNotFound, LimitExceeded, StorageDenied, StorageUnguarded
from anyshard.monitor.events import Emitter
from anyshard.storage.object_store.client import Client
from anyshard.storage.retry import Request, Retrier

T = TypeVar("T")

_NOT_WHOLE: Final = "the body of an answer was cut short"


@dataclass(frozen=True, slots=True)
class Facts:
    """What a store says about an object."""

    nbytes: int
    etag: str | None
    modified: datetime

    def is_same(self, other: Facts) -> bool:
        """Whether both are of one version of the object, as far as a store can tell."""
        if self.etag and other.etag:
            return (self.etag, self.nbytes) == (other.etag, other.nbytes)
        return (self.modified, self.nbytes) == (other.modified, other.nbytes)


def read_facts(meta: Any) -> Facts:
    """The facts in what obstore tells of an object."""
    return Facts(meta["size"], meta["e_tag"], meta["last_modified"])


@final
class Asking:
    """Sends requests for one store object. Remembers when the store has refused create-if-absent."""

    def __init__(self, client: Client, *, events: Emitter) -> None:
        self.client = client
        self.events = events
        self.is_unguarded = False
        self._retrier = Retrier(client.settings.policy, client, events=events)

    def name(self, key: str) -> str:
        """The full name of `key`, for messages only."""
        url = self.client.place.url
        return f"{url}/{key}" if key else url

    def ask(self, verb: str, key: str, call: Callable[[Any, str], T]) -> T:
        """What `call` returns, given obstore's object and the name of `key` in the bucket; tried again where that helps."""
        full_key = self.client.place.full_key(key)
        request = Request(verb, self.name(key), key)
        return self._retrier.run(lambda: self.client.send(lambda store: call(store, full_key), key), request)

    def head(self, key: str) -> Facts:
        """What is at `key`; `BlobNotFound` if nothing."""
        return read_facts(self.ask("look up", key, obstore.head))

    def check_bucket(self) -> None:
        """`StorageError` if the bucket is missing, which the answer about an object does not always say."""

        def list_little(store: Any, full_key: str) -> object:
            return obstore.list_with_delimiter(store, f"{full_key}none/none".lstrip("/"))

        with suppress(StorageDenied):
            self.ask("list", "", list_little)

    def check_absent(self, key: str) -> None:
        """`BlobExists` if something is at `key`."""
        with suppress(BlobNotFound):
            self.head(key)
            raise BlobExists(f"expected nothing at {self.name(key)}, found an object. Nothing was overwritten", file=key)

    def read(self, key: str, *, max_nbytes: int) -> bytes:
        """All bytes at `key`, of which no more than `max_nbytes` are ever fetched."""

        def get(store: Any, full_key: str) -> bytes:
            answer = obstore.get(store, full_key)
            nbytes = answer.meta["size"]
            if nbytes > max_nbytes:
                raise LimitExceeded(
                    f"{self.name(key)}: expected at most {max_nbytes} bytes, found {nbytes}. Nothing that anyshard wrote here is "
                    "that large: check the path, or copy the object again from its origin"
                )
            data = bytes(answer.bytes())
            if len(data) != nbytes:
                raise ConnectionError(_NOT_WHOLE)
            return data

        return self.ask("read", key, get)

    def put(self, key: str, data: bytes | bytearray) -> None:
        """Write `key`, whether it is there or not."""
        self.ask("write", key, lambda store, full_key: obstore.put(store, full_key, data, use_multipart=False, mode="overwrite"))

    def create(self, key: str, data: bytes | bytearray) -> None:
        """Write `key` if nothing is there.

        An attempt whose answer was lost may have written it: "exists" is then answered by what is there. `StorageUnguarded` if
        the store refuses the condition, without asking again from then on.
        """
        num_attempts = 0

        def put(store: Any, full_key: str) -> None:
            nonlocal num_attempts
            num_attempts += 1
            obstore.put(store, full_key, data, use_multipart=False, mode="create")

        if self.is_unguarded:
            raise StorageUnguarded(f"could not create {self.name(key)}: the store has no create-if-absent", file=key)
        try:
            self.ask("create", key, put)
        except StorageUnguarded:
            self.is_unguarded = True
            raise
        except BlobExists:
            if num_attempts == 1 or not self._holds(key, data):
                raise

    def create_or_put(self, key: str, data: bytes | bytearray) -> None:
        """Write `key` if nothing is there; where the store has no such condition, look first."""
        if not self.is_unguarded:
            with suppress(StorageUnguarded):
                self.create(key, data)
                return
        self.check_absent(key)
        self.put(key, data)

    def _holds(self, key: str, data: bytes | bytearray) -> bool:
        try:
            return self.read(key, max_nbytes=len(data)) == data
        except (LimitExceeded, BlobNotFound):
            return False
