"""The trial of a store by all ranks of a group: made, written, read back, seen by each other, and taken away, before any save.

    coordinator   make directories, create a key -> announce it -> write -> collect -> see all keys -> announce the end
    other ranks   hear of it -> look for the coordinator's key -> create a key, write -> post -> hear the end

Then each rank removes what it made. On a failure it does so too, unless its storage does not answer.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Self, final

import numpy as np
from numpy.typing import NDArray

from anyshard.commit.attempt import own_error
from anyshard.commit.probe import PROBE_SECTION, Ground, KeyProbe, make_probe_id, name_probe_blob
from anyshard.commit.stamp import writer_name
from anyshard.coord.agreement import Agreement
from anyshard.coord.looks import Rarely
from anyshard.engine.blocks import BlockPool
from anyshard.engine.crew import Crew, Patience
from anyshard.engine.write import WriteJob, write_blobs
from anyshard.errors import AnyshardError, InvalidPath, StorageError, StorageStuck
from anyshard.operation import Operation
from anyshard.options import SaveOptions
from anyshard.records.handles import ArraySource
from anyshard.records.layout import lay_out
from anyshard.records.manifest import BlobEntry
from anyshard.records.rank_messages import Message, read_message
from anyshard.records.tables import BlobPlan, SavePlan, make_tensor_table, whole_shards

logger = logging.getLogger(__name__)

_MAX_TRIED_NBYTES = 32 << 20
_MIN_TRIED_NBYTES = 4 << 20  # less would time the sync alone
_READ_NBYTES = 1 << 20
_CACHED_S = 2.0  # how long a mount may take to show what another host has made
_SHOWN = 8


class _Announced(Message, frozen=True):
    """Where the trial is: the generation of its names, the coordinator's key and host, directories that were made for it.

    Each rank writes up to `max_nbytes`.
    """

    generation: int
    attempt: str
    host: str
    directories: tuple[str, ...]
    max_nbytes: int


class _Tried(Message, frozen=True):
    """A rank is done: its host, its key, whether it sees that of the coordinator."""

    host: str
    attempt: str
    sees_coordinator: bool


@final
class Trial:
    """One rank's side of the trial of a store; as a context, so that nothing stays of it.

    The coordinator calls `begin`, all ranks then `run` and `end`, each as a phase of `agreement`. `write_rate` is then how fast
    this rank wrote, in bytes a second with the sync.
    """

    def __init__(self, operation: Operation, agreement: Agreement, options: SaveOptions, pool: BlockPool) -> None:
        self._operation = operation
        self._group = operation.group
        self._store = operation.store
        self._agreement = agreement
        self._options = options
        self._pool = pool
        self._key: KeyProbe | None = None
        self._blob: str | None = None
        self._directories: Sequence[str] = ()
        self.write_rate = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is not None and not isinstance(own_error(error), StorageStuck):
            try:
                self._remove()
            except AnyshardError:
                logger.warning("%s: what the rehearsal made could not be removed", self._store.url, exc_info=True)

    def begin(self, ground: Ground) -> None:
        """On the coordinator: make the directories that saves need, and a key that all ranks must see."""
        self._directories = ground.directories
        self._store.prepare(ground.directories)
        attempt = make_probe_id()
        self._create_key(ground.generation, attempt)
        announced = _Announced(ground.generation, attempt, platform.node(), ground.directories, self._find_room())
        self._agreement.announce("trial", announced.encode())

    def run(self, nbytes: int) -> None:
        """Write as much as this rank's share of a checkpoint, or a part of it, with all other ranks, and read it back.

        Raises `InvalidPath` if the ranks do not all see what each of them writes, `StorageError` if the store loses writes.
        """
        announced = read_message(self._agreement.hear("trial"), _Announced)
        attempt = announced.attempt
        sees = self._group.is_coordinator or self._sees(announced.generation, attempt, time.monotonic() + _CACHED_S)
        if sees and not self._group.is_coordinator:
            self._directories, attempt = announced.directories, make_probe_id()
            self._create_key(announced.generation, attempt)
        if sees:
            self._write(min(max(nbytes, _MIN_TRIED_NBYTES), announced.max_nbytes), announced)
        self._agreement.post("tried", _Tried(platform.node(), attempt, sees).encode())
        if self._group.is_coordinator:
            self._judge(announced)
            self._agreement.announce("seen", b"")
        self._agreement.hear("seen")

    def end(self) -> None:
        """Take everything away again. Raises `StorageError` if the store does not delete."""
        self._remove()

    # --------------------------------------------------------------------------------------------------------------- parts

    def _find_room(self) -> int:
        """How much each rank may write; half of what is free stays free."""
        free = self._store.free_nbytes()
        return _MAX_TRIED_NBYTES if free is None else min(_MAX_TRIED_NBYTES, max(free // (2 * self._group.size), 1))

    def _create_key(self, generation: int, attempt: str) -> None:
        self._key = KeyProbe(self._store, generation=generation, attempt=attempt)
        self._key.create()

    def _sees(self, generation: int, attempt: str, deadline_s: float) -> bool:
        probe = KeyProbe(self._store, generation=generation, attempt=attempt)
        return probe.is_seen(max(0.0, deadline_s - time.monotonic()))

    def _judge(self, announced: _Announced) -> None:
        """Raise `InvalidPath`, naming ranks and hosts, unless each rank sees what the coordinator has made, and the other way."""
        posts = [read_message(post, _Tried) for post in self._agreement.collect("tried")]
        numbers, deadline_s = self._group.ranks, time.monotonic() + _CACHED_S
        blind = [rank for rank, post in enumerate(posts) if not post.sees_coordinator]
        others = [rank for rank in range(len(posts)) if rank not in (*blind, self._group.rank)]
        unseen = [rank for rank in others if not self._sees(announced.generation, posts[rank].attempt, deadline_s)]
        if not blind and not unseen:
            return
        shown = ", ".join(f"rank {numbers[rank]} on {posts[rank].host}" for rank in (blind or unseen)[:_SHOWN])
        own = f"rank {numbers[self._group.rank]} on {announced.host}"
        what = f"what {own} writes is not seen by {shown}" if blind else f"what is written by {shown} is not seen by {own}"
        raise InvalidPath(
            f"{self._store.url}: expected one place that all {len(posts)} ranks share, found that {what}"
            f"{' and others' if len(blind or unseen) > _SHOWN else ''}. Save to a shared filesystem, mounted on all hosts"
        )

    def _write(self, nbytes: int, announced: _Announced) -> None:
        data = np.frombuffer(np.random.default_rng(self._group.rank).bytes(nbytes), dtype=np.uint8)
        tensors = make_tensor_table([f"{PROBE_SECTION}/bytes"], ["uint8"], [(nbytes,)], {})
        rank = self._group.rank
        plan = SavePlan(whole_shards(tensors), (BlobPlan(PROBE_SECTION, rank, 0, np.arange(1)),))
        self._blob = name_probe_blob(rank, generation=announced.generation, attempt=announced.attempt)
        job, began_s = self._make_job(announced), time.perf_counter()
        entries = write_blobs(self._store, plan, sources=[ArraySource(data)], job=job, pool=self._pool)
        self.write_rate = nbytes / max(time.perf_counter() - began_s, 1e-9)
        self._read_back(entries[0], data, job)

    def _make_job(self, announced: _Announced) -> WriteJob:
        return WriteJob(
            generation=announced.generation,
            attempt=announced.attempt,
            step=None,
            run_id=None,
            world_size=self._group.size,
            writer=writer_name(),
            values={PROBE_SECTION: b""},
            threads=self._options.threads,
            events=self._operation.events,
            patience=Patience(self._options.timeout_s),
            check=Rarely(self._agreement.check),
        )

    def _read_back(self, entry: BlobEntry, data: NDArray[np.uint8], job: WriteJob) -> None:
        with Crew(1, name="anyshard-probe", patience=job.patience) as crew:
            crew.submit(partial(self._compare, crew, entry, data))
            crew.finish(job.check)

    def _compare(self, crew: Crew, entry: BlobEntry, data: NDArray[np.uint8]) -> None:
        start, memory = int(lay_out(np.array([data.nbytes]))[0]), np.empty(_READ_NBYTES, dtype=np.uint8)
        with crew.call("read", file=entry.name), self._store.open_blob(entry.name) as reader:
            for position in range(0, data.nbytes, _READ_NBYTES):
                part = memory[: data.nbytes - position]
                reader.read_into(start + position, part.data)
                if reader.nbytes != entry.nbytes or not np.array_equal(part, data[position : position + len(part)]):
                    raise self._lost(entry, reader.nbytes, start + position)

    def _lost(self, entry: BlobEntry, nbytes: int, position: int) -> StorageError:
        return StorageError(
            f"{self._store.url}: {entry.name}: expected to read back the {entry.nbytes} bytes that were written, found others "
            f"({nbytes} bytes, at {position}): the store loses or changes writes. Do not save there before it is repaired",
            file=entry.name,
        )

    def _remove(self) -> None:
        key, blob, directories = self._key, self._blob, self._directories
        self._key, self._blob, self._directories = None, None, ()
        with ExitStack() as stack:  # which does all of it, even if some fails, the last one first
            stack.callback(self._store.delete, sorted(directories, reverse=True))
            if key is not None:
                stack.callback(key.remove)
            if blob is not None:
                stack.callback(self._store.delete, [blob])
