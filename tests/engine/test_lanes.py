"""Stores that take a blob front to back only: several blobs are written at once, in few blocks, and never out of order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyshard.engine.arena import ArenaPool
from anyshard.engine.crew import Patience, StorageStuck
from anyshard.engine.images import Images, lay_out_images
from anyshard.engine.write import WriteJob, write_images
from anyshard.records.manifest import BlobEntry
from anyshard.records.tail import CELL_NBYTES
from anyshard.storage.memory import MemoryStore
from anyshard.storage.protocol import BlobWriter, Store
from anyshard.storage.wrappers import Call, FaultStore, Rule, SequentialStore, Verb, WrapperStore, do_before

from .scene import ATTEMPT, CtrlC, Scene, join_threads, make_arrays, make_pool, make_scene

Write = Callable[..., tuple[BlobEntry, ...]]
SIX = {f"s{i}/w": 3 * CELL_NBYTES + i for i in range(6)}


def write_from_arrays(store: Store, scene: Scene, **job: object) -> tuple[BlobEntry, ...]:
    """As a blocking save."""
    return scene.write(store, **job).blobs


def write_from_images(store: Store, scene: Scene, **job: object) -> tuple[BlobEntry, ...]:
    """As an asynchronous save."""
    layout = lay_out_images(scene.plan)
    images = Images(layout, ArenaPool().take(layout.total_nbytes))
    images.arena.memory[:] = bytes(images.arena.nbytes)
    for row, tensor in enumerate(scene.plan.shards.tensor.tolist()):
        position, nbytes = int(layout.row_position[row]), int(layout.row_nbytes[row])
        images.arena.memory[position : position + nbytes] = scene.arrays[scene.plan.shards.tensors.addresses[tensor]].tobytes()
    made = WriteJob(
        **{"generation": 1, "attempt": ATTEMPT, "step": 7, "run_id": None, "world_size": 1, "writer": "test"}
        | {"values": scene.values}
        | job
    )
    return write_images(store, scene.plan, images=images, job=made, pool=scene.pool)


both = pytest.mark.parametrize("write", [write_from_arrays, write_from_images])


class OpenBlobs(WrapperStore):
    """Counts the blobs that are being written, and notes where in memory all writes begin."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.num_open = 0
        self.max_open = 0
        self.memory: set[int] = set()
        self._lock = threading.Lock()

    def around(self, call: Call, run):  # type: ignore[no-untyped-def]
        if call.buffer is not None:
            self.memory.add(int(np.frombuffer(call.buffer, np.uint8).ctypes.data))
        return run()

    def create_blob(self, key: str, *, nbytes: int | None) -> BlobWriter:
        with self._lock:
            self.num_open += 1
            self.max_open = max(self.max_open, self.num_open)
        return _Counted(self, super().create_blob(key, nbytes=nbytes))

    def leave(self) -> None:
        with self._lock:
            self.num_open -= 1


class _Counted:
    def __init__(self, store: OpenBlobs, inner: BlobWriter) -> None:
        self._store = store
        self._inner = inner
        self.write_at, self.finish = inner.write_at, inner.finish

    def __enter__(self) -> BlobWriter:
        self._inner.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._inner.__exit__(kind, error, traceback)
        self._store.leave()


sizes = st.sampled_from([0, 1, 65_536, CELL_NBYTES - 64, CELL_NBYTES, 3 * CELL_NBYTES + 5]) | st.integers(0, 600_000)


@settings(max_examples=60, deadline=None)
@given(
    sections=st.lists(st.lists(sizes, max_size=4), min_size=1, max_size=6),
    max_blob_nbytes=st.sampled_from([1, CELL_NBYTES, 1 << 30]),
    blocks=st.tuples(st.sampled_from([1, 2, 3, 9]), st.sampled_from([1, 3])),
    threads=st.tuples(st.integers(1, 9), st.sampled_from([1, 2, 4, 16])),
    write=st.sampled_from([write_from_arrays, write_from_images]),
)
def test_same_files_from_few_blocks_and_few_open_blobs(
    sections: list[list[int]], max_blob_nbytes: int, blocks: tuple[int, int], threads: tuple[int, int], write: Write
) -> None:
    """Whatever the sizes: the bytes of parallel writes, in order, within the budget, with as many blobs open as threads allow."""
    arrays = make_arrays({f"s{i}/w{k}": nbytes for i, rows in enumerate(sections) for k, nbytes in enumerate([*rows, 1])})
    scene = make_scene(arrays, max_blob_nbytes=max_blob_nbytes, pool=make_pool(*blocks))
    store = OpenBlobs(SequentialStore(inner := MemoryStore(), streams_per_blob=threads[1]))
    assert scene.write(plain := MemoryStore()).blobs == write(store, scene, threads=threads[0])
    assert plain.snapshot() == inner.snapshot()
    assert (blocks[0], 0) == (scene.pool.num_free, store.num_open)
    assert store.max_open <= max(1, threads[0] // threads[1])
    assert write is write_from_images or len(store.memory) <= blocks[0]


@both
@pytest.mark.parametrize("num_blocks", [1, 4])
def test_blob_is_begun_while_another_one_is_finished(write: Write, num_blocks: int) -> None:
    """The first `finish` does not return before the last blob is begun; with one block in all as with many."""
    scene, has_last = make_scene(make_arrays(SIX), pool=make_pool(num_blocks)), threading.Event()
    rules = [
        Rule(Verb.CREATE_BLOB, "data/s5/*", do_before(has_last.set)),
        Rule(Verb.FINISH, "data/*", do_before(lambda: has_last.wait(30))),
    ]
    write(store := FaultStore(SequentialStore(MemoryStore()), rules), scene, threads=2)
    assert [Verb.CREATE_BLOB, Verb.FINISH] == sorted(call.verb for call in store.fired)
    assert has_last.is_set()


@both
def test_as_many_blobs_are_written_at_once_as_there_are_threads(write: Write) -> None:
    """Four writes of four blobs wait for each other, each with a block of its own."""
    meeting = threading.Barrier(4)
    rule = Rule(Verb.WRITE_AT, "data/*", do_before(lambda: meeting.wait(30)), times=4)
    write(store := FaultStore(SequentialStore(MemoryStore()), [rule]), make_scene(make_arrays(SIX)), threads=4)
    assert 4 == len({call.key for call in store.fired})


@both
def test_slow_blob_does_not_hold_up_the_others(write: Write) -> None:
    """With two blocks, one of which the first blob keeps, all others are finished."""
    scene, others = make_scene(make_arrays(SIX), pool=make_pool(2)), threading.Semaphore(0)

    def wait_for_others() -> None:
        assert all(others.acquire(timeout=30) for _ in range(5))

    rules = [
        Rule(Verb.WRITE_AT, "data/s0/*", do_before(wait_for_others)),
        Rule(Verb.FINISH, "data/s[1-5]/*", do_before(others.release), times=5),
    ]
    write(store := FaultStore(SequentialStore(MemoryStore()), rules), scene, threads=2)
    assert 6 == len(store.fired)


@both
def test_one_thread_writes_one_blob_after_the_other(write: Write) -> None:
    """With fewer threads than one blob takes streams, no two blobs are open at once."""
    write(store := OpenBlobs(SequentialStore(MemoryStore(), streams_per_blob=4)), make_scene(make_arrays(SIX)), threads=3)
    assert 1 == store.max_open


@both
def test_stuck_write_is_named_while_other_blobs_go_on(write: Write, gate: threading.Event) -> None:
    """The others are finished; then nothing moves any more."""
    scene, inner = make_scene(make_arrays(SIX)), MemoryStore()
    store = FaultStore(SequentialStore(inner), [Rule(Verb.WRITE_AT, "data/s0/*", do_before(gate.wait))])
    with pytest.raises(StorageStuck, match=r"write data/s0/0\.0-1-abcdefghijklm\.bin at byte 0"):
        write(store, scene, threads=2, patience=Patience(timeout_s=0.5, report_s=0.4))
    assert 4 == scene.pool.num_free
    gate.set()
    join_threads("anyshard-write")


def test_long_blob_is_no_stuck_one() -> None:
    """Each write that returns is progress, though one thread works on the same blob all the time."""
    scene, pause = make_scene(make_arrays({"s/w": 12 * CELL_NBYTES})), threading.Event()
    rule = Rule(Verb.WRITE_AT, "data/*", do_before(lambda: pause.wait(0.05)), times=12)
    store = FaultStore(SequentialStore(MemoryStore()), [rule])
    scene.write(store, patience=Patience(timeout_s=0.4, report_s=0.3))
    assert 12 == len(store.fired)


@both
@pytest.mark.parametrize("verb", [Verb.CREATE_BLOB, Verb.WRITE_AT, Verb.FINISH])
def test_interrupted_save_leaves_nothing_open(write: Write, ctrl_c: CtrlC, verb: Verb) -> None:
    """After Ctrl-C amid several open blobs all are given up, and no thread and no block is kept."""
    scene, before = make_scene(make_arrays(SIX)), threading.active_count()
    store = OpenBlobs(FaultStore(SequentialStore(MemoryStore()), [Rule(verb, "data/*", do_before(ctrl_c.press), nth=2)]))
    with pytest.raises(KeyboardInterrupt):
        write(store, scene)
    while threads := [thread for thread in threading.enumerate() if thread.name.startswith("anyshard-write")]:
        with suppress(RuntimeError):  # one that was interrupted in its start
            threads[0].join(10)
    assert (0, 4, before) == (store.num_open, scene.pool.num_free, threading.active_count())
