"""Stores of which it has been found out whether `create` can be relied upon, and what stands in for it where it cannot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from anyshard.errors import BlobExists, BlobNotFound, LimitExceeded, StorageUnavailable
from anyshard.storage.protocol import BlobReader, BlobWriter, Capabilities, Store
from anyshard.storage.wrappers.forward import Call, Verb, WrapperStore


class KnownStore(WrapperStore):
    """A store whose capabilities say whether it is `guarded`; all else is forwarded as it is, blobs at no cost."""

    def __init__(self, inner: Store, *, guarded: bool) -> None:
        super().__init__(inner)
        self._guarded = guarded

    @property
    def capabilities(self) -> Capabilities:
        """Those of the inner store, with what was found out."""
        return replace(self.inner.capabilities, guarded=self._guarded)

    def create_blob(self, key: str, *, nbytes: int | None) -> BlobWriter:
        """The writer of the inner store itself."""
        return self.inner.create_blob(key, nbytes=nbytes)

    def open_blob(self, key: str) -> BlobReader:
        """The reader of the inner store itself."""
        return self.inner.open_blob(key)

    def delete(self, keys: Sequence[str]) -> None:
        """Forward all keys at once, as many stores delete them."""
        self.around(Call(Verb.DELETE, keys[0] if keys else ""), partial(self.inner.delete, keys))


class UnguardedStore(KnownStore):
    """A store whose `create` looks, puts and looks again, since the one of the inner store cannot be relied upon.

    That catches every writer but one that is at it at the same moment: then the last `put` stays, and whoever reads its own
    bytes back before another one's `put` takes them for created. So a commit on it goes by further rules (commit/publish.py).
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner, guarded=False)

    def create(self, key: str, data: bytes, *, token: str) -> None:
        """Put `key` if it is absent and read it back. `BlobExists` if it was there, or is not what was put.

        `StorageUnavailable` if it is not to be read afterwards: it may come up later.
        """
        if self._find(key, data) is not None:
            raise BlobExists(f"expected nothing at {self.url}/{key}, found a blob. Nothing was overwritten", file=key)
        self.put(key, data, token=token)
        is_ours = self._find(key, data)
        if is_ours is None:
            raise StorageUnavailable(
                f"expected to read back {self.url}/{key}, which was just put, found nothing. Check that nobody deletes files "
                "there; if its reads lag behind its writes, the store will not do",
                file=key,
            )
        if not is_ours:
            raise BlobExists(
                f"expected to read back from {self.url}/{key} what was put there, found what another writer put at the same time",
                file=key,
            )

    def _find(self, key: str, data: bytes) -> bool | None:
        """Whether `key` has these bytes; None if it is not there."""
        try:
            return self.read(key, max_nbytes=len(data)) == data
        except LimitExceeded:
            return False
        except BlobNotFound:
            return None
