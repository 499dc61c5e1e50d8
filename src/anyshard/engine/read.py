"""Read blobs: open and check them, then run load plans: read -> verify -> place, several reads in flight.

A crew of threads takes the reads of a plan in their order. Each read goes into a block, is verified there cell by cell, then its
pieces are copied to where they belong: no byte is used before the digest of its cell was compared, and beyond the destinations
there is no memory but the pool's. Reading straight into a destination's memory would save no time: tensors are not page-aligned,
so O_DIRECT needs a block anyway, and from the page cache a copy through a block that stays in the processor's cache was the
quicker of the two (4.5 against 3.5 GB/s), as the kernel's copy into cold memory is slower than ours.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from anyshard.engine.blocks import BlockPool, Loan
from anyshard.engine.crew import Crew, Patience
from anyshard.engine.place import Placer
from anyshard.engine.readers import OpenFiles, SharedReader
from anyshard.errors import BlobNotFound, CheckpointDamaged, StorageStuck
from anyshard.monitor.events import SILENT, Emitter
from anyshard.records.addresses import show
from anyshard.records.digests import cell_digests, check_digest
from anyshard.records.handles import Destination
from anyshard.records.load_plan import BlobLayout, LoadPlan
from anyshard.records.manifest import BlobEntry, Manifest
from anyshard.records.tail import BLOB_ALIGNMENT, HEAD_NBYTES, MIN_CELL_NBYTES, Tail, decode_tail, encode_head, max_raw_nbytes
from anyshard.records.values_types import ValueLimits
from anyshard.storage.protocol import Store

_SHOWN = 5
_TAIL_SLACK_NBYTES = 16 * BLOB_ALIGNMENT  # padding and footer


def _go_on() -> None:
    pass


@dataclass(frozen=True, slots=True)
class ReadJob:
    """What is the same for all reads of one load. All blobs that are opened with it share `files`, so as to keep few open.

    `check` is called again and again by the thread that waits for reads: what it raises ends them, as when another rank has
    failed.
    """

    threads: int = 4
    events: Emitter = SILENT
    patience: Patience = field(default_factory=Patience)
    files: OpenFiles = field(default_factory=OpenFiles)
    check: Callable[[], None] = _go_on


@dataclass(frozen=True, slots=True)
class OpenBlob:
    """A blob whose length, head and tail were checked."""

    entry: BlobEntry
    reader: SharedReader
    tail: Tail

    def check_cells(self, data: memoryview, start: int) -> None:
        """Raise `CheckpointDamaged` unless `data`, which begins at the cell border `start`, has the digests of the tail."""
        found = cell_digests(data, self.tail.cell_nbytes)
        first = start // self.tail.cell_nbytes
        wrong = np.flatnonzero(found != self.tail.cell_digests[first : first + len(found)])
        if len(wrong):
            raise self._damaged([first + int(cell) for cell in wrong])

    def grow_to_cells(self, start: int, stop: int) -> tuple[int, int]:
        """The smallest range of whole cells around [start, stop)."""
        cell = self.tail.cell_nbytes
        return start - start % cell, min(stop + -stop % cell, self.tail.tail_position)

    def _damaged(self, cells: list[int]) -> CheckpointDamaged:
        size, tail = self.tail.cell_nbytes, self.tail
        ranges = [(cell * size, min((cell + 1) * size, tail.tail_position)) for cell in cells]
        touched = {slot for low, high in ranges for slot in np.flatnonzero(_meets(tail, low, high)).tolist()}
        where = ", ".join(f"cell {cell} (bytes {low} to {high})" for cell, (low, high) in zip(cells, ranges, strict=True))
        return CheckpointDamaged(
            f"{self.entry.name}: expected the bytes that were saved, found others in {where}; "
            f"it holds {_list([tail.addresses[slot] for slot in sorted(touched)])}. Load another checkpoint or copy",
            file=self.entry.name,
        )


@contextmanager
def open_blobs(store: Store, manifest: Manifest, *, blobs: Sequence[int], job: ReadJob, pool: BlockPool) -> Iterator[OpenBlobs]:
    """Open the blobs at these positions of the manifest's list, to the end of the context; see `OpenBlobs.open`."""
    opened = OpenBlobs(store, manifest, job=job, pool=pool)
    try:
        opened.open(blobs)
        yield opened
    finally:
        opened.close()


class OpenBlobs:
    """The blobs of one manifest that were opened so far; made by `open_blobs`."""

    def __init__(self, store: Store, manifest: Manifest, *, job: ReadJob, pool: BlockPool) -> None:
        self._store = store
        self._manifest = manifest
        self._job = job
        self._pool = pool
        self._first: dict[tuple[str, int], int] = {}
        for position, entry in enumerate(manifest.blobs):
            self._first.setdefault((entry.section, entry.rank), position)
        self._lock = threading.Lock()
        self._blobs: dict[int, OpenBlob] = {}
        self._tails: dict[int, Tail] = {}
        self._layouts: dict[int, BlobLayout] = {}

    def open(self, blobs: Iterable[int]) -> None:
        """Open those that are not open yet and check them: length, tail, head, and who wrote them; all of them or none.

        What was opened stays readable until `close`, whatever happens to its name; beyond the number of files that the job
        keeps open, a blob that was removed or replaced meanwhile is `CheckpointReplaced`. Raises `CheckpointDamaged`; if blobs
        are not there, one that tells how many, and on which host.
        """
        with self._lock:
            entries, files = self._manifest.blobs, self._job.files
            readers = {blob: SharedReader(self._store, entries[blob], files) for blob in blobs if blob not in self._blobs}
            try:
                opened = self._open_all(readers)
            except BaseException:
                _close_all(readers.values())
                raise
            self._tails |= {blob: each.tail for blob, each in opened.items()}
            self._layouts |= {blob: BlobLayout.of(each.tail) for blob, each in opened.items()}
            self._blobs |= opened

    def close(self) -> None:
        """No further read; files are closed once no thread reads from them."""
        _close_all(blob.reader for blob in self._blobs.values())

    @property
    def tails(self) -> Mapping[int, Tail]:
        """The checked tails by the blobs' positions in the manifest's list."""
        return self._tails

    @property
    def layouts(self) -> Mapping[int, BlobLayout]:
        """What planning needs of the tails."""
        return self._layouts

    def find_first(self, section: str, rank: int) -> int:
        """The position of the first blob that `rank` wrote of a section: the one with its values."""
        if (section, rank) not in self._first:
            raise CheckpointDamaged(
                f"expected blobs of rank {rank} in section {show(section)}, found none in the manifest; load another checkpoint"
            )
        return self._first[section, rank]

    def read_values(self, section: str, *, rank: int = 0) -> bytes:
        """The verified payload of the values slot of a section, as `rank` wrote it; that blob is open."""
        blob = self._blobs[self.find_first(section, rank)]
        if blob.tail.identity.k != 0:
            raise _damaged(blob.entry, "the first blob of its section, k =", 0, blob.tail.identity.k)
        position, nbytes = int(blob.tail.position[-1]), int(blob.tail.nbytes[-1])
        if nbytes > (limit := ValueLimits().max_nbytes):
            raise _damaged(blob.entry, "length of the values at most", limit, nbytes)
        start, stop = blob.grow_to_cells(position, position + nbytes)
        data = memoryview(bytearray(stop - start))
        with Crew(1, name="anyshard-read", patience=self._job.patience) as crew:  # so that a stuck read ends
            crew.submit(partial(_read_checked, blob, start, data, crew=crew))
            crew.finish(self._job.check)
        return bytes(data[position - start : position - start + nbytes])

    def verify(self, plan: LoadPlan) -> None:
        """Return if every cell that the plan reads is what was saved; nothing is placed."""
        self._run(_Run(plan, self._blobs, None))

    def fill(self, plan: LoadPlan, destinations: Sequence[Destination]) -> None:
        """Fill `destinations` (one per wanted row) with verified bytes.

        No read of the plan may be longer than a block of the pool. On an error no thread is left running, the first error is
        raised, and what the destinations hold is undefined.
        """
        self._run(_Run(plan, self._blobs, Placer(plan, destinations)))

    def _open_all(self, readers: Mapping[int, SharedReader]) -> dict[int, OpenBlob]:
        opened: dict[int, OpenBlob] = {}
        missing: dict[int, CheckpointDamaged] = {}
        with Crew(min(self._job.threads, max(1, len(readers))), name="anyshard-open", patience=self._job.patience) as crew:
            for blob, reader in readers.items():
                crew.submit(partial(self._open_one, blob, reader, crew=crew, opened=opened, missing=missing))
            crew.finish(self._job.check)
        if missing:
            names = [self._manifest.blobs[blob].name for blob in sorted(missing)]
            raise _incomplete(self._store.url, names, num_sought=len(readers)) from missing[min(missing)]
        return opened

    def _open_one(
        self, blob: int, reader: SharedReader, *, crew: Crew, opened: dict[int, OpenBlob], missing: dict[int, CheckpointDamaged]
    ) -> None:
        try:
            opened[blob] = _open_blob(self._manifest, blob, reader, crew=crew)
        except CheckpointDamaged as damage:
            if not isinstance(damage.__cause__, BlobNotFound):
                raise
            missing[blob] = damage  # others may be missing as well, and how many tells what is wrong

    def _run(self, run: _Run) -> None:
        nbytes = run.plan.reads.stop - run.plan.reads.start
        assert nbytes.max(initial=0) <= self._pool.block_nbytes, "a read is longer than a block"
        loan = Loan(self._pool)
        num_threads = min(self._job.threads, max(1, len(run.plan.reads)), self._pool.num_blocks)
        crew = Crew(num_threads, name="anyshard-read", patience=self._job.patience)
        try:
            with crew:
                for read in range(len(run.plan.reads)):
                    crew.submit(partial(run.do, read, crew=crew, loan=loan, events=self._job.events))
                crew.finish(self._job.check)
        except BaseException as error:
            try:
                run.close(self._job.patience.timeout_s)
            except StorageStuck:
                if isinstance(error, Exception):  # Ctrl-C stays what it is
                    raise
            raise
        finally:
            loan.settle(is_in_use=crew.has_stragglers)


class _Run:
    """One pass over the reads of a plan; `do` is called from the threads of a crew."""

    def __init__(self, plan: LoadPlan, blobs: Mapping[int, OpenBlob], placer: Placer | None) -> None:
        self.plan = plan
        self._blobs = blobs
        self._placer = placer
        self._reads = list(zip(plan.reads.blob.tolist(), plan.reads.start.tolist(), plan.reads.stop.tolist(), strict=True))

    def do(self, read: int, *, crew: Crew, loan: Loan, events: Emitter) -> None:
        """Read, verify and place one read."""
        position, start, stop = self._reads[read]
        blob = self._blobs[position]
        block = crew.wait_for(loan.acquire)
        data = block[: stop - start]
        _read_checked(blob, start, data, crew=crew)
        if self._placer is None or self._placer.place(read, data):
            events.event("load.read.done", file=blob.entry.name, nbytes=stop - start)
        loan.release(block)

    def close(self, timeout_s: float) -> None:
        """Nothing is placed any more, not even by a thread that was left behind; `StorageStuck` if one cannot be waited for."""
        if self._placer is not None:
            self._placer.close(timeout_s)


def _close_all(readers: Iterable[SharedReader]) -> None:
    for reader in readers:
        reader.close()


def _read_checked(blob: OpenBlob, start: int, out: memoryview, *, crew: Crew) -> None:
    blob.reader.read(start, out, crew=crew)
    blob.check_cells(out, start)


def _open_blob(manifest: Manifest, position: int, reader: SharedReader, *, crew: Crew) -> OpenBlob:
    entry = manifest.blobs[position]
    nbytes = entry.nbytes - entry.tail_position
    if nbytes > (limit := _max_tail_nbytes(entry.tail_position, manifest.num_slots)):
        raise _damaged(entry, "length of the tail at most", limit, nbytes)
    data = _read(reader, entry.tail_position, nbytes=nbytes, crew=crew)
    check_digest(data, entry.tail_digest, file=entry.name)
    tail = decode_tail(data, tail_position=entry.tail_position, max_slots=manifest.num_slots, file=entry.name)
    _check_identity(entry, tail, head=_read(reader, 0, nbytes=HEAD_NBYTES, crew=crew))
    return OpenBlob(entry, reader, tail)


def _max_tail_nbytes(tail_position: int, num_slots: int) -> int:
    """Upper bound of the length of a tail. The file's own length is none: a sparse file has any, for nothing."""
    raw_nbytes = max_raw_nbytes(num_slots)
    stored_nbytes = raw_nbytes + raw_nbytes // 128  # what does not compress grows a little
    return stored_nbytes + 8 * -(-tail_position // MIN_CELL_NBYTES) + _TAIL_SLACK_NBYTES


def _read(reader: SharedReader, position: int, *, nbytes: int, crew: Crew) -> bytes:
    data = bytearray(nbytes)
    reader.read(position, memoryview(data), crew=crew)
    return bytes(data)


def _check_identity(entry: BlobEntry, tail: Tail, *, head: bytes) -> None:
    found = (tail.identity.section, tail.identity.rank)
    if found != (entry.section, entry.rank):
        raise _damaged(entry, "section and rank", (entry.section, entry.rank), found)
    if head != (expected := encode_head(tail.identity.attempt)):
        raise _damaged(entry, "the head", expected, head)


def _damaged(entry: BlobEntry, what: str, expected: object, found: object) -> CheckpointDamaged:
    return CheckpointDamaged(
        f"{entry.name}: expected {what} {expected}, found {found}. Load another checkpoint or copy", file=entry.name
    )


def _incomplete(url: str, names: list[str], *, num_sought: int) -> CheckpointDamaged:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return CheckpointDamaged(
        f"{url}: expected {num_sought} blob(s) that the manifest lists, found {len(names)} of them missing on host "
        f"{socket.gethostname()}: {', '.join(names[:_SHOWN])}{more}. Check that the directory is the same on all hosts; if so, "
        "this is an incomplete copy: copy it again from where it was whole, or load another checkpoint",
        file=names[0],
    )


def _meets(tail: Tail, low: int, high: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return (tail.position < high) & (tail.position + tail.nbytes > low)


def _list(addresses: list[str]) -> str:
    if not addresses:
        return "padding only"
    more = f" and {len(addresses) - _SHOWN} more" if len(addresses) > _SHOWN else ""
    return ", ".join(map(show, addresses[:_SHOWN])) + more
