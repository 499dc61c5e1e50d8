from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from anyshard import ops
from anyshard.commit.cleaning import DAY_S, TOMBSTONE_S
from anyshard.commit.resolve import check_complete, resolve
from anyshard.errors import CheckpointDamaged, CheckpointNotFound
from anyshard.records.names import manifest_name, parse_name
from anyshard.storage.local import LocalStore
from anyshard.storage.memory import MemoryStore
from anyshard.storage.wrappers import FaultStore, Rule, Verb
from anyshard.storage.wrappers.faults import do_before
from tests.commit.steps import Clock, contents, run_until, save, save_slowly, verdict


def make_store() -> tuple[MemoryStore, Clock]:
    clock = Clock()
    return MemoryStore(clock=clock.read), clock


def test_a_save_that_may_be_running_is_left_alone() -> None:
    """A leftover that was written within the limit is reported as in progress and not touched."""
    store, clock = make_store()
    writer = save_slowly(store)
    run_until(writer, "blob")
    clock.sleep(DAY_S - 1)
    report = ops.clean(store)
    assert ((), None, 1) == (report.removed, report.fenced, len(report.in_progress))
    assert 1 == [verdict(store) for _ in writer][-1]


def test_one_running_save_protects_the_dead_one_beside_it() -> None:
    """A fence would take the generation from both, so nothing is done while one of them is young."""
    store, clock = make_store()
    run_until(save_slowly(store), "index")
    clock.sleep(2 * DAY_S)
    running = save_slowly(store)
    run_until(running, "blob")
    assert 2 == len(ops.clean(store).in_progress)
    assert 1 == [verdict(store) for _ in running][-1]


def test_a_dry_run_changes_nothing_and_tells_all() -> None:
    """The same report as the real run, with the storage untouched."""
    store, clock = make_store()
    save(store)
    run_until(save_slowly(store, overwrite=True), "index")
    clock.sleep(2 * DAY_S)
    before = store.snapshot()
    rehearsal = ops.clean(store, dry_run=True)
    assert before == store.snapshot()
    real = ops.clean(store)
    assert (rehearsal.removed, rehearsal.nbytes, 2) == (real.removed, real.nbytes, real.fenced)


def test_b143_foreign_names_are_listed_and_left() -> None:
    """Strangers' files stay, beside a leftover and alone (B143)."""
    store, clock = make_store()
    run_until(save_slowly(store), "index")
    store.create("data/model/notes.txt", b"x", token="x")
    store.create("README", b"x", token="x")
    clock.sleep(2 * DAY_S)
    assert ("README", "data/model/notes.txt") == ops.clean(store).foreign
    assert ["1 manifest", "README", "data/model/notes.txt"] == contents(store)


def test_a_damaged_step_is_not_cleaned() -> None:
    """Without knowing what the newest record names nothing may be deleted."""
    store, clock = make_store()
    save(store)
    store.create(manifest_name(2), b"{}", token="x")
    clock.sleep(2 * DAY_S)
    before = store.snapshot()
    with pytest.raises(CheckpointDamaged):
        ops.clean(store)
    assert before == store.snapshot()


@pytest.mark.parametrize(("age_s", "expected"), [(TOMBSTONE_S - 1, ["1 manifest"]), (TOMBSTONE_S, [])])
def test_an_old_tombstone_with_nothing_else_goes(age_s: float, expected: list[str]) -> None:
    """A tombstone stays seven days."""
    store, clock = make_store()
    run_until(save_slowly(store), "index")
    clock.sleep(2 * DAY_S)
    ops.clean(store)
    clock.sleep(age_s)
    ops.clean(store)
    assert expected == contents(store)


def test_leftovers_beyond_the_next_generation_are_left_alone() -> None:
    """Where records were removed by hand nobody knows who may still publish; the next saves supersede them."""
    store, clock = make_store()
    save(store)
    run_until(save_slowly(store, overwrite=True), "index")
    store.delete([manifest_name(1)])
    clock.sleep(2 * DAY_S)
    report = ops.clean(store)
    assert (1, 1) == (report.fenced, len(report.in_progress))
    assert ["1 manifest", "2 blob", "2 index"] == contents(store)


def test_a_fenced_checkpoint_can_be_overwritten_and_fenced_again() -> None:
    """Two overwriters that died leave two fences; the old files stay until a real save supersedes them."""
    store, clock = make_store()
    first = save(store)
    for _ in range(2):
        run_until(save_slowly(store, overwrite=True), "index")
        clock.sleep(2 * DAY_S)
        ops.clean(store)
    check_complete(store, resolve(store).manifest, resolve(store).listing)
    assert (3, first.blobs) == (verdict(store), resolve(store).manifest.blobs)
    save(store, overwrite=True)
    clock.sleep(2 * DAY_S)
    ops.clean(store)
    assert ["4 blob", "4 index", "4 manifest"] == contents(store)


def test_deleting_leaves_a_tombstone_only() -> None:
    """Data and old records are gone, readers are told that the step was deleted."""
    store = MemoryStore()
    save(store)
    removed = ops.delete(store)
    assert (3, ["2 manifest"], "deleted") == (len(removed), contents(store), verdict(store))


def test_deleting_again_finishes_and_changes_nothing_more() -> None:
    """A second delete creates no second tombstone."""
    store = MemoryStore()
    save(store)
    ops.delete(store)
    assert ((), ["2 manifest"]) == (ops.delete(store), contents(store))


def test_a_damaged_checkpoint_can_be_deleted() -> None:
    """The tombstone goes above the damaged record, then everything else goes."""
    store = MemoryStore()
    save(store)
    store.create(manifest_name(2), b"{}", token="x")
    ops.delete(store)
    assert ["3 manifest"] == contents(store)


@pytest.mark.parametrize("leftover", [False, True])
def test_nothing_to_delete_is_an_error(leftover: bool) -> None:
    """Without a record there is no checkpoint, and leftovers are the cleaner's."""
    store = MemoryStore()
    if leftover:
        run_until(save_slowly(store), "index")
    with pytest.raises(CheckpointNotFound, match=r"ops\.clean"):
        ops.delete(store)


def test_a_directory_on_disk_is_cleaned_by_its_path(tmp_path: Path) -> None:
    """The same on a local directory, where ages come from the files."""
    root = tmp_path / "step_100"
    run_until(save_slowly(LocalStore(root)), "index")
    for path in root.rglob("*"):
        os.utime(path, (0, 0))
    report = ops.clean(root)
    assert (2, 1, "deleted") == (len(report.removed), report.fenced, verdict(LocalStore(root)))


def test_the_cleaner_never_goes_through_a_link(tmp_path: Path) -> None:
    """A linked directory of blobs is not even looked into."""
    root, elsewhere = tmp_path / "step_100", tmp_path / "elsewhere"
    run_until(save_slowly(LocalStore(root)), "index")
    (root / "data" / "model").rename(elsewhere)
    (root / "data" / "model").symlink_to(elsewhere)
    for path in (*root.rglob("*"), *elsewhere.iterdir()):
        os.utime(path, (0, 0))
    ops.clean(root)
    assert 1 == len(list(elsewhere.iterdir()))


def describe(keys: Sequence[str]) -> list[str]:
    """Keys as `<generation> <kind>`."""
    return [f"{name.generation} {name.kind}" for name in map(parse_name, keys) if name is not None]


def overtaken(inner: MemoryStore, *others: Callable[[], object]) -> FaultStore:
    """A store on which others act right before the caller's attempts to create a record."""
    return FaultStore(
        inner, [Rule(Verb.CREATE, "manifest-*", do_before(act), nth=nth) for nth, act in enumerate(others, start=1)]
    )


def test_a_delete_that_is_overtaken_deletes_the_winner_too() -> None:
    """Saves that take the generation of the tombstone are ended by the next one."""
    store = MemoryStore()
    save(store)
    again = partial(save, store, overwrite=True)
    removed = ops.delete(overtaken(store, again, again))
    assert (9, ["4 manifest"], "deleted") == (len(removed), contents(store), verdict(store))


def test_two_deleters_both_succeed() -> None:
    """The one that loses the race for the tombstone finds the step deleted."""
    store = MemoryStore()
    save(store)
    ops.delete(overtaken(store, partial(ops.delete, store)))
    assert ["2 manifest"] == contents(store)


@pytest.mark.parametrize("sleeper_publishes", [True, False], ids=["the sleeper", "another save"])
def test_a_clean_that_is_overtaken_fences_nothing(sleeper_publishes: bool) -> None:
    """If a save takes the generation of the fence, no file of an unfinished one is touched, and the report says so."""
    store, clock = make_store()
    save(store)
    save(store, overwrite=True)
    sleeper = save_slowly(store, overwrite=True)
    run_until(sleeper, "index")
    clock.sleep(2 * DAY_S)
    other = partial(run_until, sleeper, "published") if sleeper_publishes else partial(save, store, overwrite=True)
    report = ops.clean(overtaken(store, other))
    assert (None, 1) == (report.fenced, len(report.in_progress))
    assert {"1 blob", "1 index", "1 manifest"} == set(describe(report.removed))
    assert 3 == verdict(store)
    check_complete(store, resolve(store).manifest, resolve(store).listing)


def directories(root: Path) -> list[str]:
    """All directories below a root."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_dir())


def test_empty_directories_of_a_deleted_step_go(tmp_path: Path) -> None:
    """Deleting leaves the tombstone alone in the directory, but for what others put there."""
    save(LocalStore(tmp_path / "a"))
    save(LocalStore(tmp_path / "b"))
    (tmp_path / "b" / "data" / "model" / "notes.txt").write_text("mine")
    ops.delete(tmp_path / "a")
    ops.delete(tmp_path / "b")
    assert ([], ["data", "data/model"]) == (directories(tmp_path / "a"), directories(tmp_path / "b"))
    assert 3 == save(LocalStore(tmp_path / "a")).generation


def test_empty_directories_of_sections_are_cleaned(tmp_path: Path) -> None:
    """A section that is no longer there leaves no directory; one that a running save may be about to use stays."""
    store = LocalStore(tmp_path)
    save(store)
    for name in ("old", "Upper"):
        (tmp_path / "data" / name).mkdir()
    writer = save_slowly(store, overwrite=True)
    run_until(writer, "blob")
    ops.clean(store)
    assert ["data", "data/Upper", "data/model", "data/old"] == directories(tmp_path)
    run_until(writer, "published")
    ops.clean(store, dry_run=True)
    assert ["data", "data/Upper", "data/model", "data/old"] == directories(tmp_path)
    ops.clean(store)
    assert ["data", "data/Upper", "data/model"] == directories(tmp_path)


def test_directories_where_nothing_is_ours_stay(tmp_path: Path) -> None:
    """In a place without any file of anyshard an empty directory is somebody else's."""
    (tmp_path / "data" / "raw").mkdir(parents=True)
    ops.clean(tmp_path)
    assert ["data", "data/raw"] == directories(tmp_path)
