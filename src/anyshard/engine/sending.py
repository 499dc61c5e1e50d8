"""Sending: one try to make a blob durable, by the threads of a crew.

    made      -> the first piece that comes has the store create the blob
    complete  -> all pieces but the last are written: the last one is digested, the tail joined to it, both are written
    over      -> acknowledged: the store has finished the blob, and it is closed; or failed: given up, and may be sent again

Only what the store says by `StorageUnavailable` makes a try fail. Any other error, and this one in the last try, ends the save.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import final

from anyshard.engine.blocks import Loan
from anyshard.engine.crew import Crew
from anyshard.engine.slots import BlobFrame
from anyshard.errors import BlobExists, StorageUnavailable
from anyshard.monitor.events import Emitter
from anyshard.records.digests import digest_bytes
from anyshard.records.manifest import BlobEntry
from anyshard.records.tail import BlobIdentity
from anyshard.storage.protocol import BlobWriter, Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Means:
    """What all tries of one save use."""

    store: Store
    crew: Crew
    loan: Loan
    events: Emitter


@dataclass(slots=True)
class Blob:
    """One blob on its way; its frame collects the digests, which are the same in every try."""

    name: str
    identity: BlobIdentity
    values: bytes | None
    frame: BlobFrame
    tail_digest: str = ""  # once a try has come to the tail
    num_tries: int = 0
    first_error: StorageUnavailable | None = None

    @property
    def nbytes(self) -> int:
        """Length of the whole blob."""
        return self.frame.blob_nbytes

    def make_entry(self) -> BlobEntry:
        """What the manifest says of it, once it is acknowledged."""
        identity = self.identity
        return BlobEntry(self.name, identity.section, identity.rank, self.nbytes, self.frame.tail_position, self.tail_digest)


@dataclass(frozen=True, slots=True)
class Piece:
    """The `nbytes` bytes of a blob from `start` on, at the beginning of `memory`: a block of the loan, or lent."""

    memory: memoryview
    start: int
    nbytes: int
    is_lent: bool = False


class _Over(Exception):
    """Not an error: the way out of a try that is over."""


@final
class Sending:
    """One try at a blob that comes in `num_pieces` pieces, which `send` takes in any order and from several threads.

    Blocks are released as soon as they are written, or the try is over. A try that was over before all pieces were sent takes the
    others and does nothing. `num_expected` counts pieces that are on their way, `num_blocks` the blocks among them.
    """

    def __init__(self, blob: Blob, means: Means, *, num_pieces: int, is_last_try: bool) -> None:
        self.blob = blob
        self.is_over = False
        self.has_failed = False
        self.num_expected = 0
        self.num_blocks = 0
        self._means = means
        self._is_last_try = is_last_try
        self._num_unwritten = num_pieces
        self._last_piece: Piece | None = None
        self._writer: BlobWriter | None = None
        self._closing = ExitStack()
        self._error: BaseException | None = None  # with which the writer is left
        self._num_inside = 0
        self._lock = threading.Lock()
        self._creating = threading.Lock()
        blob.num_tries += 1

    def expect(self, piece: Piece) -> None:
        """Count a piece that will be sent or released."""
        with self._lock:
            self.num_expected += 1
            self.num_blocks += not piece.is_lent

    def send(self, piece: Piece) -> None:
        """Digest and write a piece. The last one of the blob waits until all others are written, and ends it."""
        if not self._enter():
            self.release(piece)
            return
        try:
            if self._send(piece):
                self._finish()
        except _Over:
            pass
        finally:
            self._leave()

    def release(self, piece: Piece) -> None:
        """Give back the memory of a piece that is sent, or never will be."""
        with self._lock:
            self.num_expected -= 1
            self.num_blocks -= not piece.is_lent
        if not piece.is_lent:
            self._means.loan.release(piece.memory)

    def close(self) -> None:
        """Give up what is not finished, and so remove what was written of it; called when no thread is at work any more."""
        error = self._error
        try:
            with self._means.crew.call("close", file=self.blob.name, despite_failure=True):
                self._closing.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
        except Exception:
            logger.warning("%s could not be removed", self.blob.name, exc_info=True)

    # ------------------------------------------------------------------------------------------------- coming and going

    def _enter(self) -> bool:
        with self._lock:
            self._num_inside += not self.is_over
            return not self.is_over

    def _leave(self) -> None:
        """The last thread to leave a try that is over puts away what it held."""
        with self._lock:
            self._num_inside -= 1
            if self._num_inside or not self.is_over:
                return
        self._release_last()
        self.close()
        self._writer = None  # it may hold buffers of its own

    def _release_last(self) -> None:
        piece, self._last_piece = self._last_piece, None
        if piece is not None:
            self.release(piece)

    @contextmanager
    def _call(self, verb: str, *, position: int = 0) -> Iterator[None]:
        with self._means.crew.call(verb, file=self.blob.name, position=position):
            try:
                yield
            except StorageUnavailable as error:
                self._fail(error)

    def _fail(self, error: StorageUnavailable) -> None:
        blob = self.blob
        with self._lock:
            if self.is_over:  # another thread had one just before
                raise _Over
            self._error, self.is_over, self.has_failed = error, True, True
        blob.first_error = blob.first_error or error
        if not self._is_last_try:
            raise _Over
        times = "once" if blob.num_tries == 1 else f"{blob.num_tries} times, the last of which ended with: {error}"
        blob.first_error.add_note(f"{blob.name} was sent {times}")
        raise blob.first_error

    # --------------------------------------------------------------------------------------------------------- the bytes

    def _send(self, piece: Piece) -> bool:
        """Write a piece that is not the last one; true for the one call that finds none left."""
        if piece.start + piece.nbytes == self.blob.frame.tail_position:
            self._last_piece = piece
        else:
            try:
                self.blob.frame.digest(piece.memory, piece.start)
                self._write(piece.memory, piece.start)
            finally:
                self.release(piece)
        with self._lock:
            self._num_unwritten -= 1
            return self._num_unwritten == 0

    def _write(self, data: memoryview, position: int) -> None:
        writer = self._open()
        with self._call("write", position=position):
            writer.write_at(position, data)
        self._means.events.event("save.block.written", file=self.blob.name, nbytes=len(data))

    def _open(self) -> BlobWriter:
        with self._creating:
            if self.is_over:
                raise _Over
            if self._writer is None:
                with self._call("create"):
                    self._writer = self._create()
            return self._writer

    def _create(self) -> BlobWriter:
        try:
            return self._closing.enter_context(self._means.store.create_blob(self.blob.name, nbytes=self.blob.nbytes))
        except BlobExists as error:
            raise self._judge(error) from error

    def _finish(self) -> None:
        """Write the last piece with the tail joined to it, and have the store finish the blob."""
        blob, events = self.blob, self._means.events
        assert self._last_piece is not None
        block, start, nbytes = self._last_piece.memory, self._last_piece.start, self._last_piece.nbytes
        blob.frame.digest(block[:nbytes], start)
        tail = blob.frame.encode_tail()
        blob.tail_digest = digest_bytes(tail)
        events.event("save.blob.tail", file=blob.name, nbytes=len(tail))
        self._write_tail(tail, block, start)
        self._release_last()  # others may need it while the store finishes the blob
        writer = self._open()
        with self._call("finish", position=blob.nbytes):
            try:
                writer.finish()
            except BlobExists as error:
                raise self._judge(error) from error
            self._closing.close()
        self._acknowledge()

    def _write_tail(self, tail: bytes, block: memoryview, start: int) -> None:
        """Write the last piece and the tail, in as many blocks as that takes, all through the same memory."""
        filled, taken = self.blob.frame.tail_position - start, 0
        while taken < len(tail) or filled:
            count = min(len(block) - filled, len(tail) - taken)
            block[filled : filled + count] = tail[taken : taken + count]
            self._write(block[: filled + count], start)
            start, filled, taken = start + filled + count, 0, taken + count

    def _judge(self, error: BlobExists) -> Exception:
        """What to raise when the store has the blob already: it may be that of an earlier try whose answer was lost."""
        if self.blob.num_tries == 1 or not self.blob.tail_digest or not self._is_there():
            return error
        self._error = error
        self._acknowledge()
        return _Over()

    def _is_there(self) -> bool:
        """Whether what the store has is what an earlier try has sent: the length and the tail, and with it all digests, agree."""
        blob, position = self.blob, self.blob.frame.tail_position
        with self._means.store.open_blob(blob.name) as reader:
            if reader.nbytes != blob.nbytes:
                return False
            tail = bytearray(blob.nbytes - position)
            reader.read_into(position, memoryview(tail))
        return digest_bytes(tail) == blob.tail_digest

    def _acknowledge(self) -> None:
        self._means.events.event("save.blob.durable", file=self.blob.name, nbytes=self.blob.nbytes)
        with self._lock:
            self.is_over = True
