"""Write blobs: stage -> digest -> write, block by block, several writes in flight, one blob after the other without a pause.

The calling thread stages (it may touch tensors), a crew of threads digests and writes. A blob goes through these states:

    begun     -> its image [0, tail_position) is cut into blocks; each is staged, handed to the crew, digested, written
    complete  -> all blocks but the last are written: the last one is digested, the tail joined to it, both are written
    durable   -> the store has finished the blob, and it is closed

Only the crew calls the store: the first thread that has a block of a blob creates it, the one that has the last block closes it.
So no more blobs are open than threads and one, and an interrupt of the calling thread never meets a call into the store.

All positions follow from the plan, so blocks may be written in any order. The tail is joined to the last block so that every
write begins on a block border and is a multiple of 4096 bytes long.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from anyshard.engine.blocks import BlockPool, Loan
from anyshard.engine.crew import Crew, Patience
from anyshard.engine.slots import describe_blob
from anyshard.errors import InvalidAppState
from anyshard.monitor.events import SILENT, Emitter
from anyshard.records.addresses import section_directory, show
from anyshard.records.digests import cell_digests, digest_bytes
from anyshard.records.handles import Source
from anyshard.records.manifest import BlobEntry
from anyshard.records.names import blob_name
from anyshard.records.tables import BlobPlan, SavePlan
from anyshard.records.tail import CELL_NBYTES, BlobIdentity, Tail, encode_head, encode_tail
from anyshard.storage.protocol import BlobWriter, Store

logger = logging.getLogger(__name__)

_ZEROS = bytes(4096)


def _go_on() -> None:
    pass


@dataclass(frozen=True, slots=True)
class WriteJob:
    """What is the same for all blobs of one save. `values` holds the payload of every section's values slot.

    `check` is called for each block by the thread that stages: what it raises ends the save, as when another rank has failed.
    """

    generation: int
    attempt: str
    step: int | None
    run_id: str | None
    world_size: int
    writer: str
    values: Mapping[str, bytes]
    threads: int = 4
    events: Emitter = SILENT
    patience: Patience = field(default_factory=Patience)
    check: Callable[[], None] = _go_on

    def identify(self, plan: BlobPlan) -> BlobIdentity:
        """Who writes this blob and as what."""
        return BlobIdentity(
            section=plan.section,
            rank=plan.rank,
            k=plan.k,
            generation=self.generation,
            attempt=self.attempt,
            step=self.step,
            run_id=self.run_id,
            world_size=self.world_size,
            writer=self.writer,
        )


def write_blobs(
    store: Store, plan: SavePlan, *, sources: Sequence[Source], job: WriteJob, pool: BlockPool
) -> tuple[BlobEntry, ...]:
    """Make every blob of the plan durable and return their manifest entries, in the plan's order.

    `sources[i]` yields the bytes of row i of the plan's shard table; they are only called from this thread. On any error nothing
    is left running, unfinished blobs are given up and the first error is raised; finished ones stay, for the caller to delete.
    """
    loan = Loan(pool)
    pipeline = _Pipeline(store, loan, job)
    try:
        with pipeline.crew:
            for of in plan.blobs:
                pipeline.stage(_describe(plan, of, job), plan, sources)
    finally:
        loan.settle(is_in_use=pipeline.crew.has_stragglers)
    return tuple(blob.make_entry() for blob in pipeline.blobs)


def _describe(plan: SavePlan, of: BlobPlan, job: WriteJob) -> _Blob:
    values = job.values[of.section] if of.k == 0 else None
    tail = describe_blob(plan.shards, of, identity=job.identify(of), values_nbytes=None if values is None else len(values))
    directory = section_directory(of.section)
    name = blob_name(directory, of.rank, k=of.k, generation=job.generation, attempt=job.attempt)
    nbytes = tail.tail_position + len(encode_tail(tail))
    return _Blob(name=name, nbytes=nbytes, rows=of.rows.tolist(), values=values, tail=tail)


@dataclass(slots=True)
class _Blob:
    """One blob on its way. `tail.cell_digests` is filled by the crew, each cell by the thread that has its block."""

    name: str
    nbytes: int
    rows: list[int]
    values: bytes | None
    tail: Tail
    writer: BlobWriter | None = None
    closing: ExitStack = field(default_factory=ExitStack)
    last_block: memoryview | None = None
    num_unwritten: int = 0
    tail_digest: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count_down(self) -> bool:
        """Note that a block is done; true for the one call that finds none left."""
        with self.lock:
            self.num_unwritten -= 1
            return self.num_unwritten == 0

    def digest(self, image: memoryview, position: int) -> None:
        """Note the digests of the cells in `image`, which begins at `position` of the blob."""
        digests = cell_digests(image, CELL_NBYTES)
        first = position // CELL_NBYTES
        self.tail.cell_digests[first : first + len(digests)] = digests

    def make_entry(self) -> BlobEntry:
        identity = self.tail.identity
        return BlobEntry(self.name, identity.section, identity.rank, self.nbytes, self.tail.tail_position, self.tail_digest)


class _Pipeline:
    """Stages blobs on the calling thread and hands their blocks to its crew."""

    def __init__(self, store: Store, loan: Loan, job: WriteJob) -> None:
        num_threads = job.threads if store.capabilities.parallel_writes else 1  # one thread keeps the writes front to back
        self.crew = Crew(num_threads, name="anyshard-write", patience=job.patience, at_rest=self._give_up)
        self.blobs: list[_Blob] = []
        self._store = store
        self._loan = loan
        self._events = job.events
        self._check = job.check

    def stage(self, blob: _Blob, plan: SavePlan, sources: Sequence[Source]) -> None:
        """Copy a whole blob into blocks, waiting for free ones; its writes may still be in flight on return."""
        self.blobs.append(blob)
        self._events.event("save.blob.begin", file=blob.name, nbytes=blob.nbytes)
        block_nbytes, size = self._loan.block_nbytes, blob.tail.tail_position
        blob.num_unwritten = -(-size // block_nbytes)
        image = _Image(size, acquire=self._acquire, hand_over=partial(self._submit, blob))
        image.put(encode_head(blob.tail.identity.attempt))
        slots = zip(blob.rows, blob.tail.position.tolist(), blob.tail.nbytes.tolist(), strict=False)  # the values have no row
        for row, position, nbytes in slots:
            try:
                image.pull(sources[row], position, nbytes)
            except Exception as error:
                address = plan.shards.tensors.addresses[plan.shards.tensor[row]]
                error.add_note(f"while staging {show(address)} of section {show(blob.tail.identity.section)} for {blob.name}")
                raise
        if blob.values is not None:
            image.pad_to(int(blob.tail.position[-1]))
            image.put(blob.values)
        image.finish()

    def _acquire(self) -> memoryview:
        return self.crew.wait_for(self._loan.acquire)

    def _submit(self, blob: _Blob, block: memoryview, start: int, nbytes: int) -> None:
        self._events.event("save.block.staged", file=blob.name, nbytes=nbytes)
        self._check()
        if start + nbytes == blob.tail.tail_position:
            blob.last_block = block
            self.crew.submit(partial(self._close_if_complete, blob))
        else:
            self.crew.submit(partial(self._write_block, blob, block, start))

    def _write_block(self, blob: _Blob, block: memoryview, start: int) -> None:
        blob.digest(block, start)
        self._write(blob, block, start)
        self._loan.release(block)
        self._close_if_complete(blob)

    def _write(self, blob: _Blob, data: memoryview, position: int) -> None:
        writer = self._open(blob)
        with self.crew.call("write", file=blob.name, position=position):
            writer.write_at(position, data)
        self._events.event("save.block.written", file=blob.name, nbytes=len(data))

    def _open(self, blob: _Blob) -> BlobWriter:
        with blob.lock:
            if blob.writer is None:
                with self.crew.call("create", file=blob.name):
                    blob.writer = blob.closing.enter_context(self._store.create_blob(blob.name, nbytes=blob.nbytes))
            return blob.writer

    def _give_up(self) -> None:
        """Close what is still open, and so remove what was written of it."""
        for blob in self.blobs:
            try:
                with self.crew.call("close", file=blob.name, despite_failure=True):
                    blob.closing.close()
            except Exception:
                logger.warning("%s could not be removed", blob.name, exc_info=True)

    def _close_if_complete(self, blob: _Blob) -> None:
        """Finish the blob if all its blocks are written but the last, which waits for the tail."""
        if not blob.count_down():
            return
        block = blob.last_block
        assert block is not None
        start = blob.tail.tail_position - 1 - (blob.tail.tail_position - 1) % len(block)
        filled = blob.tail.tail_position - start
        blob.digest(block[:filled], start)
        tail = encode_tail(blob.tail)
        blob.tail_digest = digest_bytes(tail)
        self._events.event("save.blob.tail", file=blob.name, nbytes=len(tail))
        self._write_tail(blob, tail, block, start)
        with self.crew.call("finish", file=blob.name, position=blob.nbytes):
            self._open(blob).finish()
            blob.closing.close()
        self._events.event("save.blob.durable", file=blob.name, nbytes=blob.nbytes)

    def _write_tail(self, blob: _Blob, tail: bytes, block: memoryview, start: int) -> None:
        """Write the last block with the tail joined to it, in as many blocks as that takes, all through the same memory."""
        filled, taken = blob.tail.tail_position - start, 0
        while taken < len(tail) or filled:
            count = min(len(block) - filled, len(tail) - taken)
            block[filled : filled + count] = tail[taken : taken + count]
            self._write(blob, block[: filled + count], start)
            start, filled, taken = start + filled + count, 0, taken + count
        blob.last_block = None
        self._loan.release(block)


class _Image:
    """The bytes [0, nbytes) of a blob, put front to back into blocks; gaps are zeros."""

    def __init__(
        self, nbytes: int, *, acquire: Callable[[], memoryview], hand_over: Callable[[memoryview, int, int], None]
    ) -> None:
        self._nbytes = nbytes
        self._acquire = acquire
        self._hand_over = hand_over
        self._start = 0
        self._filled = 0
        self._block = acquire()

    def put(self, data: bytes) -> None:
        """Append `data`."""
        taken = 0
        while taken < len(data):
            room = self._room(len(data) - taken)
            room[:] = data[taken : taken + len(room)]
            taken += len(room)

    def pull(self, source: Source, position: int, nbytes: int) -> None:
        """Append all `nbytes` bytes of a source, at `position`."""
        if source.nbytes != nbytes:
            raise InvalidAppState(
                f"expected {nbytes} bytes of a tensor, found {source.nbytes}: do not change the app state while it is saved"
            )
        self.pad_to(position)
        taken = 0
        while taken < nbytes:
            room = self._room(nbytes - taken)
            source.read_into(taken, room)
            taken += len(room)

    def pad_to(self, position: int) -> None:
        """Append zeros up to `position`, less than 4096 of them."""
        if (count := position - self._start - self._filled) > 0:
            self.put(_ZEROS[:count])

    def finish(self) -> None:
        """Pad to the end and hand over the last block."""
        self.pad_to(self._nbytes)
        self._hand_over(self._block, self._start, self._filled)

    def _room(self, nbytes: int) -> memoryview:
        """The next up to `nbytes` bytes of the image, as memory that counts as filled."""
        if self._filled == len(self._block):
            self._hand_over(self._block, self._start, self._filled)
            self._start, self._filled = self._start + self._filled, 0
            self._block = self._acquire()
        begin = self._filled
        self._filled = min(begin + nbytes, len(self._block))
        return self._block[begin : self._filled]
