"""Who dies or sleeps when (decisions, table G, for one process): what is on storage, what readers see, and what comes after."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import pytest

from anyshard.commit.attempt import begin
from anyshard.commit.cleaning import DAY_S
from anyshard.commit.deletion import remove_superseded
from anyshard.commit.publish import publish
from anyshard.commit.resolve import check_complete, resolve
from anyshard.commit.tombstone import delete_step
from anyshard.errors import CommitConflict, StorageError
from anyshard.ops.clean import clean
from anyshard.storage.memory import MemoryStore
from anyshard.storage.wrappers import FaultStore, Rule, Verb
from anyshard.storage.wrappers.faults import do_before, fail
from tests.commit.steps import Clock, contents, run_until, save, save_slowly, verdict, write_attempt

LATER_S = 2 * DAY_S


@dataclass(frozen=True, slots=True)
class Place:
    """A store with a clock that the test moves."""

    store: MemoryStore
    clock: Clock


@pytest.fixture
def place() -> Place:
    clock = Clock()
    return Place(MemoryStore(clock=clock.read), clock)


class Died(BaseException):
    """The process is gone: no handler may run."""


def die_in_delete(store: MemoryStore) -> FaultStore:
    """A store whose user dies when it has deleted one file."""
    return FaultStore(store, [Rule(Verb.DELETE, "*", fail(Died()), nth=2, times=1000)])


def die_before_anything(store: MemoryStore) -> None:
    next(save_slowly(store))


def die_after(point: str) -> Callable[[MemoryStore], None]:
    return lambda store: run_until(save_slowly(store), point)


def die_overwriting_after(point: str) -> Callable[[MemoryStore], None]:
    def act(store: MemoryStore) -> None:
        save(store)
        run_until(save_slowly(store, overwrite=True), point)

    return act


def lose_the_record_with_the_power(store: MemoryStore) -> None:
    run_until(save_slowly(store), "published")
    store.delete(["manifest-1.json"])


def die_removing_old_files(store: MemoryStore) -> None:
    save(store)
    with pytest.raises(Died):
        save(die_in_delete(store), overwrite=True, grace_s=0)  # type: ignore[arg-type]


def die_deleting_after_the_tombstone(store: MemoryStore) -> None:
    save(store)
    with pytest.raises(Died):
        delete_step(die_in_delete(store))


LEFT_1, WHOLE_1 = ["1 blob", "1 index"], ["1 blob", "1 index", "1 manifest"]
FENCED_1 = ["1 blob", "1 index", "2 manifest"]
LEFT_2, WHOLE_2 = ["2 blob", "2 index"], ["2 blob", "2 index", "2 manifest"]

# who dies when: (what happens; on storage, what readers see; the same after cleans two and four days later)
DEATHS = {
    "before the begin": (die_before_anything, [], "nothing", [], "nothing"),
    "while writing": (die_after("blob"), ["1 blob"], "unfinished", ["1 manifest"], "deleted"),
    "before the commit": (die_after("index"), LEFT_1, "unfinished", ["1 manifest"], "deleted"),
    "after the commit": (die_after("published"), WHOLE_1, 1, WHOLE_1, 1),
    "power loss before the directory is synced": (
        lose_the_record_with_the_power,
        LEFT_1,
        "unfinished",
        ["1 manifest"],
        "deleted",
    ),
    "overwriter before its begin": (die_overwriting_after("begun"), WHOLE_1, 1, WHOLE_1, 1),
    "overwriter while writing": (die_overwriting_after("blob"), [*WHOLE_1, "2 blob"], 1, FENCED_1, 2),
    "overwriter before the commit": (die_overwriting_after("index"), [*WHOLE_1, *LEFT_2], 1, FENCED_1, 2),
    "overwriter after the commit": (die_overwriting_after("published"), [*WHOLE_1, *WHOLE_2], 2, WHOLE_2, 2),
    "overwriter removing old files": (die_removing_old_files, ["1 blob", "1 manifest", *WHOLE_2], 2, WHOLE_2, 2),
    "deleter after the tombstone": (
        die_deleting_after_the_tombstone,
        ["1 blob", "1 manifest", "2 manifest"],
        "deleted",
        ["2 manifest"],
        "deleted",
    ),
}


@pytest.mark.parametrize("row", DEATHS)
def test_a_death_leaves_what_the_table_says(row: str, place: Place) -> None:
    """Storage and the verdict of readers right after a death."""
    happen, storage, seen, _, _ = DEATHS[row]
    happen(place.store)
    assert (sorted(storage), seen) == (contents(place.store), verdict(place.store))


@pytest.mark.parametrize("row", DEATHS)
def test_the_next_save_succeeds_whoever_died(row: str, place: Place) -> None:
    """After any death a save goes through, counts, is complete, and in time leaves nothing of the dead one."""
    DEATHS[row][0](place.store)
    manifest = save(place.store, overwrite=True)
    place.clock.sleep(LATER_S)
    remove_superseded(place.store, 3600.0)
    check_complete(place.store, manifest, resolve(place.store).listing)
    assert (manifest, 3) == (resolve(place.store).manifest, len(contents(place.store)))


@pytest.mark.parametrize("row", DEATHS)
def test_a_clean_later_removes_what_the_dead_one_left(row: str, place: Place) -> None:
    """In the end only what readers need and the records that fence the dead are there."""
    happen, _, _, storage, seen = DEATHS[row]
    happen(place.store)
    for _ in range(2):
        place.clock.sleep(LATER_S)
        clean(place.store)
    assert (sorted(storage), seen) == (contents(place.store), verdict(place.store))
    if isinstance(seen, int):
        check_complete(place.store, resolve(place.store).manifest, resolve(place.store).listing)


@pytest.mark.parametrize("row", DEATHS)
def test_a_clean_that_dies_anywhere_is_finished_by_the_next_one(row: str, place: Place) -> None:
    """A cleaner that died after its first deletion leaves a state that a second one brings to the same end."""
    happen, _, _, storage, seen = DEATHS[row]
    happen(place.store)
    place.clock.sleep(LATER_S)
    with suppress(Died):
        clean(die_in_delete(place.store))
    place.clock.sleep(LATER_S)
    clean(place.store)
    assert (sorted(storage), seen) == (contents(place.store), verdict(place.store))


def other_save(place: Place) -> None:
    save(place.store, overwrite=True)


def other_save_and_its_cleaning(place: Place) -> None:
    save(place.store, overwrite=True)
    place.clock.sleep(LATER_S)
    remove_superseded(place.store, 3600.0)


def cleaner(place: Place) -> None:
    place.clock.sleep(LATER_S)
    clean(place.store)


def deleter(place: Place) -> None:
    if verdict(place.store) == 1:
        delete_step(place.store)
    else:
        other_save(place)


OTHERS = {
    "second writer": other_save,
    "second writer that cleans up": other_save_and_its_cleaning,
    "cleaner": cleaner,
    "deleter": deleter,
}
POINTS = ("blob", "index", "check")


def sleep_at(point: str, place: Place, meanwhile: Callable[[], None], *, overwrite: bool) -> None:
    """A save that sleeps at `point` (`check`: between its last look and the creation of its record) while others act."""
    slow = FaultStore(place.store, [Rule(Verb.CREATE, "manifest-*", do_before(meanwhile))] if point == "check" else [])
    writer: Iterator[str] = save_slowly(slow, overwrite=overwrite)
    if point != "check":
        run_until(writer, point)
        meanwhile()
    for _ in writer:
        pass


@pytest.mark.parametrize("overwrite", [False, True], ids=["first save", "overwrite"])
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("point", POINTS)
def test_a_writer_that_wakes_after_others_acted_loses_and_tears_nothing(
    point: str, other: str, overwrite: bool, place: Place
) -> None:
    """Whoever acted while a writer slept stands: same verdict and same record before and after the writer woke."""
    if overwrite:
        save(place.store)
    after_others: list[object] = []

    def meanwhile() -> None:
        OTHERS[other](place)
        after_others.append((verdict(place.store), newest_record(place.store)))

    with pytest.raises((CommitConflict, StorageError)):
        sleep_at(point, place, meanwhile, overwrite=overwrite)
    assert after_others == [(verdict(place.store), newest_record(place.store))]
    if isinstance(verdict(place.store), int):
        check_complete(place.store, resolve(place.store).manifest, resolve(place.store).listing)


def newest_record(store: MemoryStore) -> bytes:
    """Bytes of the highest record."""
    records = {key: data for key, data in store.snapshot().items() if key.startswith("manifest-") and key.endswith(".json")}
    return records[max(records)]


@pytest.mark.parametrize("overwrite", [False, True], ids=["first save", "overwrite"])
def test_a_writer_that_wakes_before_anybody_acted_wins(overwrite: bool, place: Place) -> None:
    """A long sleep alone is no death: nothing was deleted, so its checkpoint is whole."""
    if overwrite:
        save(place.store)
    sleep_at("check", place, lambda: place.clock.sleep(LATER_S), overwrite=overwrite)
    check_complete(place.store, resolve(place.store).manifest, resolve(place.store).listing)
    assert 1 + overwrite == verdict(place.store)


def test_two_overwriters_do_not_touch_each_others_files(place: Place) -> None:
    """Of two saves over one step the second to publish loses, and the first is whole although both were writing."""
    save(place.store)
    one = write_attempt(place.store, begin(place.store, sections=("model",), overwrite=True))
    two = write_attempt(place.store, begin(place.store, sections=("model",), overwrite=True))
    publish(place.store, one)
    remove_superseded(place.store, 3600.0)
    with pytest.raises(CommitConflict):
        publish(place.store, two)
    check_complete(place.store, one, resolve(place.store).listing)


def test_b009_a_reader_of_the_old_checkpoint_has_the_grace(place: Place) -> None:
    """Files of the overwritten checkpoint stay for the grace and go with the first save after it."""
    first = save(place.store)
    save(place.store, overwrite=True)
    check_complete(place.store, first, resolve(place.store).listing)
    place.clock.sleep(3601)
    save(place.store, overwrite=True)
    assert ["2 blob", "2 index", "2 manifest", "3 blob", "3 index", "3 manifest"] == contents(place.store)
