"""Writing blobs: the bytes are those of the plan, writes keep to blocks, and an error leaves nothing behind."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyshard.engine.crew import Patience, StorageStuck
from anyshard.engine.slots import tabulate_slots
from anyshard.engine.write import WriteJob, write_blobs
from anyshard.errors import InvalidAppState, StorageFull
from anyshard.monitor.events import Emitter
from anyshard.monitor.sinks import RecordingSink
from anyshard.planning.pack import plan_save
from anyshard.records.digests import cell_digests
from anyshard.records.handles import ArraySource
from anyshard.records.layout import lay_out, place_after
from anyshard.records.tables import make_tensor_table, whole_shards
from anyshard.records.tail import BLOB_ALIGNMENT, CELL_NBYTES, HEAD_NBYTES, decode_tail, encode_head
from anyshard.storage.local import LocalStore
from anyshard.storage.memory import MemoryStore
from anyshard.storage.protocol import Store
from anyshard.storage.wrappers import Call, FaultStore, Rule, SequentialStore, Verb, WrapperStore, do_before, fail

from .scene import (
    ATTEMPT,
    CtrlC,
    Scene,
    assert_equal,
    count_descriptors,
    join_threads,
    make_arrays,
    make_local_store,
    make_pool,
    make_scene,
)

IMPATIENT = Patience(timeout_s=0.3, report_s=0.1)

MIXED = {
    "model/a": 100,
    "model/b": 64 * 1024,
    "model/c": 3 * CELL_NBYTES + 5,
    "model/d": 1,
    "optimizer/m": 64 * 1024 - 1,
    "optimizer/v": 2 * CELL_NBYTES,
}


class WritesSeen(WrapperStore):
    """Notes (position, nbytes) of every write, and the threads that are there to write."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.writes: list[tuple[int, int]] = []
        self.threads: set[str] = set()

    def around(self, call: Call, run):  # type: ignore[no-untyped-def]
        if call.verb is Verb.WRITE_AT:
            self.writes.append((call.position, call.nbytes))
            self.threads |= {name for thread in threading.enumerate() if (name := thread.name).startswith("anyshard-write")}
        return run()


@pytest.fixture
def scene() -> Scene:
    return make_scene(make_arrays(MIXED))


def test_layout_aligns_small_and_large_extents() -> None:
    """Extents follow the head at multiples of 64 bytes, from 64 KiB up of 4096 bytes."""
    assert [64, 192, 4096, 69632] == lay_out(np.array([100, 1, 65536, 65535])).tolist()


@given(st.lists(st.sampled_from([0, 1, 63, 64, 65, 4096, 65535, 65536, 65537, 70000, 1 << 40]) | st.integers(0, 200_000)))
def test_layout_is_that_of_one_extent_after_the_other(sizes: list[int]) -> None:
    """All positions at once are those that placing each extent behind the one before gives."""
    expected, end = [], HEAD_NBYTES
    for nbytes in sizes:
        expected.append(place_after(end, nbytes))
        end = expected[-1] + nbytes
    assert expected == lay_out(np.array(sizes, dtype=np.int64)).tolist()


def test_blob_is_head_extents_zeros_and_values(scene: Scene) -> None:
    """Every byte before the tail is what the format says, padding included."""
    store = MemoryStore()
    entry = scene.write(store).blobs[0]
    data = store.snapshot()[entry.name]
    tail = decode_tail(data[entry.tail_position :], tail_position=entry.tail_position, max_slots=9, file=entry.name)
    expected = bytearray(entry.tail_position)
    expected[:HEAD_NBYTES] = encode_head(ATTEMPT)
    contents = [array.tobytes() for address, array in scene.arrays.items() if address.startswith("model/")]
    for position, content in zip(tail.position.tolist(), [*contents, scene.values["model"]], strict=True):
        expected[position : position + len(content)] = content
    assert bytes(expected) == data[: entry.tail_position]
    assert (len(data), entry.tail_position) == (entry.nbytes, tail.tail_position)
    assert 0 == entry.tail_position % 64
    assert cell_digests(expected, CELL_NBYTES).tolist() == tail.cell_digests.tolist()


@pytest.mark.parametrize("num_blocks", [1, 2, 8])
@pytest.mark.parametrize("cells", [1, 3])
def test_block_size_and_number_do_not_change_the_bytes(num_blocks: int, cells: int) -> None:
    """One block or many, small or large: the same files."""
    reference, store = MemoryStore(), MemoryStore()
    make_scene(make_arrays(MIXED)).write(reference)
    make_scene(make_arrays(MIXED), pool=make_pool(num_blocks, cells)).write(store)
    assert reference.snapshot() == store.snapshot()


def test_sequential_store_gets_the_same_bytes_front_to_back(scene: Scene) -> None:
    """A store without parallel writes is written in rising order; its wrapper raises otherwise."""
    plain, sequential = MemoryStore(), WritesSeen(SequentialStore(inner := MemoryStore()))
    scene.write(plain)
    scene.write(sequential)
    assert plain.snapshot() == inner.snapshot()
    assert {"anyshard-write-0", "anyshard-write-1"} >= sequential.threads  # one for each blob


def test_writes_begin_on_block_borders_and_are_whole_pages(scene: Scene) -> None:
    """What O_DIRECT and multipart uploads need of every single write."""
    seen = WritesSeen(MemoryStore())
    scene.write(seen)
    assert [] == [(p, n) for p, n in seen.writes if p % scene.pool.block_nbytes or n % BLOB_ALIGNMENT]


def test_tail_longer_than_a_block_is_written_in_blocks() -> None:
    """Ten thousand slots have a tail of several blocks; it goes through the memory of the last one."""
    scene = make_scene(make_arrays({f"model/{'x' * 100}/{i}-{(i * 2654435761) % 2**32:08x}": 8 for i in range(10_000)}))
    store = MemoryStore()
    entry = scene.write(store).blobs[0]
    tail = store.snapshot()[entry.name][entry.tail_position :]
    assert 10_001 == len(decode_tail(tail, tail_position=entry.tail_position, max_slots=10_001, file=entry.name))


def test_section_is_cut_into_several_blobs(scene: Scene) -> None:
    """Blob k = 0 alone carries the values; entries come in the plan's order."""
    scene = make_scene(scene.arrays, max_blob_nbytes=2 * CELL_NBYTES)
    manifest = scene.write(store := MemoryStore())
    assert ["model"] * 3 + ["optimizer"] * 2 == [entry.section for entry in manifest.blobs]
    assert_equal(scene.arrays, scene.load(store, manifest))


def test_events_tell_the_life_of_a_blob(scene: Scene) -> None:
    """Begin, blocks, tail, durable: in this order for each blob."""
    sink = RecordingSink()
    manifest = scene.write(MemoryStore(), events=Emitter([sink], operation="op", rank=0))
    name = manifest.blobs[1].name
    names = [event.name for event in sink.events if event.file == name]
    assert ("save.blob.begin", "save.block.staged", "save.blob.durable") == (names[0], names[1], names[-1])
    assert sorted(set(names)) == [
        "save.blob.begin",
        "save.blob.durable",
        "save.blob.tail",
        "save.block.staged",
        "save.block.written",
    ]


@pytest.mark.parametrize("verb", [Verb.CREATE_BLOB, Verb.WRITE_AT, Verb.FINISH])
@pytest.mark.parametrize("nth", [1, 2])
def test_storage_error_is_raised_and_the_unfinished_blob_given_up(scene: Scene, verb: Verb, nth: int) -> None:
    """Disk full at any call: that error comes out, its blob is gone, all blocks are free, no thread stays (B053)."""
    full = StorageFull("no space left", file="data/x", errno=errno.ENOSPC)
    inner, before = MemoryStore(), threading.active_count()
    store = FaultStore(inner, [Rule(verb, "data/*", fail(full), nth=nth)])
    num_free = scene.pool.num_free
    with pytest.raises(StorageFull) as raised:
        scene.write(store)
    assert raised.value is full
    assert store.fired[0].key not in inner.snapshot()
    assert (num_free, before) == (scene.pool.num_free, threading.active_count())


@pytest.mark.parametrize("verb", [Verb.CREATE_BLOB, Verb.WRITE_AT, Verb.FINISH])
def test_failed_save_leaves_no_unfinished_file(scene: Scene, tmp_path: Path, verb: Verb) -> None:
    """On a disk the file of the blob that failed is gone and every descriptor is closed."""
    local, before = make_local_store(tmp_path), count_descriptors()
    store = FaultStore(local, [Rule(verb, "data/optimizer/*", fail(StorageFull("no space left", file="x")))])
    with pytest.raises(StorageFull):
        scene.write(store)
    assert before == count_descriptors()
    assert () == local.list("data/optimizer/").entries


def test_check_is_called_until_the_last_block_is_written(gate: threading.Event) -> None:
    """An error of another rank ends a save whose blocks are all staged while storage is slow."""
    calls = []

    def check() -> None:
        calls.append(None)
        if len(calls) > 2:  # the blob has two blocks
            gate.set()
            raise RuntimeError("rank 1 has failed")

    store = FaultStore(MemoryStore(), [Rule(Verb.WRITE_AT, "data/*", do_before(gate.wait))])
    with pytest.raises(RuntimeError, match="rank 1 has failed"):
        make_scene(make_arrays({"model/a": 2 * CELL_NBYTES - 4096})).write(store, check=check)
    assert {} == store.inner.snapshot()


def test_error_of_a_source_names_address_and_file(scene: Scene) -> None:
    """A tensor that cannot be read fails the save with its own error and a note that says where."""

    class Broken(ArraySource):
        def read_into(self, start: int, out: memoryview) -> None:
            raise RuntimeError("device lost")

    sources = [Broken(array) if address == "model/c" else ArraySource(array) for address, array in scene.arrays.items()]
    job = WriteJob(1, ATTEMPT, None, None, 1, "test", scene.values)
    store = MemoryStore()
    with pytest.raises(RuntimeError, match="device lost") as raised:
        write_blobs(store, scene.plan, sources=sources, job=job, pool=scene.pool)
    assert "model/c" in raised.value.__notes__[0]
    assert {} == store.snapshot()
    assert 4 == scene.pool.num_free


def test_source_of_another_length_is_refused(scene: Scene) -> None:
    """A tensor that was resized after planning is an error, not a shifted file."""
    sources = [ArraySource(np.zeros(3, np.uint8)) for _ in scene.arrays]
    job = WriteJob(1, ATTEMPT, None, None, 1, "test", scene.values)
    with pytest.raises(InvalidAppState, match="expected 100 bytes of a tensor, found 3"):
        write_blobs(MemoryStore(), scene.plan, sources=sources, job=job, pool=scene.pool)


def test_stuck_write_ends_with_the_name_of_its_file(scene: Scene, gate: threading.Event) -> None:
    """A write that never returns fails the save; its block is never lent again."""
    stuck = []

    def hang(call: Call, _run: object) -> None:
        stuck.append(np.frombuffer(call.buffer, np.uint8))
        gate.wait()

    store = FaultStore(MemoryStore(), [Rule(Verb.WRITE_AT, "data/*", hang)])
    with pytest.raises(StorageStuck, match=r"write data/model/0\.0-1-abcdefghijklm\.bin at byte 0"):
        scene.write(store, patience=IMPATIENT)
    assert 4 == scene.pool.num_free
    blocks = [np.frombuffer(scene.pool.acquire(), np.uint8) for _ in range(4)]
    assert not any(np.shares_memory(block, stuck[0]) for block in blocks)


@pytest.mark.parametrize("verb", [Verb.CREATE_BLOB, Verb.WRITE_AT, Verb.FINISH])
def test_what_a_stuck_call_held_is_closed_when_it_comes_back(
    scene: Scene, tmp_path: Path, gate: threading.Event, verb: Verb
) -> None:
    """The thread that was left behind closes all files and removes the unfinished ones."""
    local, before = make_local_store(tmp_path), count_descriptors()
    store = FaultStore(local, [Rule(verb, "data/optimizer/*", do_before(gate.wait))])
    with pytest.raises(StorageStuck, match="data/optimizer"):
        scene.write(store, patience=IMPATIENT)
    gate.set()
    join_threads("anyshard-write")
    assert (before, 4) == (count_descriptors(), scene.pool.num_free)
    assert [] == [entry.key for entry in local.list("data/optimizer/").entries if verb is not Verb.FINISH]


@pytest.mark.parametrize("verb", [Verb.CREATE_BLOB, Verb.WRITE_AT, Verb.FINISH])
def test_interrupted_save_leaves_nothing_open(scene: Scene, tmp_path: Path, ctrl_c: CtrlC, verb: Verb) -> None:
    """After Ctrl-C no thread, no file and no block is kept, and no unfinished blob is there."""
    local, before = make_local_store(tmp_path), (count_descriptors(), threading.active_count())
    store = FaultStore(local, [Rule(verb, "data/*", do_before(ctrl_c.press), nth=2)])
    with pytest.raises(KeyboardInterrupt):
        scene.write(store)
    join_threads("anyshard-write")  # one that has done its last task may not have ended yet
    assert (*before, 4) == (count_descriptors(), threading.active_count(), scene.pool.num_free)
    sizes = {entry.nbytes for name in ("model", "optimizer") for entry in local.list(f"data/{name}/").entries}
    assert sizes <= {entry.nbytes for entry in scene.write(MemoryStore()).blobs}


@pytest.mark.slow
def test_few_blobs_are_open_at_once(few_files: None, tmp_path: Path) -> None:
    """Four hundred sections are saved and loaded under a limit of open files that they do not fit in."""
    scene = make_scene(make_arrays({f"s{i}/w": 16 for i in range(400)}))
    store = LocalStore(tmp_path)
    store.prepare([f"data/s{i}/" for i in range(400)])
    assert_equal(scene.arrays, scene.load(store, scene.write(store)))


def test_many_ties_cost_little(scene: Scene) -> None:
    """A hundred thousand names of one tensor are listed in the time of one pass over them."""
    names = [f"m/{i:06}" for i in range(100_000)]
    tensors = make_tensor_table(names, ["uint8"] * len(names), [(3,)] * len(names), dict.fromkeys(names[1:], names[0]))
    plan = plan_save(whole_shards(tensors), ["m"], rank=0, max_blob_nbytes=1 << 30)
    began = time.process_time()
    slots = tabulate_slots(plan.shards, plan.blobs[0])
    assert time.process_time() - began < 5
    assert {names[0]: tuple(names[1:])} == slots.table.also
