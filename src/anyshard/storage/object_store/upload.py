"""Blobs being written to an object store: short ones as one request, longer ones as parts that fly while the next one fills."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self, final

import obstore

from anyshard.errors import BlobNotFound, LimitExceeded, StorageError, StorageUnavailable
from anyshard.options import MIB
from anyshard.storage.buffers import flat_bytes
from anyshard.storage.coverage import Coverage
from anyshard.storage.object_store.asking import Asking
from anyshard.storage.object_store.faults import Kind, read_fault, to_error
from anyshard.storage.object_store.forks import claim_runtime, is_foreign, keep_in_forks
from anyshard.storage.object_store.s3_uploads import abort_uploads
from anyshard.storage.retry import Request

logger = logging.getLogger(__name__)

_MIN_PART_NBYTES: Final = 16 * MIB
_MAX_PART_NBYTES: Final = 256 * MIB
_USUAL_PARTS: Final = 200
_MAX_PARTS: Final = 10_000


def choose_part_nbytes(nbytes: int | None, asked: int | None) -> int:
    """The length of all parts but the last of a blob of `nbytes`: what was asked for, else about a 200th of it."""
    if asked is not None:
        return asked
    whole_mib = -(-(nbytes or 0) // (_USUAL_PARTS * MIB)) * MIB
    return min(max(whole_mib, _MIN_PART_NBYTES), _MAX_PART_NBYTES)


@final
class ObjectBlobWriter:
    """A `BlobWriter` whose bytes come front to back. Up to one part it is one request at `finish`; a longer one goes in parts.

    It holds at most `streams_per_blob` parts: one that fills and those under way.
    """

    def __init__(self, asking: Asking, key: str, *, nbytes: int | None) -> None:
        settings = asking.client.settings
        self._asking = asking
        self._key = key
        self._coverage = Coverage(key, nbytes)
        self._end = 0
        self._part_nbytes = choose_part_nbytes(nbytes, settings.part_nbytes)
        self._pending = bytearray()
        self._parts: _Parts | None = None
        self._check_length(nbytes or 0)
        if nbytes is not None and nbytes > self._part_nbytes:
            self._parts = self._open_parts()

    def write_at(self, position: int, buffer: memoryview) -> None:
        """Take all of `buffer`, which is copied; waits while as many parts as may are under way."""
        view = flat_bytes(buffer)
        claim_runtime(self._asking.client.place.url, file=self._key)
        self._coverage.check(position, view.nbytes)
        if position != self._end:
            raise StorageError(
                f"{self._key}: expected the next write at {self._end}, found one at {position}. Objects are written front to "
                "back: this is a defect of the caller",
                file=self._key,
            )
        self._check_length(position + view.nbytes)
        if self._parts is None and position + view.nbytes > self._part_nbytes:
            self._parts = self._open_parts()
            self._parts.write(memoryview(self._pending))
            self._pending = bytearray()
        if self._parts is None:
            self._pending += view
        else:
            self._parts.write(view)
        self._end += view.nbytes
        self._coverage.add(position, view.nbytes)

    def finish(self) -> None:
        """Make the object; it is there with its length when this returns."""
        nbytes = self._coverage.check_complete()
        if self._parts is None:
            self._asking.create_or_put(self._key, self._pending)
        else:
            self._parts.close(nbytes)
        self._asking.events.event("storage.blob.durable", nbytes=nbytes, file=self._key)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._pending = bytearray()
        if self._parts is not None:
            self._parts.give_up()

    def _open_parts(self) -> _Parts:
        self._asking.check_absent(self._key)
        return _Parts(self._asking, self._key, self._part_nbytes)

    def _check_length(self, nbytes: int) -> None:
        most = self._part_nbytes * _MAX_PARTS
        if nbytes > most:
            raise LimitExceeded(
                f"{self._asking.name(self._key)}: expected at most {_MAX_PARTS} parts of {self._part_nbytes} bytes, which object "
                f"stores take, found a blob of {nbytes} bytes or more. Raise part_nbytes (storage_options), lower max_blob_nbytes"
            )


@final
class _Parts:
    """One upload in parts. It is given up unless `close` has returned."""

    def __init__(self, asking: Asking, key: str, part_nbytes: int) -> None:
        client = asking.client
        self._asking = asking
        self._key = key
        self._part_nbytes = part_nbytes
        self._is_open = True
        self._is_closing = False
        concurrency = max(1, client.settings.streams_per_blob - 1)
        full_key = client.place.full_key(key)
        self._file: Any = self._translated(
            lambda: obstore.open_writer(client.for_uploads(key), full_key, buffer_size=part_nbytes, max_concurrency=concurrency)
        )
        keep_in_forks(self, self._file)

    def write(self, view: memoryview) -> None:
        """Take these bytes; returns when they are copied.

        They go to obstore by parts: it waits for parts under way between two writes, not within one.
        """
        for begin in range(0, view.nbytes, self._part_nbytes):
            # obstore copies nothing: it keeps what it is given until that part is sent, long after `write` has returned.
            own = bytes(view[begin : begin + self._part_nbytes])
            self._translated(functools.partial(self._file.write, own))

    def close(self, nbytes: int) -> None:
        """Put the parts together. If the answer to that is lost, or is no answer, what is there decides."""
        claim_runtime(self._asking.client.place.url, file=self._key)
        self._is_closing = True
        try:
            self._translated(self._file.close)
        except StorageError:
            if not self._is_there(nbytes):
                raise
        else:
            self._check_is_there(nbytes)
        self._is_open = False

    def give_up(self) -> None:
        """Remove the parts sent so far, as far as the store lets us; nothing if `close` has returned."""
        if not self._is_open or is_foreign():
            return
        self._is_open = False
        try:
            if not self._is_closing:
                self._file.__exit__(RuntimeError, RuntimeError("given up"), None)
            elif self._asking.client.place.service == "s3":  # obstore aborts nothing once it was asked to close
                abort_uploads(self._asking.client, -math.inf, key=self._key)
        except Exception as error:  # noqa: BLE001 - nothing is lost but room, and the error on the way out counts more
            logger.warning(
                "%s: parts of an upload that was given up may be left: %s. A lifecycle rule or abort_stale_uploads removes them",
                self._asking.name(self._key),
                read_fault(error).text,
            )

    def _is_there(self, nbytes: int) -> bool:
        with contextlib.suppress(StorageError):
            return self._asking.head(self._key).nbytes == nbytes
        return False

    def _check_is_there(self, nbytes: int) -> None:
        try:
            found: object = self._asking.head(self._key).nbytes
        except BlobNotFound:
            found = "nothing"
        if found != nbytes:
            raise StorageUnavailable(
                f"{self._asking.name(self._key)}: expected an object of {nbytes} bytes, found {found}, though the store had said "
                "that the upload is complete. Send it again",
                file=self._key,
            )

    def _translated(self, call: Callable[[], Any]) -> Any:
        """What `call` returns. obstore has tried each request again by itself, so what is transient here has failed for good."""
        try:
            return call()
        except StorageError:
            raise
        except Exception as found:  # noqa: BLE001 - translated below, outside of this block: its text must not be chained
            error = found.with_traceback(None)  # as in storage/retry.py
        fault = read_fault(error)
        client = self._asking.client
        name = self._asking.name(self._key)
        if fault.kind is Kind.EXPIRED:
            client.renew(math.inf)
        if fault.kind in (Kind.BUSY, Kind.EXPIRED):
            settings = client.settings
            raise StorageUnavailable(
                f"could not upload {name}: {fault.text}. Each request of an upload is tried up to {settings.policy.max_attempts} "
                f"times while {settings.policy.budget_s:g} s since its first try have not passed, each time for at most "
                f"{settings.request_timeout_s:g} s. Check the store and the network, then try again",
                file=self._key,
                attempts=settings.policy.max_attempts,
            )
        if fault.kind is Kind.MISSING:  # of an upload that somebody aborted: an upload id that is not known any more
            raise StorageUnavailable(f"could not upload {name}: {fault.text}: the upload was removed meanwhile", file=self._key)
        raise to_error(fault, Request("upload", name, self._key))
