"""Images of blobs: written from the arena they give the very same files, and nobody reads an arena that is not theirs."""

from __future__ import annotations

import errno
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyshard.engine import images as images_module
from anyshard.engine import write as write_module
from anyshard.engine.arena import Arena, ArenaPool
from anyshard.engine.crew import Patience, StorageStuck
from anyshard.engine.images import Images, lay_out_images
from anyshard.engine.write import WriteJob, write_images
from anyshard.errors import StorageFull
from anyshard.monitor.events import Emitter
from anyshard.monitor.sinks import RecordingSink
from anyshard.records.manifest import BlobEntry
from anyshard.records.tail import CELL_NBYTES
from anyshard.storage.memory import MemoryStore
from anyshard.storage.protocol import Store
from anyshard.storage.wrappers import Call, FaultStore, Rule, SequentialStore, Verb, WrapperStore, do_before, fail

from .scene import ATTEMPT, Scene, count_descriptors, join_threads, make_arrays, make_local_store, make_pool, make_scene

IMPATIENT = Patience(timeout_s=0.3, report_s=0.1)
SIZES = {"model/a": 3 * CELL_NBYTES, "model/b": 100, "model/c": 0, "optimizer/m": 2 * CELL_NBYTES + 5, "optimizer/v": 65_536}


class WritesSeen(WrapperStore):
    """Notes position, length and address of every write, by file."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.writes: set[tuple[str, int, int]] = set()
        self.addresses: list[int] = []

    def around(self, call: Call, run):  # type: ignore[no-untyped-def]
        if call.verb is Verb.WRITE_AT:
            self.writes.add((call.key, call.position, call.nbytes))
            self.addresses.append(address_of(call.buffer))
        return run()


def address_of(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def stage(scene: Scene, arena: Arena | None = None) -> Images:
    """The scene's arrays in an arena, as a snapshot leaves them: without heads, zeros in the gaps."""
    layout = lay_out_images(scene.plan)
    images = Images(layout, arena or ArenaPool().take(layout.total_nbytes))
    images.arena.memory[:] = bytes(images.arena.nbytes)
    for row, tensor in enumerate(scene.plan.shards.tensor.tolist()):
        position, nbytes = int(layout.row_position[row]), int(layout.row_nbytes[row])
        images.arena.memory[position : position + nbytes] = scene.arrays[scene.plan.shards.tensors.addresses[tensor]].tobytes()
    return images


def write(store: Store, scene: Scene, images: Images, **job: object) -> tuple[BlobEntry, ...]:
    """Write the scene from its images, as `Scene.write` does from its arrays."""
    made = WriteJob(1, ATTEMPT, 7, None, 1, "test", scene.values)
    return write_images(store, scene.plan, images=images, job=replace(made, **job), pool=scene.pool)


@pytest.fixture
def scene() -> Scene:
    return make_scene(make_arrays(SIZES))


sizes = st.sampled_from([0, 1, 64, 65_535, 65_536, CELL_NBYTES - 64, CELL_NBYTES, 2 * CELL_NBYTES]) | st.integers(0, 300_000)
values = st.sampled_from([0, 1, 65_536, CELL_NBYTES, 3 * CELL_NBYTES + 17])


@settings(max_examples=60, deadline=None)
@given(
    sections=st.lists(st.tuples(st.lists(sizes, max_size=5), values), min_size=1, max_size=3),
    max_blob_nbytes=st.sampled_from([1, CELL_NBYTES, 1 << 30]),
    cells=st.sampled_from([1, 3]),
)
def test_files_are_those_of_the_sources(sections: list[tuple[list[int], int]], max_blob_nbytes: int, cells: int) -> None:
    """Blobs of all shapes: the same entries, the same bytes, in the same writes."""
    arrays = {f"s{i}/w{k}": nbytes for i, (rows, _) in enumerate(sections) for k, nbytes in enumerate(rows)}
    made = make_scene(make_arrays(arrays | {"t/w": 1}), max_blob_nbytes=max_blob_nbytes, pool=make_pool(2, cells))
    contents = {f"s{i}": bytes([i + 1]) * nbytes for i, (_, nbytes) in enumerate(sections)}
    made = replace(made, values={section: contents.get(section, b"") for section in made.values})
    expected, found = WritesSeen(MemoryStore()), WritesSeen(MemoryStore())
    entries = made.write(expected).blobs
    assert entries == write(found, made, stage(made))
    assert expected.inner.snapshot() == found.inner.snapshot()
    assert expected.writes == found.writes


def test_sections_without_tensors_have_an_image_of_the_head(scene: Scene) -> None:
    """A section of values alone is a page of the arena, of which the head is written; the values come from elsewhere."""
    scene = make_scene(make_arrays({"a/empty": 0, "b/w": 5, "c/none": 0}))
    images, store = stage(scene), MemoryStore()
    assert ((0, 4096, 8192), (64, 69, 64), 12_288) == (images.layout.start, images.layout.nbytes, images.layout.total_nbytes)
    assert ([0, 4160, 0], [0, 5, 0]) == (images.layout.row_position.tolist(), images.layout.row_nbytes.tolist())
    assert scene.write(MemoryStore()).blobs == write(store, scene, images)
    assert 3 == len(store.snapshot())


def test_a_plan_without_blobs_still_has_an_arena(scene: Scene) -> None:
    """A rank that writes nothing takes the smallest arena and writes nothing."""
    nothing = replace(scene, plan=replace(scene.plan, blobs=()))
    layout = lay_out_images(nothing.plan)
    images = Images(layout, ArenaPool().take(layout.total_nbytes))
    assert (4096, ()) == (layout.total_nbytes, write(MemoryStore(), nothing, images))


def test_whole_blocks_are_written_from_the_arena(scene: Scene) -> None:
    """All blocks but the last of each blob go from the arena's own pages to storage, at addresses that direct I/O takes."""
    images, store = stage(scene), WritesSeen(MemoryStore())
    write(store, scene, images)
    begin = address_of(images.arena.memory)
    inside = sorted(at - begin for at in store.addresses if 0 <= at - begin < images.arena.nbytes)
    starts = zip(images.layout.start, (3, 2), strict=True)
    assert [start + i * CELL_NBYTES for start, count in starts for i in range(count)] == inside
    assert [] == [at for at in store.addresses if at % 4096]


def test_second_save_makes_no_slot_tables(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows from the plan is made with the layout, once for all saves; the second one has its own head and tail."""
    made = []
    for module in (images_module, write_module):
        original = module.tabulate_slots
        monkeypatch.setattr(module, "tabulate_slots", lambda *given, original=original: made.append(given) or original(*given))
    images, second = stage(scene), "mlkjihgfedcba"
    write(MemoryStore(), scene, images)
    write(store := MemoryStore(), scene, images, attempt=second, step=8)
    assert len(scene.plan.blobs) == len(made)
    scene.write(expected := MemoryStore(), attempt=second, step=8)
    assert expected.snapshot() == store.snapshot()


def test_an_arena_that_is_too_small_is_refused(scene: Scene) -> None:
    """Images never end before their blobs do."""
    with pytest.raises(ValueError, match="expected an arena of 1392640 bytes, found 4096"):
        Images(lay_out_images(scene.plan), ArenaPool().take(1))


def test_events_are_those_of_a_blocking_save(scene: Scene) -> None:
    """Whoever watches blobs sees the same life of each."""
    sinks = RecordingSink(), RecordingSink()
    scene.write(MemoryStore(), events=Emitter([sinks[0]], operation="op", rank=0))
    write(MemoryStore(), scene, stage(scene), events=Emitter([sinks[1]], operation="op", rank=0))
    expected, found = (sorted((event.name, event.file or "", event.nbytes or 0) for event in sink.events) for sink in sinks)
    assert expected == found


@pytest.mark.parametrize("verb", [Verb.CREATE_BLOB, Verb.WRITE_AT, Verb.FINISH])
def test_failed_save_leaves_nothing_running(scene: Scene, tmp_path: Path, verb: Verb) -> None:
    """Disk full: no thread, no file and no block stays, and the arena may be used again."""
    pool, local, before = ArenaPool(), make_local_store(tmp_path), (count_descriptors(), threading.active_count())
    images = stage(scene, pool.take(lay_out_images(scene.plan).total_nbytes))
    full = StorageFull("no space left", file="x", errno=errno.ENOSPC)
    with pytest.raises(StorageFull):
        write(FaultStore(local, [Rule(verb, "data/optimizer/*", fail(full))]), scene, images)
    pool.give_back(images.arena)
    pool.take(1)
    assert (1, 4, before[1]) == (pool.num_hits, scene.pool.num_free, threading.active_count())
    assert () == local.list("data/optimizer/").entries


def test_arena_of_a_stuck_save_is_abandoned(scene: Scene, gate: threading.Event) -> None:
    """A write that never returns may still read the arena, so nobody gets it again."""
    pool, store = ArenaPool(), MemoryStore()
    images = stage(scene, pool.take(lay_out_images(scene.plan).total_nbytes))
    rule = Rule(Verb.WRITE_AT, "data/*", do_before(gate.wait))
    with pytest.raises(StorageStuck, match="write data/model"):
        write(FaultStore(store, [rule]), scene, images, patience=IMPATIENT)
    pool.give_back(images.arena)
    pool.take(1)
    gate.set()
    join_threads("anyshard-write")
    assert (0, 4) == (pool.num_hits, scene.pool.num_free)
    assert [] == [key for key in store.snapshot() if key.startswith("data/model/")]


def test_check_ends_a_save_that_is_all_submitted(gate: threading.Event) -> None:
    """Nothing is staged for long, so the thread that waits for the writes is the one that hears of other ranks."""
    scene, calls = make_scene(make_arrays({"model/a": 2 * CELL_NBYTES - 4096})), []

    def check() -> None:
        calls.append(None)
        if len(calls) > 2:  # one for each block of the blob
            gate.set()
            raise RuntimeError("rank 1 has failed")

    store = FaultStore(inner := MemoryStore(), [Rule(Verb.WRITE_AT, "data/*", do_before(gate.wait))])
    with pytest.raises(RuntimeError, match="rank 1 has failed"):
        write(store, scene, stage(scene), check=check)
    assert {} == inner.snapshot()


def test_sequential_store_gets_the_same_bytes_front_to_back(scene: Scene) -> None:
    """A store without parallel writes is written in rising order, from the arena and behind it."""
    scene.write(plain := MemoryStore())
    write(SequentialStore(inner := MemoryStore()), scene, stage(scene))
    assert plain.snapshot() == inner.snapshot()


def test_files_on_disk_are_the_same(scene: Scene, tmp_path: Path) -> None:
    """With direct I/O from the arena, where the filesystem has it, a disk holds what memory does."""
    local = make_local_store(tmp_path)
    write(local, scene, stage(scene))
    scene.write(expected := MemoryStore())
    found = {key: local.read(key, max_nbytes=1 << 24) for key in expected.snapshot()}
    assert expected.snapshot() == found
