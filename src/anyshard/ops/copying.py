"""Bringing files of a checkpoint from one store to another: read -> verify -> write, several files at once, block by block.

No byte is written before its digest was compared: those of a blob with its tail, tails and the index with the manifest. A file
that is there already is read back and compared in full, and it is sent only if it is not the one that is wanted.

Each file that is on its way has a crew of its own, whose tasks are its blocks: so a call that hangs is named and given up in
time, however long whole files take. Where blobs are written front to back only, that crew is a single thread.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeAlias, final

from anyshard.engine.blocks import BlockPool
from anyshard.engine.crew import Crew, Patience
from anyshard.engine.read import OpenBlob, ReadJob, open_blobs
from anyshard.engine.readers import SharedReader
from anyshard.errors import (
    BlobExists,
    BlobNotFound,
    CheckpointDamaged,
    CheckpointReplaced,
    LimitExceeded,
    StorageError,
    StorageUnavailable,
)
from anyshard.monitor.events import SILENT, Emitter
from anyshard.records.digests import check_digest
from anyshard.records.manifest import BlobEntry, Manifest
from anyshard.records.tail import MAX_CELL_NBYTES
from anyshard.storage.protocol import BlobWriter, Store

BLOCK_NBYTES = MAX_CELL_NBYTES  # whole cells, however long its writer has made them
RESENDS = 2  # how often a file is sent again that the storage was unavailable for

_ENDLESS = Patience(math.inf, math.inf)  # of those that only wait for crews with a patience of their own

# (position in the file, where its bytes shall be, the crew whose thread calls): puts verified bytes there, or raises.
Fill: TypeAlias = Callable[[int, memoryview, Crew], None]


def _go_on() -> None:
    pass


@dataclass(frozen=True, slots=True)
class CopyJob:
    """What is the same for all files of one copy.

    `check_right` raises if this copy may not go on: it is called before a file is sent or removed. `may_remove` says that a file
    which is not the one that is wanted may go, as no committed checkpoint names it. `reads_back` says that what was written is
    read again and compared.
    """

    target: Store
    threads: int
    patience: Patience
    check_right: Callable[[], None] = _go_on
    may_remove: bool = True
    reads_back: bool = True
    events: Emitter = SILENT

    @property
    def num_files_at_once(self) -> int:
        """How many files are on their way at a time."""
        can = self.target.capabilities
        return max(1, self.threads // (2 if can.parallel_writes else can.streams_per_blob))

    @property
    def num_lanes(self) -> int:
        """How many blocks of one file are on their way at a time."""
        return max(1, self.threads // self.num_files_at_once) if self.target.capabilities.parallel_writes else 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of the files: the names of those that were there already, and the bytes of all others."""

    kept: tuple[str, ...]
    copied_nbytes: int


class CopiedFile(Protocol):
    """A file that is the same in both stores: if it is not `is_whole` at the target, it is `opened` at the source, and sent."""

    @property
    def name(self) -> str:
        """Its key."""
        ...

    @property
    def nbytes(self) -> int:
        """Its length."""
        ...

    def is_whole(self, store: Store, run: CopyRun) -> bool:
        """Whether `store` has exactly these bytes under the name; all of them are read."""
        ...

    def opened(self, run: CopyRun) -> AbstractContextManager[Fill]:
        """The file's bytes, for as long as the context lasts; `CheckpointDamaged` if they are not those that were saved."""
        ...


@final
class CopyRun:
    """One pass over files: its memory, and the crew whose tasks are whole files."""

    def __init__(self, job: CopyJob) -> None:
        self.job = job
        self.pool = BlockPool(byte_budget=job.threads * BLOCK_NBYTES, block_nbytes=BLOCK_NBYTES)
        self._files = Crew(job.num_files_at_once, name="anyshard-copy", patience=_ENDLESS)
        self._kept: list[str] = []

    def bring(self, files: Sequence[CopiedFile], there: Collection[str]) -> Outcome:
        """Bring all files; those of the names `there` may be at the target already."""
        with self._files as crew:
            for file in files:
                crew.submit(partial(self._bring, _Bringing(file, self, is_there=file.name in there)))
            crew.finish(_go_on)
        kept = set(self._kept)
        names = tuple(file.name for file in files if file.name in kept)
        return Outcome(names, sum(file.nbytes for file in files if file.name not in kept))

    def check(self) -> None:
        """Raise if another file has failed, or the caller was interrupted."""
        self._files.check()

    def make_crew(self, num_threads: int, *, at_rest: Callable[[], None] | None = None) -> Crew:
        """A crew for the blocks of one file."""
        return Crew(num_threads, name="anyshard-copy-block", patience=self.job.patience, at_rest=at_rest)

    @contextmanager
    def block(self, crew: Crew) -> Iterator[memoryview]:
        """A block of memory for a task of `crew`."""
        block = crew.wait_for(self.pool.acquire)
        try:
            yield block
        finally:
            self.pool.release(block)

    def _bring(self, bringing: _Bringing) -> None:
        if bringing.is_kept():
            self._kept.append(bringing.file.name)


def copy_files(job: CopyJob, files: Sequence[CopiedFile], *, there: Collection[str] = ()) -> Outcome:
    """Have every file whole at the target, or raise the first error; then what was finished stays, and nothing else is left.

    Files whose names are in `there` are read back first; a listing that lags and so lacks some only costs a vain request. Uses
    `threads` blocks of memory, and that of the tails of the files that are on their way.
    """
    return CopyRun(job).bring(files, there)


@final
@dataclass(frozen=True, slots=True)
class BytesFile:
    """A file whose bytes are at hand and were verified: the index."""

    name: str
    data: bytes

    @property
    def nbytes(self) -> int:
        """Its length."""
        return len(self.data)

    def is_whole(self, store: Store, run: CopyRun) -> bool:
        """Compare byte for byte."""
        try:
            return store.read(self.name, max_nbytes=self.nbytes) == self.data
        except (BlobNotFound, LimitExceeded):
            return False

    @contextmanager
    def opened(self, run: CopyRun) -> Iterator[Fill]:
        """The bytes themselves."""
        yield self._fill

    def _fill(self, start: int, out: memoryview, _crew: Crew) -> None:
        out[:] = self.data[start : start + len(out)]


@final
@dataclass(frozen=True, slots=True)
class BlobFile:
    """A blob of the checkpoint of `manifest`, at `source`."""

    source: Store
    manifest: Manifest
    entry: BlobEntry

    @property
    def name(self) -> str:
        """Its key."""
        return self.entry.name

    @property
    def nbytes(self) -> int:
        """Its length."""
        return self.entry.nbytes

    def is_whole(self, store: Store, run: CopyRun) -> bool:
        """Compare length and tail with the manifest, and every cell with the tail."""
        try:
            with self._opened(store, run) as blob, run.make_crew(run.job.num_lanes) as crew:
                for start in range(0, self.entry.tail_position, BLOCK_NBYTES):
                    crew.submit(partial(_check_block, blob, start, run, crew))
                crew.finish(run.check)
        except (CheckpointDamaged, CheckpointReplaced):
            return False
        return True

    @contextmanager
    def opened(self, run: CopyRun) -> Iterator[Fill]:
        """Open the blob at the source and check it as a load would: who wrote it, its head and its tail."""
        with self._opened(self.source, run) as blob:
            tail = bytearray(self.nbytes - self.entry.tail_position)
            with run.make_crew(1) as crew:
                crew.submit(partial(blob.reader.read, self.entry.tail_position, memoryview(tail), crew=crew))
                crew.finish(run.check)
            check_digest(tail, self.entry.tail_digest, file=self.name)
            yield partial(_fill, blob, memoryview(tail))

    @contextmanager
    def _opened(self, store: Store, run: CopyRun) -> Iterator[OpenBlob]:
        job = ReadJob(threads=1, patience=run.job.patience, check=run.check)
        alone = replace(self.manifest, blobs=(self.entry,))  # one blob at a time, so that few tails are in memory
        with open_blobs(store, alone, blobs=(0,), job=job, pool=run.pool) as opened, ExitStack() as closing:
            reader = SharedReader(store, self.entry, job.files)
            closing.callback(reader.close)
            yield OpenBlob(self.entry, reader, opened.tails[0])


def _check_block(blob: OpenBlob, start: int, run: CopyRun, crew: Crew) -> None:
    with run.block(crew) as block:
        data = block[: blob.entry.tail_position - start]
        blob.reader.read(start, data, crew=crew)
        blob.check_cells(data, start)


def _fill(blob: OpenBlob, tail: memoryview, start: int, out: memoryview, crew: Crew) -> None:
    """Fill `out` with the bytes of the whole blob from `start`: those before the tail are read and verified now."""
    size = max(0, min(blob.entry.tail_position - start, len(out)))
    if size:
        blob.reader.read(start, out[:size], crew=crew)
        blob.check_cells(out[:size], start)
    position = start + size - blob.entry.tail_position
    out[size:] = tail[position : position + len(out) - size] if size < len(out) else b""


@final
class _Bringing:
    """One file on its way, on a thread of the run's crew."""

    def __init__(self, file: CopiedFile, run: CopyRun, *, is_there: bool) -> None:
        self.file = file
        self._run = run
        self._is_there = is_there
        self._was_sent = False

    def is_kept(self) -> bool:
        """Have the file whole at the target; whether it was there already."""
        for _ in range(RESENDS):
            try:
                return self._bring()
            except (BlobExists, StorageUnavailable) as error:
                # It may have become whole all the same: the answer was lost, or another copy of the same checkpoint was quicker.
                self._is_there = True
                self._announce("again", detail=str(error))
        return self._bring()

    def _bring(self) -> bool:
        job, file = self._run.job, self.file
        job.check_right()
        if self._is_there:
            if file.is_whole(job.target, self._run):
                self._announce("kept")
                return not self._was_sent
            self._make_room()
        with file.opened(self._run) as fill:
            self._announce("begin")
            sending = _Sending(file, fill, self._run)
            try:
                sending.send()
            finally:
                self._was_sent |= sending.has_begun
        if job.reads_back and not file.is_whole(job.target, self._run):
            job.check_right()
            raise StorageError(
                f"{job.target.url}/{file.name}: expected to read back the {file.nbytes} bytes that were just written, found "
                "others: this storage, or the way to it, changes or loses what is written. Nothing was published",
                file=file.name,
            )
        self._announce("copied")
        return False

    def _make_room(self) -> None:
        """Have nothing under the name: what is there goes, if it may."""
        job, name = self._run.job, self.file.name
        if not job.may_remove:
            if not _is_taken(job.target, name):
                return
            raise CheckpointDamaged(
                f"{job.target.url}/{name}: expected the file that the manifest there names, found another one. Files of "
                "a committed checkpoint are never removed: copy to another place, or delete that checkpoint first",
                file=name,
            )
        job.check_right()
        job.target.delete((name,))
        self._announce("removed")

    def _announce(self, what: str, *, detail: str | None = None) -> None:
        self._run.job.events.event(f"copy.file.{what}", file=self.file.name, nbytes=self.file.nbytes, detail=detail)


def _is_taken(store: Store, name: str) -> bool:
    try:
        with store.open_blob(name):
            return True
    except BlobNotFound:
        return False


@final
class _Sending:
    """The blocks of one file: each is filled and written by a thread of its crew, and the last thing is to finish the blob."""

    def __init__(self, file: CopiedFile, fill: Fill, run: CopyRun) -> None:
        self.has_begun = False  # whether there is a writer, so that the file may have been made
        self._file = file
        self._fill = fill
        self._run = run
        self._writer: BlobWriter | None = None
        self._closing = ExitStack()
        self._lock = threading.Lock()

    def send(self) -> None:
        """Make the file durable at the target; on an error what was written of it is removed, if it can be."""
        with self._run.make_crew(self._run.job.num_lanes, at_rest=self._closing.close) as crew:
            for start in range(0, self._file.nbytes, BLOCK_NBYTES):
                crew.submit(partial(self._send_block, start, crew))
            crew.finish(self._run.check)
            crew.submit(partial(self._finish, crew))
            crew.finish(self._run.check)

    def _send_block(self, start: int, crew: Crew) -> None:
        # Blocks end on multiples of 4096 bytes, so that storage that wants to can take them past its cache.
        writer = self._open(crew)
        with self._run.block(crew) as block:
            data = block[: self._file.nbytes - start]
            self._fill(start, data, crew)
            with crew.call("write", file=self._file.name, position=start):
                writer.write_at(start, data)
        self._run.job.events.event("copy.block.written", file=self._file.name, nbytes=len(data))

    def _open(self, crew: Crew) -> BlobWriter:
        with self._lock:
            if self._writer is None:
                with crew.call("create", file=self._file.name):
                    writer = self._run.job.target.create_blob(self._file.name, nbytes=self._file.nbytes)
                    self._writer = self._closing.enter_context(writer)
                self.has_begun = True
            return self._writer

    def _finish(self, crew: Crew) -> None:
        with crew.call("finish", file=self._file.name, position=self._file.nbytes):
            self._open(crew).finish()
