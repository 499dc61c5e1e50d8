"""Write blobs: stage -> digest -> write, block by block, several writes in flight, one blob after the other without a pause.

The calling thread stages (it may touch tensors), a crew of threads digests and writes. Of a blob whose image lies in an arena
whole blocks are digested and written right there; only what is behind them is staged. What becomes of a blob: see sending.py.

Only the crew calls the store: the first thread that has a block of a blob creates it, the one that has the last block closes it.
So no more blobs are open than threads and one, and an interrupt of the calling thread never meets a call into the store.

All positions follow from the plan, so blocks may be written in any order. The tail is joined to the last block so that every
write begins on a block border and is a multiple of 4096 bytes long.

A store without `parallel_writes` takes each blob front to back, so several are written at once (lanes.py), as many as there are
threads, or fewer if one blob alone takes several streams. They are staged in turn, a block each: whole blobs would fill all
blocks with the bytes of one. The calling thread waits for a block before it chooses the blob to put there, and holds none while
it waits, so a single block is enough.

A blob that fails with `StorageUnavailable` is given up and, once all others are done, staged and sent again whole. What the
store has acknowledged is never sent again.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import final

from anyshard.engine.blocks import BlockPool, Loan
from anyshard.engine.crew import Crew, Patience
from anyshard.engine.filler import BlockFiller
from anyshard.engine.images import Images
from anyshard.engine.lanes import Lane, Lanes
from anyshard.engine.sending import Blob, Means, Piece, Sending
from anyshard.engine.slots import BlobSlots, tabulate_slots
from anyshard.monitor.events import SILENT, Emitter
from anyshard.records.addresses import section_directory, show
from anyshard.records.handles import Source
from anyshard.records.manifest import BlobEntry
from anyshard.records.names import blob_name
from anyshard.records.tables import BlobPlan, IntColumn, SavePlan
from anyshard.records.tail import HEAD_NBYTES, BlobIdentity, encode_head
from anyshard.storage.protocol import Store

_NOTHING = memoryview(b"")


def _go_on() -> None:
    pass


@dataclass(frozen=True, slots=True)
class WriteJob:
    """What is the same for all blobs of one save. `values` holds the payload of every section's values slot.

    `check` is called by the thread that stages, for each block and now and then while the last ones are written: what it raises
    ends the save, as when another rank has failed. `resends` is how often blobs that storage did not take, though it may do so
    later (`StorageUnavailable`), are sent again.
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
    resends: int = 2

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

    `sources[i]` yields the bytes of row i of the plan's shard table; they are only called from this thread, and again from their
    beginning if a blob is sent again. On any error nothing is left running, unfinished blobs are given up and the first error is
    raised; finished ones stay, for the caller to delete.
    """

    def pack(of: BlobPlan) -> _Parcel:
        slots = tabulate_slots(plan.shards, of)
        rows = _Rows(plan, sources, slots.rows, slots.position, slots.nbytes)
        return _Parcel(_begin(of, slots, job), rows.put)

    with _open_pipeline(store, job, pool) as pipeline:
        return pipeline.run(map(pack, plan.blobs))


def write_images(store: Store, plan: SavePlan, *, images: Images, job: WriteJob, pool: BlockPool) -> tuple[BlobEntry, ...]:
    """As `write_blobs`, the very same files from the extents that lie in an arena; puts the heads into it.

    If a thread is left behind that may still read the arena, it is abandoned.
    """

    def pack(number: int) -> _Parcel:
        memory = images.memory(number)
        memory[:HEAD_NBYTES] = encode_head(job.attempt)
        return _Parcel(_begin(plan.blobs[number], images.layout.slots[number], job), partial(_put_rest, memory), lent=memory)

    with _open_pipeline(store, job, pool, at_stuck=images.arena.abandon) as pipeline:
        return pipeline.run(map(pack, range(len(plan.blobs))))


@contextmanager
def _open_pipeline(store: Store, job: WriteJob, pool: BlockPool, *, at_stuck: Callable[[], None] = _go_on) -> Iterator[_Pipeline]:
    """A pipeline that has come to rest at the end; `at_stuck` is called if it has not, and may still read what it was lent."""
    loan = Loan(pool)
    pipeline = _Pipeline(store, loan, job=job, num_blocks=pool.num_blocks)
    try:
        with pipeline.crew:
            yield pipeline
    finally:
        is_in_use = pipeline.crew.has_stragglers
        if is_in_use:
            at_stuck()
        loan.settle(is_in_use=is_in_use)


def _begin(of: BlobPlan, slots: BlobSlots, job: WriteJob) -> Blob:
    values = job.values[of.section] if slots.has_values else None
    identity = job.identify(of)
    frame = slots.describe(identity, values_nbytes=None if values is None else len(values))
    name = blob_name(section_directory(of.section), of.rank, k=of.k, generation=job.generation, attempt=job.attempt)
    return Blob(name=name, identity=identity, values=values, frame=frame)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of one blob and where their extents lie."""

    plan: SavePlan
    sources: Sequence[Source]
    number: IntColumn
    position: IntColumn
    nbytes: IntColumn

    def put(self, filler: BlockFiller, blob: Blob) -> Iterator[None]:
        """Stage head and extents from the sources."""
        yield from filler.put(encode_head(blob.identity.attempt))
        for row, position, nbytes in zip(self.number.tolist(), self.position.tolist(), self.nbytes.tolist(), strict=True):
            try:
                yield from filler.pull(self.sources[row], position, nbytes)
            except Exception as error:
                shards = self.plan.shards
                address = shards.tensors.addresses[shards.tensor[row]]
                error.add_note(f"while staging {show(address)} of section {show(blob.identity.section)} for {blob.name}")
                raise


def _put_rest(image: memoryview, filler: BlockFiller, _blob: Blob) -> Iterator[None]:
    """Stage what of an image is behind its last whole block."""
    return filler.put(image[filler.position :])


@dataclass(frozen=True, slots=True)
class _Parcel:
    """A blob and its bytes: whole blocks of `lent`, its first bytes; `put_rows` puts the others up to the end of the last row."""

    blob: Blob
    put_rows: Callable[[BlockFiller, Blob], Iterator[None]]
    lent: memoryview = _NOTHING


@dataclass(frozen=True, slots=True)
class _Route:
    """The way of one try at a blob; `put` takes its pieces. There is a lane if the store takes them in their order only."""

    sending: Sending
    put: Callable[[Piece], None]
    lane: Lane | None


@final
class _Staging:
    """One blob on its way into blocks. Lent pieces are put at once."""

    def __init__(self, parcel: _Parcel, route: _Route, *, block_nbytes: int) -> None:
        self.parcel = parcel
        self.route = route
        size, lent = parcel.blob.frame.tail_position, parcel.lent
        # The last block is never lent: the tail is joined to it.
        lent_nbytes = min(len(lent), size - 1) // block_nbytes * block_nbytes
        for start in range(0, lent_nbytes, block_nbytes):
            route.put(Piece(lent[start : start + block_nbytes], start, block_nbytes, is_lent=True))
        self._filler = BlockFiller(lent_nbytes, size, hand_over=lambda *block: route.put(Piece(*block)))
        self._steps = self._put_all()
        self._has_more = self._go_on()

    @property
    def needs_blocks(self) -> bool:
        """Whether there are bytes left to stage, and anybody wants them."""
        return self._has_more and not self.route.sending.is_over

    def fill(self, block: memoryview) -> None:
        """Stage as much as goes into a block, and put it."""
        self._filler.give(block)
        self._has_more = self._go_on()

    def _go_on(self) -> bool:
        return next(self._steps, self) is None

    def _put_all(self) -> Iterator[None]:
        filler, blob = self._filler, self.parcel.blob
        yield from self.parcel.put_rows(filler, blob)
        if blob.values is not None:
            yield from filler.pad_to(blob.frame.values_position)
            yield from filler.put(blob.values)
        yield from filler.finish()


class _Pipeline:
    """Stages blobs on the calling thread and hands their pieces to its crew, until all are acknowledged."""

    def __init__(self, store: Store, loan: Loan, *, job: WriteJob, num_blocks: int) -> None:
        capabilities = store.capabilities
        num_threads = job.threads if capabilities.parallel_writes else max(1, job.threads // capabilities.streams_per_blob)
        self.crew = Crew(num_threads, name="anyshard-write", patience=job.patience, at_rest=self._give_up)
        self._lanes = None if capabilities.parallel_writes else Lanes(self.crew, num_threads, num_blocks=num_blocks)
        self._loan = loan
        self._means = Means(store, self.crew, loan, job.events)
        self._job = job
        self._sendings: list[Sending] = []

    def run(self, parcels: Iterable[_Parcel]) -> tuple[BlobEntry, ...]:
        """Send them all, those that fail up to `resends` times again. Their entries come in the order of the parcels."""
        sent = self._send(parcels, num_more=self._job.resends)
        blobs = [staging.parcel.blob for staging in sent]
        for num_more in reversed(range(self._job.resends)):
            if failed := [staging.parcel for staging in sent if staging.route.sending.has_failed]:
                sent = self._send(failed, num_more=num_more)
        return tuple(blob.make_entry() for blob in blobs)

    def _send(self, parcels: Iterable[_Parcel], *, num_more: int) -> list[_Staging]:
        """One try at each, all of which are over on return."""
        sent: list[_Staging] = []

        def begin() -> Iterator[_Staging]:
            for parcel in parcels:
                sent.append(self._begin(parcel, is_last_try=not num_more))
                yield sent[-1]

        if self._lanes is None:
            self._stage_one_by_one(begin())
        else:
            self._stage_in_turn(begin(), self._lanes)
        self.crew.finish(self._job.check)
        return sent

    def _begin(self, parcel: _Parcel, *, is_last_try: bool) -> _Staging:
        blob, block_nbytes = parcel.blob, self._loan.block_nbytes
        if blob.first_error is None:
            self._job.events.event("save.blob.begin", file=blob.name, nbytes=blob.nbytes)
        else:
            self._job.events.event("save.blob.resent", file=blob.name, detail=f"try {blob.num_tries + 1}: {blob.first_error}")
            _drop_locals(blob.first_error)
        num_pieces = -(-blob.frame.tail_position // block_nbytes)
        sending = Sending(blob, self._means, num_pieces=num_pieces, is_last_try=is_last_try)
        self._sendings.append(sending)
        lane = None if self._lanes is None else self._lanes.add(sending)
        return _Staging(parcel, _Route(sending, partial(self._put, sending, lane), lane), block_nbytes=block_nbytes)

    def _stage_one_by_one(self, begun: Iterator[_Staging]) -> None:
        for staging in begun:
            while staging.needs_blocks:
                staging.fill(self._acquire())

    def _stage_in_turn(self, begun: Iterator[_Staging], lanes: Lanes) -> None:
        under_way: list[_Staging] = []
        while _find_needy(under_way, begun, lanes):
            block = self._acquire()
            if not _find_needy(under_way, begun, lanes):  # some may be over meanwhile, others have room
                self._loan.release(block)
                return
            under_way[lanes.choose(_list_lanes(under_way))].fill(block)

    def _acquire(self) -> memoryview:
        return self.crew.wait_for(self._loan.acquire)

    def _put(self, sending: Sending, lane: Lane | None, piece: Piece) -> None:
        self._job.events.event("save.block.staged", file=sending.blob.name, nbytes=piece.nbytes)
        self._job.check()
        sending.expect(piece)
        if self._lanes is None or lane is None:
            self.crew.submit(partial(sending.send, piece))
        else:
            self._lanes.put(lane, piece)

    def _give_up(self) -> None:
        for sending in self._sendings:
            sending.close()


def _find_needy(under_way: list[_Staging], begun: Iterator[_Staging], lanes: Lanes) -> bool:
    """Keep those under way that need blocks, and begin as many as there is room for; false if nobody needs any more blocks.

    If all that are under way have their share of blocks, one more is begun, which then waits for its turn.
    """
    under_way[:] = [staging for staging in under_way if staging.needs_blocks]
    while lanes.have_room or lanes.have_shares(_list_lanes(under_way)):
        if (staging := next(begun, None)) is None:
            break
        if staging.needs_blocks:
            under_way.append(staging)
    return bool(under_way)


def _list_lanes(stagings: Iterable[_Staging]) -> list[Lane]:
    return [lane for staging in stagings if (lane := staging.route.lane)]


def _drop_locals(error: BaseException | None) -> None:
    """Let go of what the frames of an error hold, blocks and parts of an arena; its traceback can still be printed."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
