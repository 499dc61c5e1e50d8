"""The store of one prefix of one bucket."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, final

import obstore

from anyshard.errors import BlobNotFound
from anyshard.monitor.events import SILENT, Emitter
from anyshard.options import GIB, MIB
from anyshard.storage.keys import check_token, is_key, split_key, split_prefix
from anyshard.storage.object_store.asking import Asking
from anyshard.storage.object_store.client import Client
from anyshard.storage.object_store.download import ObjectBlobReader, open_reader
from anyshard.storage.object_store.upload import ObjectBlobWriter
from anyshard.storage.protocol import Capabilities, Entry, Listing

_BATCH: Final = 1000  # keys of one request
_DELETE_ROUNDS: Final = 3


@final
class ObjectStore:
    """A `Store` on one prefix of a bucket. `create` asks for create-if-absent; whether that is heard, commit/guard.py finds out.

    It belongs to the process that has used it first: in a fork of that one every verb is a `StorageError`.
    """

    def __init__(self, client: Client, *, events: Emitter = SILENT) -> None:
        self._client = client
        self._asking = Asking(client, events=events)

    @property
    def client(self) -> Client:
        """What it reaches the bucket with; holds credentials."""
        return self._client

    @property
    def url(self) -> str:
        """The URL without its query."""
        return self._client.place.url

    @property
    def site(self) -> str:
        """Service, server and bucket, as options and environment name them together."""
        return f"{self._client.place.service}:{self._client.address.site}"

    @property
    def capabilities(self) -> Capabilities:
        """Writes front to back; `guarded` is False once the store has refused create-if-absent, before that not known."""
        return Capabilities(
            parallel_writes=False,
            guarded=False if self._asking.is_unguarded else None,
            max_blob_nbytes=GIB,
            streams_per_blob=self._client.settings.streams_per_blob,
            read_gap_nbytes=MIB,
        )

    def prepare(self, prefixes: Sequence[str]) -> None:
        """Check the prefixes; there is nothing to make, and whether the bucket is there shows at the first request."""
        for prefix in prefixes:
            split_prefix(prefix)

    def create(self, key: str, data: bytes, *, token: str) -> None:
        """Create `key` by one conditional request. A store that refuses conditions is `StorageUnguarded`, and not asked again."""
        split_key(key)
        check_token(token)
        self._asking.create(key, data)

    def put(self, key: str, data: bytes, *, token: str) -> None:
        """Write `key` by one request."""
        split_key(key)
        check_token(token)
        self._asking.put(key, data)

    def create_blob(self, key: str, *, nbytes: int | None) -> ObjectBlobWriter:
        """Start a blob. One longer than a part is looked for first: objects put together of parts replace what is there."""
        split_key(key)
        return ObjectBlobWriter(self._asking, key, nbytes=nbytes)

    def read(self, key: str, *, max_nbytes: int) -> bytes:
        """All bytes of a small object; of a larger one nothing but its length is fetched."""
        split_key(key)
        return self._asking.read(key, max_nbytes=max_nbytes)

    def open_blob(self, key: str) -> ObjectBlobReader:
        """Open an object for ranged reads of the version that is there now."""
        split_key(key)
        return open_reader(self._asking, key)

    def list(self, prefix: str) -> Listing:
        """Objects and prefixes directly below `prefix`. Markers of directories and names that are no keys are not listed."""
        split_prefix(prefix)
        full_prefix = self._client.place.full_key(prefix)
        if full_prefix and not full_prefix.endswith("/"):
            full_prefix += "/"
        found = self._asking.ask("list", prefix, lambda store, _: obstore.list_with_delimiter(store, full_prefix or None))
        return _to_listing(found, full_prefix, prefix)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects. Those next to each other below prefixes go by the thousand, those at the top one by one, in order."""
        for key in keys:
            split_key(key.removesuffix("/"))
        objects = (key for key in keys if not key.endswith("/"))
        for is_below, run in itertools.groupby(objects, lambda key: "/" in key):
            rest = list(run)
            size = _BATCH if is_below else 1
            for begin in range(0, len(rest), size):
                self._delete_batch(rest[begin : begin + size])

    def now_s(self) -> float:
        """This host's clock, which may differ from the store's: compare with wide margins."""
        return time.time()

    def free_nbytes(self) -> int | None:
        """Not known."""
        return None

    def _delete_batch(self, keys: Sequence[str]) -> None:
        """Azure and Google Cloud Storage count a missing object as an error, after which others may be left."""
        for _ in range(_DELETE_ROUNDS):
            try:
                self._delete_at_once(keys)
            except BlobNotFound:
                keys = self._find_left(keys)
            else:
                return
            if not keys:
                return
        for key in keys:
            with suppress(BlobNotFound):
                self._delete_at_once((key,))

    def _delete_at_once(self, keys: Sequence[str]) -> None:
        full_keys = [self._client.place.full_key(key) for key in keys]
        self._asking.ask("delete", keys[0], lambda store, _: obstore.delete(store, full_keys))

    def _find_left(self, keys: Sequence[str]) -> Sequence[str]:
        prefixes = dict.fromkeys(key[: key.rfind("/") + 1] for key in keys)
        left = {entry.key for prefix in prefixes for entry in self.list(prefix).entries}
        return [key for key in keys if key in left]


def _to_listing(found: Any, full_prefix: str, prefix: str) -> Listing:
    entries = []
    for item in found["objects"]:
        name = item["path"].removeprefix(full_prefix)
        if item["path"].startswith(full_prefix) and "/" not in name and is_key(name):
            entries.append(Entry(prefix + name, item["size"], item["last_modified"].timestamp()))
    names = (path.removeprefix(full_prefix).rstrip("/") for path in found["common_prefixes"] if path.startswith(full_prefix))
    prefixes = {f"{prefix}{name}/" for name in names if "/" not in name and is_key(name)}
    return Listing(tuple(sorted(entries, key=lambda entry: entry.key)), tuple(sorted(prefixes)))
