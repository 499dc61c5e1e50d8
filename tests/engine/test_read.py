"""Reading blobs: everything comes back, in any layout; every wrong byte is found and named; memory stays in the budget."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyshard.engine.crew import Patience, StorageStuck
from anyshard.engine.read import ReadJob, open_blobs
from anyshard.engine.readers import OpenFiles
from anyshard.errors import CheckpointDamaged, CheckpointReplaced, StorageError
from anyshard.records.handles import ArrayDestination
from anyshard.records.manifest import Manifest
from anyshard.records.tables import ShardTable
from anyshard.records.tail import CELL_NBYTES
from anyshard.storage.memory import MemoryStore
from anyshard.storage.wrappers import Action, Call, CountingStore, FaultStore, Rule, Verb, do_before, fail, flip_bit

from .scene import (
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

IMPATIENT = ReadJob(patience=Patience(timeout_s=0.3, report_s=0.1))

SIZES = {"model/a": 100, "model/b": 3 * CELL_NBYTES + 5, "model/c": 70_000, "optimizer/m": 2 * CELL_NBYTES, "optimizer/v": 8}


@pytest.fixture
def scene() -> Scene:
    return make_scene(make_arrays(SIZES))


def rewrite(store: MemoryStore, name: str, change: Callable[[bytearray], None]) -> None:
    """Change the bytes of a blob behind everybody's back."""
    data = bytearray(store.snapshot()[name])
    change(data)
    store.delete([name])
    with store.create_blob(name, nbytes=len(data)) as writer:
        writer.write_at(0, memoryview(data))
        writer.finish()


def lose_time(gate: threading.Event) -> Action:
    """The call is done, but does not come back before the gate is open."""

    def act(_call: Call, run: Callable[[], object]) -> object:
        result = run()
        gate.wait()
        return result

    return act


@pytest.mark.parametrize("threads", [1, 4, 1_000_000])
@pytest.mark.parametrize("num_blocks", [1, 3])
def test_what_was_written_is_read(threads: int, num_blocks: int) -> None:
    """Whatever the number of threads and blocks, every byte comes back."""
    scene = make_scene(make_arrays(SIZES), pool=make_pool(num_blocks))
    manifest = scene.write(store := MemoryStore())
    assert_equal(scene.arrays, scene.load(store, manifest, ReadJob(threads=threads)))


def test_values_of_a_section_are_read(scene: Scene) -> None:
    """The values slot gives back the payload that was written."""
    manifest = scene.write(store := MemoryStore())
    with open_blobs(store, manifest, blobs=[0, 1], job=ReadJob(), pool=scene.pool) as blobs:
        assert scene.values == {section: blobs.read_values(section) for section in manifest.sections}


@pytest.mark.parametrize("dtype", ["<u1", "<u2", "<u4", "<u8", "<c16"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_elements_of_every_size_reach_strided_destinations(dtype: str, order: str) -> None:
    """Dense or transposed memory, crossing blocks: the same elements (bits of complex128 included)."""
    bits = make_arrays({"m/x": 16 * 300 * 250})["m/x"].view(dtype)[: 300 * 250].reshape(300, 250)
    scene = make_scene({"m/x": bits})
    manifest = scene.write(store := MemoryStore())
    found = np.zeros((300, 250), dtype, order=order)
    scene.fill(store, manifest, [ArrayDestination(found)])
    assert bits.tobytes() == found.tobytes()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_region_is_read_alone(data: st.DataObject) -> None:
    """A region of a tensor comes back right and costs no more than the cells it lies in."""
    shape = tuple(data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=3)))
    bits = make_arrays({"m/x": 8 * int(np.prod(shape))})["m/x"].view("<u8").reshape(shape)
    offsets = [data.draw(st.integers(0, n - 1)) for n in shape]
    lengths = [data.draw(st.integers(1, n - o)) for n, o in zip(shape, offsets, strict=True)]
    scene = make_scene({"m/x": bits, "m/a": np.zeros(5, np.uint8)})
    manifest = scene.write(store := MemoryStore())
    tensors = scene.plan.shards.tensors
    wanted = ShardTable(tensors, np.array([1]), np.array([offsets]), np.array([lengths]))
    found = np.zeros(lengths, "<u8")
    with open_blobs(store, manifest, blobs=[0], job=ReadJob(), pool=scene.pool) as blobs:
        blobs.fill(scene.plan_load(wanted, blobs.tails), [ArrayDestination(found)])
    assert bits[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))].tolist() == found.tolist()


def test_few_tensors_cost_about_their_bytes() -> None:
    """3 of 100 tensors are read with few calls and little more than their own cells (B037)."""
    scene = make_scene(make_arrays({f"model/{i:02}": 100 * 1024 for i in range(100)}))
    manifest = scene.write(inner := MemoryStore())
    table = scene.plan.shards
    wanted = replace(table, tensor=table.tensor[:3], offsets=table.offsets[:3], lengths=table.lengths[:3])
    found = [np.zeros(100 * 1024, np.uint8) for _ in range(3)]
    store = CountingStore(inner)
    with open_blobs(store, manifest, blobs=[0], job=ReadJob(), pool=scene.pool) as blobs:
        before = store.count(Verb.READ_INTO)
        blobs.fill(scene.plan_load(wanted, blobs.tails), [ArrayDestination(array) for array in found])
    after = store.count(Verb.READ_INTO)
    assert [scene.arrays[f"model/{i:02}"].tobytes() for i in range(3)] == [array.tobytes() for array in found]
    assert (2, 2 * CELL_NBYTES) == (after.calls - before.calls, after.nbytes - before.nbytes)


def test_wrong_cell_is_named_before_it_is_placed(scene: Scene) -> None:
    """The error names file, cell, bytes and addresses; the destination of the damaged cell is as before."""
    manifest = scene.write(store := MemoryStore())
    name = manifest.blobs[0].name
    rewrite(store, name, lambda data: data.__setitem__(2 * CELL_NBYTES + 9, data[2 * CELL_NBYTES + 9] ^ 4))
    found = {address: np.zeros_like(array) for address, array in scene.arrays.items()}
    with pytest.raises(CheckpointDamaged, match=r"cell 2 \(bytes 524288 to 786432\); it holds model/b\.") as raised:
        scene.fill(store, manifest, [ArrayDestination(array) for array in found.values()])
    assert name == raised.value.file
    position = 2 * CELL_NBYTES - 4096  # where cell 2 begins within model/b, which begins at 4096
    assert not found["model/b"][position : position + CELL_NBYTES].any()
    assert 4 == scene.pool.num_free


def test_every_flipped_bit_of_a_small_blob_is_found() -> None:
    """No byte of a blob is under no digest: head, extents, padding, values, tail."""
    scene = make_scene(make_arrays({"m/x": 50}), pool=make_pool(1))
    manifest = scene.write(store := MemoryStore())
    name, size = manifest.blobs[0].name, manifest.blobs[0].nbytes
    undetected = [position for position in range(0, size, 7) if not is_damage_found(scene, store, manifest, name, position)]
    assert [] == undetected
    assert_equal(scene.arrays, scene.load(store, manifest))


def is_damage_found(scene: Scene, store: MemoryStore, manifest: Manifest, name: str, position: int) -> bool:
    """Whether a load fails while one bit is wrong; the bit is put right again."""
    flip = lambda data: data.__setitem__(position, data[position] ^ (1 << position % 8))  # noqa: E731
    rewrite(store, name, flip)
    try:
        scene.load(store, manifest)
    except CheckpointDamaged:
        return True
    finally:
        rewrite(store, name, flip)
    return False


def test_verify_finds_damage_and_touches_nothing(scene: Scene) -> None:
    """The first pass of `verify="first"` has no destinations at all."""
    manifest = scene.write(inner := MemoryStore())
    store = FaultStore(inner, [Rule(Verb.READ_INTO, manifest.blobs[1].name, flip_bit(5), nth=3)])
    with open_blobs(store, manifest, blobs=[0, 1], job=ReadJob(), pool=scene.pool) as blobs:
        plan = scene.plan_load(scene.plan.shards, blobs.tails)
        with pytest.raises(CheckpointDamaged, match="cell 0"):
            blobs.verify(plan)
        blobs.verify(plan)


def test_damaged_values_are_never_returned(scene: Scene) -> None:
    """The payload of the values slot is verified like every other byte."""
    manifest = scene.write(inner := MemoryStore())
    store = FaultStore(inner, [Rule(Verb.READ_INTO, manifest.blobs[0].name, flip_bit(0), nth=3)])
    with open_blobs(store, manifest, blobs=[0], job=ReadJob(), pool=scene.pool) as blobs:
        with pytest.raises(CheckpointDamaged, match="cell 3"):
            blobs.read_values("model")
        assert scene.values["model"] == blobs.read_values("model")


def test_values_of_a_rank_without_blobs_are_damage(scene: Scene) -> None:
    """Records that name a rank which has written nothing are never followed."""
    manifest = scene.write(store := MemoryStore())
    with (
        open_blobs(store, manifest, blobs=[0], job=ReadJob(), pool=scene.pool) as blobs,
        pytest.raises(CheckpointDamaged, match="blobs of rank 7 in section model"),
    ):
        blobs.read_values("model", rank=7)


def test_damaged_head_is_found_when_the_blob_is_opened(scene: Scene) -> None:
    """A file that does not begin as the tail says was put together from two."""
    manifest = scene.write(store := MemoryStore())
    rewrite(store, manifest.blobs[0].name, lambda data: data.__setitem__(20, data[20] ^ 1))
    with (
        pytest.raises(CheckpointDamaged, match="expected the head"),
        open_blobs(store, manifest, blobs=[0], job=ReadJob(), pool=scene.pool),
    ):
        pass


def test_tail_must_be_the_one_that_the_manifest_signs(scene: Scene) -> None:
    """A whole blob of another save, which agrees with itself, is refused."""
    manifest = scene.write(store := MemoryStore())
    entry = replace(manifest.blobs[0], tail_digest=manifest.blobs[1].tail_digest)
    with pytest.raises(CheckpointDamaged, match="digest"):
        scene.load(store, replace(manifest, blobs=(entry, manifest.blobs[1])))


@pytest.mark.parametrize("cut", [1, 4096, 300_000])
def test_cut_blob_is_found_when_it_is_opened(scene: Scene, cut: int) -> None:
    """A file of another length than the manifest says never gets as far as a read."""
    manifest = scene.write(store := MemoryStore())
    rewrite(store, manifest.blobs[0].name, lambda data: data.__delitem__(slice(len(data) - cut, len(data))))
    with pytest.raises(CheckpointDamaged, match="expected a length of"):
        scene.load(store, manifest)


def test_missing_blob_is_an_incomplete_copy(scene: Scene) -> None:
    """A listed blob that is not there is damage of the checkpoint, not a missing checkpoint."""
    manifest = scene.write(store := MemoryStore())
    store.delete([manifest.blobs[1].name])
    with pytest.raises(CheckpointDamaged, match="incomplete copy"):
        scene.load(store, manifest)


def test_swapped_blobs_are_found(scene: Scene) -> None:
    """A manifest that lists a blob under another section's entry is refused."""
    manifest = scene.write(store := MemoryStore())
    swapped = replace(manifest, blobs=(replace(manifest.blobs[0], section="optimizer"), manifest.blobs[1]))
    with pytest.raises(CheckpointDamaged, match="section and rank"):
        scene.load(store, swapped)


def test_read_error_stops_all_threads(scene: Scene) -> None:
    """The first storage error comes out; no thread and no block is kept."""
    manifest = scene.write(inner := MemoryStore())
    store = FaultStore(inner, [Rule(Verb.READ_INTO, manifest.blobs[0].name, fail(StorageError("EIO", file="x")), nth=4)])
    before = threading.active_count()
    with pytest.raises(StorageError, match="EIO"):
        scene.load(store, manifest)
    assert (4, before) == (scene.pool.num_free, threading.active_count())


def test_stuck_read_ends_with_the_name_of_its_file(scene: Scene, gate: threading.Event) -> None:
    """A read that never returns fails the load after the set time, naming file and position (B021)."""
    manifest = scene.write(inner := MemoryStore())
    store = FaultStore(inner, [Rule(Verb.READ_INTO, manifest.blobs[1].name, do_before(gate.wait), nth=3)])
    with pytest.raises(StorageStuck, match=r"read data/optimizer/0\.0-1-abcdefghijklm\.bin at byte 0"):
        scene.load(store, manifest, IMPATIENT)


@pytest.mark.parametrize(("nth", "doing"), [(1, "read"), (2, "read"), (3, "read")])
def test_every_read_of_a_hanging_store_ends(scene: Scene, gate: threading.Event, nth: int, doing: str) -> None:
    """Tail, head and values are read with the same patience as tensors."""
    manifest = scene.write(inner := MemoryStore())
    store = FaultStore(inner, [Rule(Verb.READ_INTO, manifest.blobs[0].name, do_before(gate.wait), nth=nth)])
    with (
        pytest.raises(StorageStuck, match=f"{doing} data/model"),
        open_blobs(store, manifest, blobs=[0], job=IMPATIENT, pool=scene.pool) as blobs,
    ):
        blobs.read_values("model")


def test_blob_that_opens_too_late_is_closed(scene: Scene, tmp_path: Path, gate: threading.Event) -> None:
    """A store that answers `open_blob` after the load has given up leaves no file open."""
    manifest = scene.write(local := make_local_store(tmp_path))
    before = count_descriptors()
    store = FaultStore(local, [Rule(Verb.OPEN_BLOB, manifest.blobs[0].name, do_before(gate.wait))])
    with pytest.raises(StorageStuck, match="open data/model"):
        scene.load(store, manifest, IMPATIENT)
    gate.set()
    join_threads("anyshard-open")
    assert before == count_descriptors()


def test_thread_left_behind_places_nothing(scene: Scene, gate: threading.Event) -> None:
    """Bytes that arrive after the load has failed go nowhere: its destinations may hold the next load's by then."""
    manifest = scene.write(inner := MemoryStore())
    name = manifest.blobs[1].name
    store = FaultStore(inner, [Rule(Verb.READ_INTO, name, lose_time(gate), nth=3, times=9)])
    found = {address: np.zeros_like(array) for address, array in scene.arrays.items()}
    destinations = [ArrayDestination(found[address]) for address in scene.plan.shards.tensors.addresses]
    with pytest.raises(StorageStuck, match=name):
        scene.fill(store, manifest, destinations, IMPATIENT)
    gate.set()
    join_threads("anyshard-read")
    assert {0} == {int(found[address].max()) for address in ("optimizer/m", "optimizer/v")}


def test_interrupted_load_places_nothing_later(scene: Scene, ctrl_c: CtrlC) -> None:
    """When Ctrl-C comes out of a load its threads are gone, and with them everything that would change a tensor."""
    manifest = scene.write(inner := MemoryStore())
    store = FaultStore(inner, [Rule(Verb.READ_INTO, manifest.blobs[1].name, do_before(ctrl_c.press), nth=3)])
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        scene.load(store, manifest)
    assert (4, before) == (scene.pool.num_free, threading.active_count())


def test_thread_left_behind_keeps_its_file(scene: Scene, tmp_path: Path, gate: threading.Event) -> None:
    """A late read still reads its own blob, whatever files were opened meanwhile, and closes it in the end."""
    manifest, read = scene.write(local := make_local_store(tmp_path)), []
    before = count_descriptors()

    def hang(call: Call, run: Callable[[], None]) -> None:
        gate.wait()
        run()
        read.append(bytes(call.buffer or b""))

    with pytest.raises(StorageStuck):
        scene.load(FaultStore(local, [Rule(Verb.READ_INTO, manifest.blobs[1].name, hang, nth=3)]), manifest, IMPATIENT)
    (other := tmp_path / "other").write_bytes(bytes(1 << 21))
    with ExitStack() as files:
        for _ in range(8):
            files.enter_context(other.open("rb"))
        gate.set()
        join_threads("anyshard-read")
    name = manifest.blobs[1].name
    assert [(tmp_path / name).read_bytes()[: len(read[0])]] == read
    assert before == count_descriptors()


def test_blobs_are_opened_again_when_too_many_are_open(scene: Scene, tmp_path: Path) -> None:
    """With one idle file for two blobs everything still comes back, and the other blob's file is closed meanwhile."""
    manifest = scene.write(local := make_local_store(tmp_path))
    store, before = CountingStore(local), count_descriptors()
    job = ReadJob(threads=1, files=OpenFiles(max_idle=1))
    assert_equal(scene.arrays, scene.load(store, manifest, job))
    assert (4, before) == (store.count(Verb.OPEN_BLOB).calls, count_descriptors())
    assert_equal(scene.arrays, scene.load(store, manifest))
    assert 6 == store.count(Verb.OPEN_BLOB).calls


@pytest.mark.parametrize("is_gone", [True, False])
def test_blob_that_changed_while_it_was_closed_is_told(scene: Scene, is_gone: bool) -> None:
    """A blob that has to be opened again and is gone, or another one, means that the checkpoint was replaced."""
    manifest = scene.write(store := MemoryStore())
    job = ReadJob(threads=1, files=OpenFiles(max_idle=1))
    with open_blobs(store, manifest, blobs=[0, 1], job=job, pool=scene.pool) as blobs:
        name = manifest.blobs[0].name
        store.delete([name]) if is_gone else rewrite(store, name, lambda data: data.extend(b"more"))
        with pytest.raises(CheckpointReplaced, match="Open the checkpoint again"):
            blobs.read_values("model")


def test_removed_blobs_stay_readable_while_they_are_open(scene: Scene, tmp_path: Path) -> None:
    """Up to the bound of open files, what was opened is read to the end though its name is gone."""
    manifest = scene.write(store := make_local_store(tmp_path))
    with open_blobs(store, manifest, blobs=[0, 1], job=ReadJob(), pool=scene.pool) as blobs:
        store.delete([entry.name for entry in manifest.blobs])
        assert scene.values == {section: blobs.read_values(section) for section in manifest.sections}


def test_closed_blobs_are_read_no_more(scene: Scene) -> None:
    """A read after the context is an error that says so."""
    manifest = scene.write(store := MemoryStore())
    with open_blobs(store, manifest, blobs=[0, 1], job=ReadJob(), pool=scene.pool) as blobs:
        pass
    with pytest.raises(StorageError, match="expected an open checkpoint, found a closed one"):
        blobs.read_values("model")


@pytest.mark.parametrize("is_whole", [True, False])
def test_local_files_are_closed_when_the_context_is_left(scene: Scene, tmp_path: Path, *, is_whole: bool) -> None:
    """Real files: all comes back, and every descriptor is closed again, also if a blob is missing."""
    manifest = scene.write(store := make_local_store(tmp_path))
    if not is_whole:
        store.delete([manifest.blobs[1].name])
    before = count_descriptors()
    with nullcontext() if is_whole else pytest.raises(CheckpointDamaged):
        assert_equal(scene.arrays, scene.load(store, manifest))
    assert before == count_descriptors()


def test_ten_thousand_small_tensors_share_few_reads() -> None:
    """Small tensors cost a copy each, not a read each."""
    scene = make_scene(make_arrays({f"model/{i}": 64 for i in range(10_000)}))
    manifest = scene.write(inner := MemoryStore())
    store = CountingStore(inner)
    assert_equal(scene.arrays, scene.load(store, manifest))
    assert store.count(Verb.READ_INTO).calls <= 2 + manifest.blobs[0].nbytes // CELL_NBYTES + 1
