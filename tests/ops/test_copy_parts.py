"""Copies of thinned checkpoints and of steps in parts: the same bytes, the record of the step last, and no halves."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

import anyshard
from anyshard import ops
from anyshard.commit.parts import part_store
from anyshard.commit.resolve import look
from anyshard.commit.thinning import thin_step
from anyshard.commit.tombstone import delete_step
from anyshard.errors import AnyshardError, CheckpointDamaged, CheckpointExists, CheckpointNotFound, NotACheckpoint
from anyshard.records.names import parse_name
from anyshard.storage.memory import MemoryStore
from tests.commit.steps import run_until, save, save_slowly
from tests.commit.thinner import make_state, publish_by_hand, read, save_state
from tests.ops.scenes import Died, MortalStore, read_tree, some_or_all

ROLES = ("actor", "critic")


def save_thinned() -> MemoryStore:
    store = MemoryStore()
    save_state(store)
    thin_step(store, ("model",))
    return store


def save_roles() -> MemoryStore:
    store = MemoryStore()
    for number, role in enumerate(ROLES, start=1):
        save_state(part_store(store, role), number)
    publish_by_hand(store, *ROLES)
    thin_step(part_store(store, "critic"), ("model",))
    return store


def named(store: MemoryStore) -> dict[str, bytes]:
    """The files of a store without old records."""
    return {name: data for name, data in store.snapshot().items() if not name.endswith("critic/manifest-1.json")}


def test_a_thinned_checkpoint_is_copied_as_it_is(tmp_path: Path) -> None:
    """All files that its record names, whatever generation is in their names, and it loads there."""
    source = save_thinned()
    report = ops.copy(source, tmp_path / "a")
    assert (source.snapshot(), 3) == (read_tree(tmp_path / "a"), report.num_files)
    target = MemoryStore()
    ops.copy(tmp_path / "a", target)
    assert {"model": 1} == read(target)


def test_a_deleted_step_is_in_the_way_of_files_of_its_generation() -> None:
    """There a clean would take them for leftovers, so nothing is begun."""
    source, target = save_thinned(), MemoryStore()
    run_until(save_slowly(target), "index")
    ops.clean(target, older_than_s=0)
    with pytest.raises(CheckpointExists, match="no record of generation 1 or later"):
        ops.copy(source, target)


def test_a_step_in_parts_is_copied_with_all_its_parts() -> None:
    """Each part loads at the target; a second copy keeps everything, with names as the step has them."""
    source, target = save_roles(), MemoryStore()
    report = ops.copy(source, target)
    assert named(source) == target.snapshot()
    assert ({"model": 1, "optimizer": 1, "extra": 1}, {"model": 2}) == tuple(read(part_store(target, role)) for role in ROLES)
    assert (len(named(source)), sum(map(len, named(source).values())), ()) == (report.num_files, report.nbytes, report.kept)
    again = ops.copy(source, target)
    assert (set(named(source)), 0) == (set(again.kept), again.copied_nbytes)


def test_the_part_that_is_copied_is_the_one_that_is_named() -> None:
    """While a part is saved anew the step is what its record says, as long as that is there."""
    source, target = save_roles(), MemoryStore()
    anyshard.save(part_store(source, "actor"), make_state(5), overwrite=True)
    ops.copy(source, target)
    assert {"model": 1, "optimizer": 1, "extra": 1} == read(part_store(target, "actor"))
    save_state(part_store(source, "actor"), 6, overwrite=True)  # without a grace
    with pytest.raises(CheckpointDamaged, match="'actor' as the record of the step names it"):
        ops.copy(source, another := MemoryStore())
    assert None is look(another)[1]


def test_what_is_at_the_target_is_judged_first() -> None:
    """Another checkpoint, another step in parts and strangers' files are refused before a byte is copied."""
    source = save_roles()
    whole, other, foreign = MemoryStore(), MemoryStore(), MemoryStore({"notes.txt": b"mine"})
    save(whole)
    for role in ROLES:
        save(part_store(other, role))
    publish_by_hand(other, *ROLES)
    for target, kind in ((whole, CheckpointExists), (other, CheckpointExists), (foreign, NotACheckpoint)):
        before = target.snapshot()
        with pytest.raises(kind):
            ops.copy(source, target)
        assert before == target.snapshot()


def test_a_deleted_step_in_parts_is_not_found() -> None:
    """Its parts are gone with it."""
    source = save_roles()
    delete_step(source)
    with pytest.raises(CheckpointNotFound, match="deleted"):
        ops.copy(source, MemoryStore())


@pytest.mark.slow
@some_or_all
@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
def test_a_copy_of_parts_that_dies_at_any_call(stride: int, *, is_done: bool) -> None:
    """The step exists at the target with all of its files, or not at all; the next call finishes it and keeps what is whole."""
    source = save_roles()
    for number in count(0, 3 * stride):
        target = MemoryStore()
        try:
            ops.copy(source, MortalStore(target, number, is_done=is_done), threads=1)
        except Died:
            is_published = "manifest-1.json" in target.snapshot()
            assert not is_published or named(source).items() <= target.snapshot().items()
        else:
            break
        report = ops.copy(source, target)
        assert (named(source), set()) == (target.snapshot(), set(report.kept) - set(named(source)))


def test_a_flipped_bit_in_a_part_is_damage_and_publishes_nothing() -> None:
    """Each file of each part is verified on its way."""
    source = save_roles()
    files = source.snapshot()
    for name in [name for name in named(source) if parse_name(name.split("/", 2)[-1]) is not None and name.startswith("parts/")]:
        data = bytearray(files[name])
        data[len(data) // 2] ^= 1
        target = MemoryStore()
        with pytest.raises(AnyshardError):
            ops.copy(MemoryStore({**files, name: bytes(data)}), target)
        assert "manifest-1.json" not in target.snapshot()
