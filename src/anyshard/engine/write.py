"""Write blobs: stage -> digest -> write, block by block, several writes in flight, one blob after the other without a pause.

The calling thread stages (it may touch tensors), a crew of threads digests and writes. Of a blob whose image lies in an arena
whole blocks are digested and written right there; only what is behind them is staged. A blob goes through these states:

    begun     -> its bytes [0, tail_position) are cut into blocks; each is staged, handed to the crew, digested, written
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

from anyshard.engine.blocks import BlockPool, Loan
from anyshard.engine.crew import Crew, Patience
from anyshard.engine.filler import BlockFiller
from anyshard.engine.images import Images
from anyshard.engine.slots import BlobFrame, BlobSlots, tabulate_slots
from anyshard.monitor.events import SILENT, Emitter
from anyshard.records.addresses import section_directory, show
from anyshard.records.digests import digest_bytes
from anyshard.records.handles import Source
from anyshard.records.manifest import BlobEntry
from anyshard.records.names import blob_name
from anyshard.records.tables import BlobPlan, SavePlan
from anyshard.records.tail import HEAD_NBYTES, BlobIdentity, encode_head
from anyshard.storage.protocol import BlobWriter, Store

logger = logging.getLogger(__name__)

_NOTHING = memoryview(b"")


def _go_on() -> None:
    pass


@dataclass(frozen=True, slots=True)
class WriteJob:
    """What is the same for all blobs of one save. `values` holds the payload of every section's values slot.

    `check` is called by the thread that stages, for each block and now and then while the last ones are written: what it raises
    ends the save, as when another rank has failed.
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
    with _open_pipeline(store, job, pool) as pipeline:
        for of in plan.blobs:
            slots = tabulate_slots(plan.shards, of)
            pipeline.stage(_begin(of, slots, job), partial(_pull_rows, plan, slots, sources))
    return tuple(blob.make_entry() for blob in pipeline.blobs)


def write_images(store: Store, plan: SavePlan, *, images: Images, job: WriteJob, pool: BlockPool) -> tuple[BlobEntry, ...]:
    """As `write_blobs`, the very same files from the extents that lie in an arena; puts the heads into it.

    If a thread is left behind that may still read the arena, it is abandoned.
    """
    with _open_pipeline(store, job, pool, at_stuck=images.arena.abandon) as pipeline:
        for number, (of, slots) in enumerate(zip(plan.blobs, images.layout.slots, strict=True)):
            memory = images.memory(number)
            memory[:HEAD_NBYTES] = encode_head(job.attempt)
            pipeline.stage(_begin(of, slots, job), partial(_put_rest, memory), lent=memory)
    return tuple(blob.make_entry() for blob in pipeline.blobs)


@contextmanager
def _open_pipeline(store: Store, job: WriteJob, pool: BlockPool, *, at_stuck: Callable[[], None] = _go_on) -> Iterator[_Pipeline]:
    """A pipeline that has come to rest at the end; `at_stuck` is called if it has not, and may still read what it was lent."""
    loan = Loan(pool)
    pipeline = _Pipeline(store, loan, job)
    try:
        with pipeline.crew:
            yield pipeline
            pipeline.crew.finish(job.check)
    finally:
        is_in_use = pipeline.crew.has_stragglers
        if is_in_use:
            at_stuck()
        loan.settle(is_in_use=is_in_use)


def _begin(of: BlobPlan, slots: BlobSlots, job: WriteJob) -> _Blob:
    values = job.values[of.section] if slots.has_values else None
    identity = job.identify(of)
    frame = slots.describe(identity, values_nbytes=None if values is None else len(values))
    name = blob_name(section_directory(of.section), of.rank, k=of.k, generation=job.generation, attempt=job.attempt)
    return _Blob(name=name, identity=identity, values=values, frame=frame)


def _pull_rows(plan: SavePlan, slots: BlobSlots, sources: Sequence[Source], filler: BlockFiller, blob: _Blob) -> None:
    """Stage head and extents from the sources of a plan's rows."""
    filler.put(encode_head(blob.identity.attempt))
    for row, position, nbytes in zip(slots.rows.tolist(), slots.position.tolist(), slots.nbytes.tolist(), strict=True):
        try:
            filler.pull(sources[row], position, nbytes)
        except Exception as error:
            address = plan.shards.tensors.addresses[plan.shards.tensor[row]]
            error.add_note(f"while staging {show(address)} of section {show(blob.identity.section)} for {blob.name}")
            raise


def _put_rest(image: memoryview, filler: BlockFiller, _blob: _Blob) -> None:
    """Stage what of an image is behind its last whole block."""
    filler.put(image[filler.position :])


@dataclass(slots=True)
class _Blob:
    """One blob on its way; its frame collects the digests of the crew."""

    name: str
    identity: BlobIdentity
    values: bytes | None
    frame: BlobFrame
    writer: BlobWriter | None = None
    closing: ExitStack = field(default_factory=ExitStack)
    last_block: memoryview | None = None
    num_unwritten: int = 0
    tail_digest: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def nbytes(self) -> int:
        return self.frame.blob_nbytes

    def count_down(self) -> bool:
        """Note that a block is done; true for the one call that finds none left."""
        with self.lock:
            self.num_unwritten -= 1
            return self.num_unwritten == 0

    def make_entry(self) -> BlobEntry:
        identity = self.identity
        return BlobEntry(self.name, identity.section, identity.rank, self.nbytes, self.frame.tail_position, self.tail_digest)


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

    def stage(self, blob: _Blob, put_rows: Callable[[BlockFiller, _Blob], None], *, lent: memoryview = _NOTHING) -> None:
        """Copy a whole blob into blocks, waiting for free ones; its writes may still be in flight on return.

        Whole blocks of `lent`, its first bytes, are written from there; `put_rows` puts the others up to the last extent.
        """
        self.blobs.append(blob)
        self._events.event("save.blob.begin", file=blob.name, nbytes=blob.nbytes)
        size, block_nbytes = blob.frame.tail_position, self._loan.block_nbytes
        blob.num_unwritten = -(-size // block_nbytes)
        # The last block is never lent: the tail is joined to it.
        lent_nbytes = min(len(lent), size - 1) // block_nbytes * block_nbytes
        for start in range(0, lent_nbytes, block_nbytes):
            self._announce_staged(blob, block_nbytes)
            self.crew.submit(partial(self._write_lent, blob, lent[start : start + block_nbytes], start))
        filler = BlockFiller(lent_nbytes, size, acquire=self._acquire, hand_over=partial(self._submit, blob))
        put_rows(filler, blob)
        if blob.values is not None:
            filler.pad_to(blob.frame.values_position)
            filler.put(blob.values)
        filler.finish()

    def _acquire(self) -> memoryview:
        return self.crew.wait_for(self._loan.acquire)

    def _announce_staged(self, blob: _Blob, nbytes: int) -> None:
        self._events.event("save.block.staged", file=blob.name, nbytes=nbytes)
        self._check()

    def _submit(self, blob: _Blob, block: memoryview, start: int, nbytes: int) -> None:
        self._announce_staged(blob, nbytes)
        if start + nbytes == blob.frame.tail_position:
            blob.last_block = block
            self.crew.submit(partial(self._close_if_complete, blob))
        else:
            self.crew.submit(partial(self._write_block, blob, block, start))

    def _write_block(self, blob: _Blob, block: memoryview, start: int) -> None:
        blob.frame.digest(block, start)
        self._write(blob, block, start)
        self._loan.release(block)
        self._close_if_complete(blob)

    def _write_lent(self, blob: _Blob, piece: memoryview, start: int) -> None:
        blob.frame.digest(piece, start)
        self._write(blob, piece, start)
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
        block, tail_position = blob.last_block, blob.frame.tail_position
        assert block is not None
        start = tail_position - 1 - (tail_position - 1) % len(block)
        blob.frame.digest(block[: tail_position - start], start)
        tail = blob.frame.encode_tail()
        blob.tail_digest = digest_bytes(tail)
        self._events.event("save.blob.tail", file=blob.name, nbytes=len(tail))
        self._write_tail(blob, tail, block, start)
        with self.crew.call("finish", file=blob.name, position=blob.nbytes):
            self._open(blob).finish()
            blob.closing.close()
        self._events.event("save.blob.durable", file=blob.name, nbytes=blob.nbytes)

    def _write_tail(self, blob: _Blob, tail: bytes, block: memoryview, start: int) -> None:
        """Write the last block with the tail joined to it, in as many blocks as that takes, all through the same memory."""
        filled, taken = blob.frame.tail_position - start, 0
        while taken < len(tail) or filled:
            count = min(len(block) - filled, len(tail) - taken)
            block[filled : filled + count] = tail[taken : taken + count]
            self._write(blob, block[: filled + count], start)
            start, filled, taken = start + filled + count, 0, taken + count
        blob.last_block = None
        self._loan.release(block)
