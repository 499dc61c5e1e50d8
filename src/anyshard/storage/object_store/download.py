"""Ranged reads of one object that stays the same, or is reported as replaced."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Final, Self, final

import numpy as np
import obstore
from obstore.exceptions import PreconditionError

from anyshard.errors import BlobNotFound, CheckpointReplaced, StorageError
from anyshard.options import MIB
from anyshard.storage.buffers import flat_bytes
from anyshard.storage.object_store.asking import Asking, Facts, read_facts

_PIECE_NBYTES: Final = 32 * MIB  # of one request: it is held a second time until it is copied, and sent whole again if it is cut


def open_reader(asking: Asking, key: str) -> ObjectBlobReader:
    """A reader of what is at `key` now; `BlobNotFound` if nothing, `StorageError` if the bucket is missing."""
    try:
        facts = asking.head(key)
    except BlobNotFound:
        asking.check_bucket()
        raise
    return ObjectBlobReader(asking, key, facts)


@final
class ObjectBlobReader:
    """A `BlobReader` that asks for the version it has opened: after a change or a deletion it is `CheckpointReplaced`."""

    def __init__(self, asking: Asking, key: str, facts: Facts) -> None:
        self._asking = asking
        self._key = key
        self._facts = facts
        # A weak tag matches nothing by the rules of HTTP.
        self._is_conditional = facts.etag is not None and not facts.etag.startswith("W/")

    @property
    def nbytes(self) -> int:
        """Length of the object when it was opened."""
        return self._facts.nbytes

    def read_into(self, position: int, buffer: memoryview) -> None:
        """Fill all of `buffer`; an answer that is not exactly these bytes of this version is never taken."""
        view = flat_bytes(buffer)
        if position < 0 or position + view.nbytes > self.nbytes:
            raise StorageError(
                f"{self._asking.name(self._key)}: expected a read within its {self.nbytes} bytes, found {view.nbytes} bytes at "
                f"{position}. It is shorter than the checkpoint says: damaged or replaced",
                file=self._key,
            )
        for begin in range(0, view.nbytes, _PIECE_NBYTES):
            self._read_piece(position + begin, view[begin : begin + _PIECE_NBYTES])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        return

    def _read_piece(self, position: int, view: memoryview) -> None:
        try:
            while not self._try_piece(position, view):
                # Some stores refuse the condition whatever the tag: what is there now tells whether this one is right.
                if not self._asking.head(self._key).is_same(self._facts):
                    raise self._replaced("another version")
                self._is_conditional = False
        except BlobNotFound as error:
            self._asking.check_bucket()
            raise self._replaced("nothing") from error

    def _try_piece(self, position: int, view: memoryview) -> bool:
        """Whether the bytes are there now; false if the store says that this version is not there any more."""
        is_conditional = self._is_conditional
        options: dict[str, Any] = {"range": (position, position + view.nbytes)}
        if is_conditional:
            options["if_match"] = self._facts.etag

        def get(store: Any, full_key: str) -> bool:
            try:
                answer = obstore.get(store, full_key, options=options)  # type: ignore[arg-type] # a dictionary is what it takes
            except PreconditionError:
                return False
            if not read_facts(answer.meta).is_same(self._facts):
                raise self._replaced("another version")
            body = np.frombuffer(memoryview(answer.bytes()), np.uint8)
            if tuple(answer.range) != options["range"] or body.nbytes != view.nbytes:
                raise ConnectionError(f"expected {view.nbytes} bytes, found an answer of {body.nbytes}")
            np.copyto(np.frombuffer(view, np.uint8), body)
            return True

        if self._asking.ask("read", self._key, get):
            return True
        if not is_conditional:
            raise self._replaced("another version")
        return False

    def _replaced(self, found: str) -> CheckpointReplaced:
        return CheckpointReplaced(
            f"{self._asking.name(self._key)}: expected the object that was opened, found {found}: it was replaced or deleted "
            "while it was read. Open the checkpoint again"
        )
