"""The catalog: what it makes of everything that can lie in the directory of a run, and how little it asks for it."""

from __future__ import annotations

import errno
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anyshard.commit.thinning import thin_step
from anyshard.errors import StorageDenied, StorageError, StorageUnavailable, UnsupportedFormat
from anyshard.records.manifest import PartEntry, Resumed, encode_manifest
from anyshard.records.names import manifest_name
from anyshard.run.catalog import Catalog
from anyshard.run.step_info import (
    Condition,
    StepInfo,
    find_current,
    find_latest,
    mark_stale,
    parse_pin,
    parse_step,
    pin_key,
    step_prefix,
)
from anyshard.storage.local import LocalStore
from anyshard.storage.memory import MemoryStore
from anyshard.storage.protocol import Store
from anyshard.storage.resolve import open_store
from anyshard.storage.wrappers import CountingStore, FaultStore, Rule, Verb, fail
from anyshard.storage.wrappers.below import StoreBelow
from tests.commit.steps import Clock
from tests.run.made_steps import (
    OTHER,
    RUN,
    START_S,
    conditions,
    delete,
    make_info,
    make_long_run,
    publish,
    publish_parts,
    save_real,
    stamp,
    write_part,
    write_pending,
    write_run,
    write_step,
)
from tests.servers import S3Server


@pytest.fixture(params=["memory", "local", pytest.param("s3", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "memory":
        return MemoryStore()
    if request.param == "local":
        return LocalStore(tmp_path / "run")
    server: S3Server = request.getfixturevalue("moto_s3")
    return open_store(f"s3://{server.make_bucket()}/run", storage_options={**server.options, "endpoint": server.endpoint})


# Names -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 7, 10**18 - 1])
def test_a_number_has_one_name(step: int) -> None:
    """Names of steps and pins are read as they are made."""
    assert (step, step) == (parse_step(step_prefix(step)), parse_pin(pin_key(step)))


@pytest.mark.parametrize(
    "name", ["step_007", "STEP_1", "step_7x", "step_-1", "step_", "step_1", f"step_{10**18}", " step_1", "best"]
)
def test_other_names_are_foreign(name: str) -> None:
    """What is not exactly such a name of a directory is none of a step, nor of a pin."""
    prefix = name if name == "step_1" else f"{name}/"
    assert (None, None) == (parse_step(prefix), parse_pin(f"pins/{name}.json/"))


# Conditions ------------------------------------------------------------------------------------------------------------


def test_every_condition_is_told(store: Store) -> None:
    """Committed, deleted, unfinished, damaged, incomplete and moved steps in one run, in numeric order."""
    write_run(store, [9, 10, 100, 11])
    delete(store, 9)
    write_pending(store, 12)
    StoreBelow(store, step_prefix(13)).prepare([])
    store.create("step_13/manifest-1.json", b"{}\n" + b"xxh3-128:" + b"0" * 32 + b"\n", token="x")
    broken = write_step(store, 14)
    store.delete([step_prefix(14) + broken.blobs[0].name])
    publish_as(store, 15, of=16)
    expected = {9: "deleted", 10: "committed", 11: "committed", 12: "pending", 13: "damaged", 14: "incomplete", 15: "damaged"}
    assert expected | {100: "committed"} == conditions(store)
    assert [*sorted(expected), 100] == list(conditions(store))


def publish_as(store: Store, directory: int, *, of: int) -> None:
    """A step in the directory of another one, as somebody who renames it makes it."""
    manifest = write_pending(store, directory)
    own = StoreBelow(store, step_prefix(directory))
    own.create(manifest_name(1), encode_manifest(replace(manifest, step=of)), token=manifest.attempt)


def test_a_step_tells_what_its_record_says() -> None:
    """The facts of one step, its sizes and its metrics; odd numbers come as text, what is none is passed over."""
    store = MemoryStore(url="memory:run", clock=lambda: 5.0)
    metrics = {"loss": 0.5, "epoch": 3, "odd": "nan", "note": "x", "flag": True}
    manifest = write_step(store, 7, metrics=metrics)
    (found,) = Catalog(store).look()
    assert math.isnan(found.metrics["odd"])
    assert {"loss": 0.5, "epoch": 3.0} == {name: value for name, value in found.metrics.items() if name != "odd"}
    expected = StepInfo(
        7, "memory:run/step_7", Condition.COMMITTED, 1, manifest.attempt, RUN, stamp(START_S + 7), ("model",),
        metrics=found.metrics, nbytes=sum(map(len, store.snapshot().values())), section_nbytes={"model": 4096}, written_s=5.0,
    )  # fmt: skip
    assert (expected, START_S + 7) == (found, found.time_s)


def test_notes_say_what_is_wrong() -> None:
    """The note of a step that cannot be loaded names what is missing or odd."""
    store = MemoryStore()
    missing = write_step(store, 1).blobs[0].name
    store.delete([step_prefix(1) + missing])
    publish_as(store, 2, of=3)
    notes = [one.note for one in Catalog(store).look()]
    assert [
        f"1 file(s) are not as its record says: {missing}: expected 4096 bytes, found nothing",
        "its record is of step 3: it was moved or renamed",
    ] == notes


def test_b052_a_failed_save_is_no_step() -> None:
    """A save that never published counts as nothing, alone or over another one (B052)."""
    store = MemoryStore()
    write_run(store, [10, 20])
    write_pending(store, 20)
    write_pending(store, 30)
    steps = Catalog(store).look()
    assert [("committed", 1, False), ("committed", 1, True), ("pending", 0, True)] == [
        (one.condition, one.generation, one.has_leftovers) for one in steps
    ]
    latest = find_latest(steps, RUN)
    assert latest is not None
    assert 20 == latest.step


def test_a_record_that_is_being_written_is_pending_and_later_damage() -> None:
    """Where a store shows a record before it is whole, it is young at first; a whole one before it counts until then."""
    clock = Clock()
    store = MemoryStore(clock=clock.read)
    write_run(store, [1])
    for step, generation in ((1, 2), (2, 1)):
        store.create(f"step_{step}/manifest-{generation}.json", b'{"format', token="x")
    catalog = Catalog(store)
    assert ["committed", "pending"] == [one.condition for one in catalog.look()]
    clock.sleep(601)
    assert ["damaged", "damaged"] == [one.condition for one in catalog.look(trust=True)]


def test_a_torn_record_over_a_tombstone_is_no_step_yet() -> None:
    """A deleted step that is being saved anew is deleted until the record is whole, and is looked at each time."""
    store = MemoryStore()
    write_run(store, [1])
    delete(store, 1)
    store.create("step_1/manifest-3.json", b'{"format', token="x")
    catalog = Catalog(store)
    looks = [catalog.look(trust=True) for _ in range(2)]
    assert [("deleted", "a save over it is being committed")] * 2 == [(one.condition, one.note) for (one,) in looks]
    assert 2 == catalog.num_reads


def test_foreign_names_are_no_steps(tmp_path: Path) -> None:
    """Files, links, empty directories and directories of others are passed over, wherever they lie."""
    store = LocalStore(tmp_path)
    write_run(store, [1])
    for name in ("step_7x", "step_007", "STEP_1", "best", "step_5", "step_6", "pins"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_9").write_text("a file")
    (tmp_path / "step_8").symlink_to(tmp_path / "step_1")
    (tmp_path / "step_6" / "notes.txt").write_text("mine")
    (tmp_path / "step_1" / "notes.txt").write_text("mine")
    (tmp_path / "pins" / "notes.txt").write_text("mine")
    assert {1: "committed"} == conditions(store)


def test_something_odd_under_the_name_of_a_record_is_damage_of_that_step(tmp_path: Path) -> None:
    """A directory in place of a record hides its own step only."""
    store = LocalStore(tmp_path)
    write_run(store, [1, 2])
    (tmp_path / "step_2" / "manifest-2.json").mkdir()
    found = Catalog(store).look()
    assert ["committed", "damaged"] == [one.condition for one in found]
    assert "manifest-2.json" in found[1].note


@pytest.mark.parametrize("kind", [StorageUnavailable, StorageDenied, StorageError])
def test_a_store_that_does_not_answer_is_an_error(kind: type[StorageError]) -> None:
    """What cannot be read now is not taken for absent or damaged."""
    store = MemoryStore()
    write_run(store, [1, 2, 3])
    broken = FaultStore(store, [Rule(Verb.READ, "step_2/*", fail(kind("down", file="x")))])
    with pytest.raises(kind, match="down"):
        Catalog(broken).look()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ESTALE, errno.ETIMEDOUT, errno.EIO])
def test_an_error_of_the_system_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """A record that cannot be read once may be good, so that nobody may go back behind its step and save over it."""
    write_run(LocalStore(tmp_path), [1, 2])
    read = os.open

    def fail_at_the_record(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        where = "" if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
        if f"{where}/{path}".endswith("step_2/manifest-1.json"):
            raise OSError(number, os.strerror(number))
        return read(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", fail_at_the_record)
    with pytest.raises(StorageError, match="could not read .*step_2/manifest-1.json"):
        Catalog(LocalStore(tmp_path)).look()


def test_b139_a_step_of_a_later_release_is_refused() -> None:
    """It may be good, so it is neither passed over nor taken for damage (B139)."""
    store = MemoryStore()
    write_run(store, [1])
    manifest = replace(write_pending(store, 2), requires=("time-travel",))
    publish(store, manifest)
    with pytest.raises(UnsupportedFormat, match="step_2: manifest-1.json: needs 'time-travel', which this release lacks"):
        Catalog(store).look()


def test_pins_are_seen() -> None:
    """A file in `pins/` pins its step; other names there pin nothing."""
    store = MemoryStore()
    write_run(store, [1, 2])
    for key in (pin_key(2), pin_key(9), "pins/step_1", "pins/step_1.json/x"):
        store.create(key, b"", token="x")
    assert [False, True] == [one.is_pinned for one in Catalog(store).look()]


# Parts -----------------------------------------------------------------------------------------------------------------


def test_a_step_in_parts_is_there_once_it_is_published() -> None:
    """Parts alone are pending; under a record they are one step whose sections are named by part."""
    store = MemoryStore()
    parts = tuple(write_part(store, 5, role) for role in ("actor", "critic"))
    (before,) = Catalog(store).look()
    publish_parts(store, 5, parts)
    (after,) = Catalog(store).look()
    assert ("pending", "parts that are not published: actor, critic") == (before.condition, before.note)
    assert ("committed", ("actor", "critic")) == (after.condition, after.parts)
    assert (("actor/model", "critic/model"), 4096) == (after.sections, after.section_nbytes["critic/model"])
    assert sum(map(len, store.snapshot().values())) == after.nbytes


def test_a_step_without_one_of_its_parts_is_incomplete() -> None:
    """A part that is gone, or another one than was published, is named."""
    store = MemoryStore()
    parts = tuple(write_part(store, 5, role) for role in ("actor", "critic"))
    publish_parts(store, 5, (parts[0], replace(parts[1], attempt="q" * 13), PartEntry("judge", 1, "j" * 13)))
    (found,) = Catalog(store).look()
    assert Condition.INCOMPLETE == found.condition
    assert f"critic: expected attempt {'q' * 13}, found attempt {'c' * 13}" in found.note
    assert "judge: expected attempt jjjjjjjjjjjjj, found nothing" in found.note


def test_a_part_that_lacks_a_file_makes_the_step_incomplete() -> None:
    """The note names part and file."""
    store = MemoryStore()
    publish_parts(store, 5, tuple(write_part(store, 5, role) for role in ("actor", "critic")))
    store.delete([key for key in store.snapshot() if key.startswith("step_5/parts/critic/data/")])
    (found,) = Catalog(store).look()
    assert Condition.INCOMPLETE == found.condition
    assert "part critic: 1 file(s) are not as its record says: data/model/0.0-1-" in found.note


def test_deleted_parts_are_no_leftovers() -> None:
    """After a delete nothing is left to do for the step or its parts."""
    store = MemoryStore()
    publish_parts(store, 5, tuple(write_part(store, 5, role) for role in ("actor", "critic")))
    delete(store, 5)
    assert [("deleted", False)] == [(one.condition, one.has_leftovers) for one in Catalog(store).look()]


def test_parts_that_come_after_a_delete_are_seen_without_trust() -> None:
    """The records of the step do not tell of its parts, so these are looked at again."""
    store = MemoryStore()
    publish_parts(store, 5, (write_part(store, 5, "actor"),))
    delete(store, 5)
    catalog = Catalog(store)
    assert [()] == [one.parts for one in catalog.look()]
    write_part(store, 5, "critic")
    assert [("deleted", ("critic",))] == [(one.condition, one.parts) for one in catalog.look()]


# Thinned steps ---------------------------------------------------------------------------------------------------------


def test_a_thinned_step_says_what_it_has_lost() -> None:
    """What is there and what is not; a whole step is preferred to it."""
    store = MemoryStore()
    save_real(store, 1)
    save_real(store, 2)
    thin_step(StoreBelow(store, step_prefix(2)), ["model"])
    steps = Catalog(store).look()
    assert [(("model", "optimizer"), ()), (("model",), ("optimizer",))] == [(one.sections, one.dropped) for one in steps]
    assert [1, 2] == [latest.step for some in (steps, steps[1:]) if (latest := find_latest(some, RUN))]


# Requests --------------------------------------------------------------------------------------------------------------


def count(store: CountingStore) -> dict[str, int]:
    return {str(verb): store.count(verb).calls for verb in Verb if store.count(verb).calls}


def test_many_steps_cost_one_listing_the_second_time(tmp_path: Path) -> None:
    """The first look lists each step and reads its record; a trusting one after it lists the run, and what is new."""
    inner = make_long_run(tmp_path, 100)
    store = CountingStore(inner)
    catalog = Catalog(store)
    first = catalog.look()
    assert {"list": 1 + 3 * 100, "read": 2 * 100} == count(store)
    write_step(inner, 100)
    before = count(store)
    second = catalog.look(trust=True)
    assert {"list": before["list"] + 1 + 3, "read": before["read"] + 2} == count(store)
    assert (first, 100, 101) == (second[:-1], catalog.num_hits, catalog.num_reads)


def test_a_look_without_trust_asks_for_the_records_of_each_step() -> None:
    """What others have deleted or saved over is seen, at one listing for each step that is as it was."""
    inner = MemoryStore()
    write_run(inner, [1, 2, 3, 4])
    catalog = Catalog(store := CountingStore(inner))
    catalog.look()
    delete(inner, 1)
    write_step(inner, 2, time_s=START_S + 1.0)
    before = store.count(Verb.LIST).calls
    assert {1: "deleted", 2: "committed", 3: "committed", 4: "committed"} == {one.step: one.condition for one in catalog.look()}
    num_again = 2  # 3 and 4
    assert (before + 1 + 4 + 1 + 3, num_again) == (store.count(Verb.LIST).calls, catalog.num_hits)


def test_trust_ends_with_forgetting_and_never_covers_what_is_unfinished() -> None:
    """A step that its writer has changed is looked at again, and so is every one that may change by itself."""
    store = MemoryStore()
    write_run(store, [1, 2])
    manifest = write_pending(store, 3)
    catalog = Catalog(store)
    catalog.look()
    delete(store, 1)
    publish(store, manifest)
    assert ["committed", "committed", "committed"] == [one.condition for one in catalog.look(trust=True)]
    catalog.forget(1)
    assert ["deleted", "committed", "committed"] == [one.condition for one in catalog.look(trust=True)]


def test_a_step_that_is_gone_is_forgotten() -> None:
    """What somebody removes by hand is not there any more, with trust or without."""
    store = MemoryStore()
    write_run(store, [1, 2])
    catalog = Catalog(store)
    catalog.look()
    store.delete([key for key in store.snapshot() if key.startswith("step_1/")])
    assert [[2], [2]] == [[one.step for one in catalog.look(trust=trust)] for trust in (True, False)]


# Identity --------------------------------------------------------------------------------------------------------------


def test_b134_the_current_run_is_the_one_that_saved_last() -> None:
    """By the time of its record, whatever the numbers say; among equal times the higher step (B134)."""
    steps = [make_info(100), make_info(700, run_id=OTHER, time=stamp(START_S))]
    assert (RUN, OTHER) == (find_current(steps), find_current(steps[1:]))
    assert OTHER == find_current([make_info(1), make_info(2, run_id=OTHER, time=stamp(START_S + 1))])
    assert (None, None) == (find_current([]), find_current([make_info(1, condition=Condition.INCOMPLETE)]))


def test_steps_of_before_a_rollback_are_stale() -> None:
    """After a return to 20 and a save of 21 the old 30 and 40 are stale, and 21 is the latest; other runs do not matter."""
    back_s = START_S + 1000
    steps = mark_stale(
        [make_info(40), make_info(30), make_info(20), make_info(21, time=stamp(back_s)), make_info(50, run_id=OTHER)]
    )
    latest = find_latest(steps, RUN)
    assert ([30, 40], [20, 21, 30, 40, 50]) == ([one.step for one in steps if one.is_stale], [one.step for one in steps])
    assert latest is not None
    assert 21 == latest.step


def test_steps_of_one_second_and_unfinished_ones_make_nothing_stale() -> None:
    """Equal times are in the order of the numbers, and only committed steps are compared."""
    steps = [
        make_info(1),
        make_info(2, time=stamp(START_S + 1)),
        make_info(3),
        make_info(0, condition=Condition.PENDING, time=""),
    ]
    assert [False] * 4 == [one.is_stale for one in mark_stale(steps)]


BACK = Resumed(20, stamp(START_S + 60))


@pytest.mark.parametrize("condition", [Condition.COMMITTED, Condition.INCOMPLETE])
def test_a_return_leaves_steps_behind_whatever_is_saved_next(condition: Condition) -> None:
    """After a return to 20 and a save of 70 the old 30 and 60 are stale, also if 70 has lost files; other runs do not matter."""
    saved = make_info(70, condition=condition, resumed=BACK)
    steps = mark_stale([*map(make_info, (10, 20, 30, 60)), make_info(50, run_id=OTHER), saved])
    assert [30, 60] == [one.step for one in steps if one.is_stale]
    assert [] == [one.step for one in mark_stale([make_info(30), replace(saved, run_id=OTHER)]) if one.is_stale]


def test_a_return_leaves_nothing_behind_that_was_saved_since() -> None:
    """Neither what was saved after it, in whichever order, nor the steps up to the one that was gone back to."""
    later = [make_info(step, time=stamp(START_S + 61 + step), resumed=BACK) for step in (21, 30, 40)]
    assert [False] * 5 == [one.is_stale for one in mark_stale([make_info(10), make_info(20), *later])]


def test_the_latest_is_good_and_of_the_run() -> None:
    """Damaged, incomplete, pending and deleted steps, and those of others, are never the latest."""
    bad = [make_info(10 + i, condition=condition) for i, condition in enumerate(set(Condition) - {Condition.COMMITTED})]
    steps = [make_info(1), *bad, make_info(20, run_id=OTHER), make_info(21, run_id=None)]
    assert [1, 20, 21] == [one.step for run in (RUN, OTHER, None) if (one := find_latest(steps, run))]
    assert find_latest(steps, "run-c") is None
