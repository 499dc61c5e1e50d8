"""Steps in parts that are listed, deleted and cleaned: the step goes first, parts that come later stay, strangers' files too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

import anyshard
from anyshard import ops
from anyshard.commit.cleaning import DAY_S, TOMBSTONE_S, CleanRules, clean_step
from anyshard.commit.listing import StepListing
from anyshard.commit.parts import is_same_part, list_parts, part_store
from anyshard.commit.publish import create_record
from anyshard.commit.resolve import check_complete, look, resolve
from anyshard.commit.tombstone import delete_step, make_fence
from anyshard.errors import CheckpointNotFound, CommitConflict, NotACheckpoint
from anyshard.records.manifest import Thinned
from anyshard.storage.local import LocalStore
from anyshard.storage.memory import MemoryStore
from anyshard.storage.protocol import Store
from anyshard.storage.wrappers import FaultStore, Rule, Verb
from anyshard.storage.wrappers.faults import do_before
from anyshard.storage.wrappers.unguarded import UnguardedStore
from tests.commit.steps import Clock, run_until, save, save_slowly, verdict
from tests.commit.thinner import make_step_record, publish_by_hand, save_in_parts
from tests.ops.scenes import Died, MortalStore

ROLES = ("actor", "critic")


def make_store() -> tuple[MemoryStore, Clock]:
    clock = Clock()
    return MemoryStore(clock=clock.read), clock


def verdicts(store: Store) -> list[int | str]:
    """What readers see of the step, and of its two parts."""
    return [verdict(store), *(verdict(part_store(store, role)) for role in ROLES)]


# What readers and writers see ----------------------------------------------------------------------------------------------


def test_parts_are_ours_and_other_things_below_them_are_not() -> None:
    """A place with parts only is no stranger's, nor a checkpoint; names that no part has are left out."""
    store = MemoryStore()
    assert NotACheckpoint is type(error_of(lambda: resolve(MemoryStore({"README": b""}))))
    save(part_store(store, "actor"))
    store.create("parts/Notes/a.txt", b"mine", token="x")
    listing, newest = look(store)
    assert ((True, (), False), None) == ((listing.has_parts, listing.foreign, listing.is_foreign), newest)
    assert ("actor",) == list_parts(store)
    assert "only parts of a step that was never published" in str(error_of(lambda: resolve(store)))


def error_of(act: Callable[[], object]) -> BaseException | None:
    try:
        act()
    except anyshard.AnyshardError as error:
        return error
    return None


def test_a_step_in_parts_is_no_checkpoint_and_says_what_is() -> None:
    """To open it names its parts and how to open one."""
    store = MemoryStore()
    save_in_parts(store, *ROLES)
    with pytest.raises(CheckpointNotFound, match=r"a step in parts \(actor, critic\).*/parts/actor\).*role='actor'"):
        anyshard.open(store)


def test_a_part_is_the_same_until_it_is_replaced() -> None:
    """A fence and a thinning change nothing; another attempt, an earlier generation and a tombstone do."""
    store = MemoryStore()
    (entry, _) = save_in_parts(store, *ROLES).parts
    manifest = resolve(part_store(store, "actor")).manifest
    thinned = replace(manifest, attempt="t" * 13, thinned=Thinned(manifest.attempt, ("optimizer",), manifest.time))
    assert [True] * 3 == [is_same_part(entry, one) for one in (manifest, make_fence(2, manifest), thinned)]
    save(part_store(store, "actor"), overwrite=True)
    replaced = resolve(part_store(store, "actor")).manifest
    assert [False, False] == [is_same_part(entry, replaced), is_same_part(replace(entry, generation=9), manifest)]


# Deleting ------------------------------------------------------------------------------------------------------------------


def test_deleting_ends_the_step_and_each_part() -> None:
    """A tombstone of each is all that stays; keys of files in parts have the name of the part."""
    store = MemoryStore()
    save_in_parts(store, *ROLES)
    removed = ops.delete(store)
    assert ["deleted"] * 3 == verdicts(store)
    assert {"manifest-2.json", "parts/actor/manifest-2.json", "parts/critic/manifest-2.json"} == set(store.snapshot())
    assert (7, 3) == (len(removed), sum(key.startswith("parts/actor/") for key in removed))
    assert () == ops.delete(store)


def test_parts_that_were_never_published_are_not_deleted() -> None:
    """There is no checkpoint to delete; the message says how to be rid of them."""
    store = MemoryStore()
    save(part_store(store, "actor"))
    with pytest.raises(CheckpointNotFound, match=r"unpublished=True also parts of a step: actor"):
        ops.delete(store)
    assert 1 == verdict(part_store(store, "actor"))


def test_a_part_that_is_saved_while_the_step_is_deleted_stays() -> None:
    """Each part is ended as it was found before the tombstone; what comes later is of a new save."""
    store = MemoryStore()
    save_in_parts(store, *ROLES)
    again = do_before(lambda: save(part_store(store, "critic"), overwrite=True))
    delete_step(FaultStore(store, [Rule(Verb.CREATE, "parts/critic/manifest-*", again)]))
    assert ["deleted", "deleted", 2] == verdicts(store)
    resolved = resolve(part_store(store, "critic"))
    check_complete(part_store(store, "critic"), resolved.manifest, resolved.listing)


def test_deleting_again_leaves_parts_that_are_younger_than_the_tombstone() -> None:
    """They belong to a step that is being saved anew; one that a dead deleter has left goes."""
    store, clock = make_store()
    save_in_parts(store, *ROLES)
    clock.sleep(10)
    with pytest.raises(Died):
        delete_step(MortalStore(store, first_call_after_root(), is_done=False))
    assert ["deleted", 1, 1] == verdicts(store)
    clock.sleep(10)
    save(part_store(store, "critic"), overwrite=True)
    delete_step(store)
    assert ["deleted", "deleted", 2] == verdicts(store)


def first_call_after_root() -> int:
    """The number of the call that comes after the tombstone of a step in two parts was created."""
    for number in count():
        store = MemoryStore()
        save_in_parts(store, *ROLES)
        with pytest.raises(Died):
            delete_step(MortalStore(store, number))
        if verdict(store) == "deleted":
            return number
    raise AssertionError


def test_who_publishes_and_who_deletes_at_once() -> None:
    """A publisher whose generation the tombstone took has published nothing; a deleter that was overtaken ends its step too."""
    store = MemoryStore()
    record = save_in_parts(store, *ROLES)
    later = make_step_record(2, record.parts)
    delete_step(FaultStore(store, [Rule(Verb.CREATE, "manifest-2.json", do_before(lambda: create_record(store, later)))]))
    assert (["deleted"] * 3, 3) == (verdicts(store), look(store)[0].newest)
    with pytest.raises(CommitConflict):
        create_record(store, make_step_record(3, record.parts))


@pytest.mark.slow
@pytest.mark.parametrize("is_done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("make", [LocalStore, lambda _: MemoryStore()], ids=["local", "memory"])
def test_a_deleter_that_dies_at_any_call(quick_path: Path, make: Callable[[Path], Store], *, is_done: bool) -> None:
    """The step is whole or deleted, never published with a part that is gone; deleting again leaves tombstones only."""
    for number in count():
        store = make(quick_path / str(number))
        save_in_parts(store, *ROLES)
        age(store)
        try:
            delete_step(MortalStore(store, number, is_done=is_done))
        except Died:
            assert verdict(store) in (1, "deleted")
            assert verdict(store) == "deleted" or [1, 1, 1] == verdicts(store)
        else:
            break
        delete_step(store)
        assert (["deleted"] * 3, [0] * 3) == (verdicts(store), [sum(1 for _ in of.entries()) for of in listings(store)])


def age(store: Store) -> None:
    """Make what is there older than what comes, by the store's clock."""
    before = store.now_s()
    while store.now_s() <= before + 0.02:
        pass


def listings(store: Store) -> list[StepListing]:
    return [look(one)[0] for one in (store, *(part_store(store, role) for role in ROLES))]


# Cleaning ------------------------------------------------------------------------------------------------------------------


def test_parts_are_cleaned_like_steps() -> None:
    """Superseded files and dead saves in a part go, with their prefix in the report; the published step stays whole."""
    store, clock = make_store()
    save_in_parts(store, "actor")
    save(part_store(store, "critic"))
    save(part_store(store, "critic"), overwrite=True)
    publish_by_hand(store, "actor", "critic", generation=2)
    run_until(save_slowly(part_store(store, "actor"), overwrite=True), "index")
    clock.sleep(2 * DAY_S)
    report = ops.clean(store)
    assert {"parts/critic", "parts/actor", "manifest-1.json"} == {
        key.rpartition("/")[0] or key for key in map(shorten, report.removed)
    }
    assert ([2, 2, 2], ()) == (verdicts(store), report.unpublished)


def shorten(key: str) -> str:
    return "/".join(key.split("/")[:3]) if key.startswith("parts/") else key


def test_a_part_that_is_saved_anew_keeps_what_the_step_was_published_with() -> None:
    """Until the step is published anew its readers use the part that it names."""
    store, clock = make_store()
    save_in_parts(store, *ROLES)
    save(part_store(store, "actor"), overwrite=True)
    clock.sleep(2 * DAY_S)
    before = store.snapshot()
    assert ((), before) == (ops.clean(store).removed, store.snapshot())


@pytest.mark.parametrize(("asked", "age_s"), [(False, 2 * DAY_S), (True, DAY_S - 1)])
def test_unpublished_parts_stay_unless_they_are_asked_for_and_old(age_s: float, *, asked: bool) -> None:
    """Another world may yet finish the step; the report names them."""
    store, clock = make_store()
    save(part_store(store, "actor"))
    clock.sleep(age_s)
    report = ops.clean(store, unpublished=asked)
    assert (("actor",), ()) == (report.unpublished, report.removed)
    assert ["nothing", 1, "nothing"] == verdicts(store)


def test_old_unpublished_parts_go_once_nobody_can_publish_them() -> None:
    """A tombstone of the step comes first; a dry run tells the same and changes nothing."""
    store, clock = make_store()
    save(part_store(store, "actor"))
    clock.sleep(2 * DAY_S)
    rehearsal = ops.clean(store, unpublished=True, dry_run=True)
    assert ["nothing", 1, "nothing"] == verdicts(store)
    report = ops.clean(store, unpublished=True)
    assert (set(rehearsal.removed), rehearsal.nbytes, 1) == (set(report.removed), report.nbytes, report.fenced)
    assert ["deleted", "deleted", "nothing"] == verdicts(store)


def test_parts_that_are_published_just_then_stay() -> None:
    """Who publishes before the fence is there has won."""
    store, clock = make_store()
    for role in ROLES:
        save(part_store(store, role))
    clock.sleep(2 * DAY_S)
    publish = do_before(lambda: publish_by_hand(store, *ROLES))
    overtaken = FaultStore(store, [Rule(Verb.CREATE, "manifest-*", publish)])
    assert (ROLES, ()) == ((found := ops.clean(overtaken, unpublished=True)).unpublished, found.removed)
    assert [1, 1, 1] == verdicts(store)


def test_unpublished_parts_stay_where_nobody_can_take_the_right_to_publish() -> None:
    """On a store without create-if-absent the report warns instead."""
    store, clock = make_store()
    save(part_store(store, "actor"))
    clock.sleep(2 * DAY_S)
    cleaned = clean_step(store, CleanRules(unpublished=True), settle=UnguardedStore)
    assert ((), ("actor",), 1) == (cleaned.removed, cleaned.unpublished, len(cleaned.warnings))


def test_a_clean_finishes_a_delete_and_in_the_end_leaves_nothing(tmp_path: Path) -> None:
    """Tombstones of parts go after their time, and then that of the step; on a disk the directories go too."""
    store, clock = make_store()
    save_in_parts(store, *ROLES)
    clock.sleep(10)
    with pytest.raises(Died):
        delete_step(MortalStore(store, first_call_after_root()))
    assert 6 == len(ops.clean(store).removed)
    assert ["deleted"] * 3 == verdicts(store)
    for _ in range(2):
        clock.sleep(TOMBSTONE_S)
        ops.clean(store)
    assert {} == store.snapshot()
    disk = LocalStore(tmp_path)
    save_in_parts(disk, *ROLES)
    delete_step(disk)
    for role in ROLES:
        disk.delete([f"parts/{role}/manifest-2.json"])
    ops.clean(disk)
    assert ["manifest-2.json"] == [path.name for path in tmp_path.rglob("*")]


def test_what_is_known_to_be_dead_need_not_be_old() -> None:
    """A save that the caller knows is ended at once; beside one that may live it stays."""
    store, _ = make_store()
    save(store)
    run_until(save_slowly(store, overwrite=True), "index")
    (owner,) = look(store)[0].unfinished(1)
    assert () == clean_step(store, CleanRules(is_dead=lambda other: other != owner)).removed
    cleaned = clean_step(store, CleanRules(is_dead=lambda other: other == owner))
    assert (2, 2, 2) == (len(cleaned.removed), cleaned.fenced, verdict(store))


def test_foreign_files_in_parts_stay() -> None:
    """Whatever is not ours, below a part or beside it, is listed or not even seen, and never touched."""
    store, clock = make_store()
    save_in_parts(store, *ROLES)
    foreign = (
        "parts/README",
        "parts/Upper/x.bin",
        "parts/actor/notes.txt",
        "parts/actor/data/model/a.txt",
        "parts/actor/parts/b/c",
    )
    for name in foreign:
        store.create(name, b"mine", token="x")
    clock.sleep(10)
    delete_step(store)
    clock.sleep(2 * TOMBSTONE_S)
    ops.clean(store, unpublished=True)
    assert set(foreign) <= set(store.snapshot())
