"""A small checkpoint of NumPy arrays for the engine's tests: written, listed, planned, read; of other rooms only planning."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from anyshard.engine.blocks import BlockPool
from anyshard.engine.read import ReadJob, open_blobs
from anyshard.engine.write import WriteJob, write_blobs
from anyshard.planning.match import match_shards
from anyshard.planning.pack import make_index, plan_save
from anyshard.planning.reads import plan_reads
from anyshard.records.handles import ArrayDestination, ArraySource, Destination
from anyshard.records.load_plan import BlobLayout, LoadPlan, ReadLimits
from anyshard.records.manifest import Manifest, StepState
from anyshard.records.tables import SavePlan, ShardTable, make_tensor_table, whole_shards
from anyshard.records.tail import CELL_NBYTES, Tail
from anyshard.storage.local import LocalStore
from anyshard.storage.protocol import Store

ATTEMPT = "abcdefghijklm"
Arrays = Mapping[str, NDArray[np.generic]]


def make_arrays(sizes: Mapping[str, int]) -> dict[str, NDArray[np.generic]]:
    """1-d arrays of bytes whose contents tell addresses and positions apart."""
    return {
        address: (np.arange(size, dtype=np.uint64) * 2654435761 + 977 * seed).astype(np.uint32).view(np.uint8)[:size].copy()
        for seed, (address, size) in enumerate(sizes.items())
    }


def make_pool(num_blocks: int = 4, cells: int = 1) -> BlockPool:
    """A pool of small blocks, so that small blobs already cross their borders."""
    return BlockPool(byte_budget=num_blocks * cells * CELL_NBYTES, block_nbytes=cells * CELL_NBYTES)


def tabulate(arrays: Arrays) -> ShardTable:
    """One whole shard per array, in the order of their addresses."""
    names = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64", 16: "complex128"}
    dtypes = [names[array.itemsize] for array in arrays.values()]
    return whole_shards(make_tensor_table(list(arrays), dtypes, [array.shape for array in arrays.values()], {}))


@dataclass(frozen=True)
class Scene:
    """Arrays, how they are saved, and the pool that all operations share."""

    arrays: Arrays
    values: Mapping[str, bytes]
    plan: SavePlan
    pool: BlockPool

    def write(self, store: Store, **job: object) -> Manifest:
        """Write all blobs and make the manifest that lists them."""
        sources = [ArraySource(self.arrays[address]) for address in self.plan.shards.tensors.addresses]
        defaults = {"generation": 1, "attempt": ATTEMPT, "step": 7, "run_id": None, "world_size": 1, "writer": "test"}
        blobs = write_blobs(
            store, self.plan, sources=sources, job=WriteJob(**{**defaults, "values": self.values, **job}), pool=self.pool
        )
        return Manifest(
            generation=1,
            attempt=ATTEMPT,
            state=StepState.COMMITTED,
            step=7,
            run_id=None,
            sections=tuple(self.values),
            time="2030-01-01T00:00:00Z",
            writer="test",
            world_size=1,
            num_rows=len(self.arrays),
            num_slots=len(self.arrays) + len(self.values),
            index=None,
            blobs=blobs,
        )

    def plan_load(self, wanted: ShardTable, tails: Mapping[int, Tail], max_gap_nbytes: int = 0) -> LoadPlan:
        """The reads that fill `wanted`, none longer than a block of the pool."""
        layouts = {blob: BlobLayout.of(tail) for blob, tail in tails.items()}
        limits = ReadLimits(self.pool.block_nbytes, max_gap_nbytes)
        matches = match_shards(wanted, make_index([self.plan], self.plan.shards.tensors))
        return plan_reads(matches, layouts, limits=limits)

    def load(self, store: Store, manifest: Manifest, job: ReadJob = ReadJob()) -> Arrays:  # noqa: B008 - frozen
        """Everything that was saved, read back into fresh arrays."""
        found = {address: np.zeros_like(array) for address, array in self.arrays.items()}
        self.fill(store, manifest, [ArrayDestination(found[a]) for a in self.plan.shards.tensors.addresses], job)
        return found

    def fill(self, store: Store, manifest: Manifest, destinations: list[Destination], job: ReadJob = ReadJob()) -> None:  # noqa: B008
        """Fill one destination per saved array, in the order of the table."""
        with open_blobs(store, manifest, blobs=range(len(manifest.blobs)), job=job, pool=self.pool) as blobs:
            blobs.fill(self.plan_load(self.plan.shards, blobs.tails), destinations)


def make_scene(arrays: Arrays, *, max_blob_nbytes: int = 1 << 30, pool: BlockPool | None = None) -> Scene:
    """A scene whose sections are the first components of the addresses."""
    arrays = dict(sorted(arrays.items()))
    sections = sorted({address.partition("/")[0] for address in arrays})
    plan = plan_save(tabulate(arrays), sections, rank=0, max_blob_nbytes=max_blob_nbytes)
    return Scene(arrays, {section: f"values of {section}".encode() for section in sections}, plan, pool or make_pool())


def make_local_store(root: Path) -> LocalStore:
    """A store on disk with the directories of both sections."""
    store = LocalStore(root)
    store.prepare(["data/model/", "data/optimizer/"])
    return store


def count_descriptors() -> int:
    """Open files of this process."""
    return len(os.listdir("/proc/self/fd"))


def join_threads(*names: str) -> None:
    """Wait for all threads whose names begin with one of these."""
    for thread in threading.enumerate():
        if thread.name.startswith(names):
            thread.join(timeout=10)
            assert not thread.is_alive()


class CtrlC:
    """Interrupts of the main thread, each of which has arrived when `press` returns on another thread."""

    def __init__(self) -> None:
        self._arrived = threading.Semaphore(0)

    def press(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        assert self._arrived.acquire(timeout=30)

    def handle(self, _number: int, _frame: object) -> None:
        self._arrived.release()
        raise KeyboardInterrupt


def assert_equal(expected: Arrays, found: Arrays) -> None:
    """The same addresses with the same bytes."""
    assert list(expected) == list(found)
    assert [] == [address for address in expected if expected[address].tobytes() != found[address].tobytes()]
