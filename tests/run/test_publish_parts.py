"""Publishing a step in parts: what counts, what is waited for, what is refused, and who wins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from anyshard.commit.parts import part_store
from anyshard.commit.publish import Patience, create_record
from anyshard.commit.publish_parts import Outcome, publish_parts, tidy_parts
from anyshard.commit.saved_parts import Incarnation, check_role, find_part, list_saved, read_step_record
from anyshard.commit.tombstone import delete_step, make_tombstone
from anyshard.errors import (
    BlobExists,
    CheckpointDamaged,
    CheckpointExists,
    CheckpointNotFound,
    CommitConflict,
    CommitOutcomeUnknown,
    InvalidOption,
    StorageError,
    StorageUnguarded,
)
from anyshard.records.manifest import PartEntry, Resumed, encode_manifest
from anyshard.storage.memory import MemoryStore
from anyshard.storage.protocol import Store
from anyshard.storage.wrappers import Action, FaultStore, Rule, Verb
from anyshard.storage.wrappers.faults import do_before, fail, lose_answer
from anyshard.storage.wrappers.unguarded import UnguardedStore
from tests.commit.steps import Clock, save
from tests.run.parts_scenes import (
    BOTH,
    ROLES,
    STEP,
    ask,
    make_store,
    named_attempts,
    publish_both,
    resolve_whole,
    save_all,
    save_part,
    seen_attempts,
)

DOWN = StorageError("the store is down", file="manifest-1.json")
RESUMED = Incarnation(run_id="r", resumed=STEP - 1, since_s=1_000_050.0)  # the clock of the tests begins at 1,000,000


def test_the_record_names_each_part() -> None:
    """It holds generation and attempt of each, in the order of their names, and no data of its own."""
    store = make_store()
    attempts = save_all(store)
    manifest = publish_both(store).manifest
    assert tuple(PartEntry(role, 1, attempt) for role, attempt in zip(ROLES, attempts, strict=True)) == manifest.parts
    assert ((), None, STEP, attempts) == (manifest.sections, manifest.index, manifest.step, seen_attempts(store))


def lose_a_blob(store: Store) -> None:
    part = save_part(store, "critic")
    part_store(store, "critic").delete([part.blobs[0].name])


def leave_unfinished(store: Store) -> None:
    faulty = FaultStore(store, [Rule(Verb.CREATE, "*/manifest-1.json", fail(DOWN)), Rule(Verb.DELETE, "*", fail(DOWN), times=99)])
    with pytest.raises(StorageError):
        save_part(faulty, "critic")


@pytest.mark.parametrize(
    ("spoil", "why"),
    [(lambda _: None, "nothing is there"), (lose_a_blob, "1 file"), (leave_unfinished, "only an unfinished save")],
    ids=["missing", "a file is missing", "unfinished"],
)
def test_a_step_is_not_published_without_all_parts(spoil: Callable[[Store], None], why: str) -> None:
    """The error says which part is missing and why, nothing is written, and the other part loads by name."""
    store = make_store()
    attempt = save_part(store, "actor").attempt
    spoil(store)
    before = store.snapshot()
    with pytest.raises(CheckpointNotFound, match=f"critic: {why}"):
        publish_both(store)
    assert (before, attempt) == (store.snapshot(), resolve_whole(find_part(store, "actor")).attempt)
    with pytest.raises(CheckpointNotFound, match="not published"):
        find_part(store, "actor", published=True)


def test_it_waits_for_parts() -> None:
    """A part that is committed while it waits is published."""
    clock = Clock()
    store, pauses = make_store(clock), []

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        pauses.append(seconds)
        if len(pauses) == 3:
            save_part(store, "critic")

    save_part(store, "actor")
    outcome = publish_parts(store, BOTH, timeout_s=60, patience=Patience(clock=clock.read, sleep=sleep))
    assert (True, 3) == (outcome.is_new, len(pauses))


def test_it_waits_no_longer_than_it_is_told() -> None:
    """Then the error says how long it has waited."""
    clock = Clock()
    with pytest.raises(CheckpointNotFound, match="within 60 s: actor: nothing is there; critic"):
        publish_parts(make_store(), BOTH, timeout_s=60, patience=Patience(clock=clock.read, sleep=clock.sleep))
    assert 1_000_060.0 == clock.now_s


def test_publishing_again_gives_the_same_record() -> None:
    """The second call with the same roles is no error and writes nothing; one with others is a conflict."""
    store = make_store()
    save_all(store)
    first, before = publish_both(store), store.snapshot()
    assert (replace(first, is_new=False), before) == (publish_both(store), store.snapshot())
    with pytest.raises(CommitConflict, match=r"expected to publish actor, found the step published with actor \(\w+\), critic"):
        publish_parts(store, ask("actor"))
    assert before == store.snapshot()


def publish_as(run_id: str | None) -> Callable[[Store], str | None]:
    return lambda store: publish_parts(store, ask(*ROLES, incarnation=Incarnation(run_id))).manifest.run_id


@pytest.mark.parametrize(
    ("actor", "critic", "own", "expected"), [("r", "r", "r", "r"), (None, "r", None, "r"), (None, None, "r", "r")]
)
def test_the_run_is_that_of_the_parts(actor: str | None, critic: str | None, own: str | None, expected: str) -> None:
    """What knows its run says it, be it a part or whoever publishes."""
    store = make_store()
    save_part(store, "actor", run_id=actor)
    save_part(store, "critic", run_id=critic)
    assert expected == publish_as(own)(store)


def test_a_step_of_no_run_begins_one() -> None:
    """Where nobody knows the run the record makes an id for it."""
    store = make_store()
    save_all(store)
    manifest = publish_both(store).manifest
    assert manifest.attempt == manifest.run_id


@pytest.mark.parametrize(("actor", "critic", "own"), [("a", "b", None), ("a", "a", "b"), ("a", None, "b")])
def test_parts_of_another_run_are_refused(actor: str | None, critic: str | None, own: str | None) -> None:
    """Nothing is published of two runs."""
    store = make_store()
    save_part(store, "actor", run_id=actor)
    save_part(store, "critic", run_id=critic)
    with pytest.raises(CommitConflict, match="expected parts of one run"):
        publish_as(own)(store)
    assert [] == named_attempts(store)


def with_fault(inner: Store, action: Action) -> Outcome:
    """Publish on a store whose creation of the record goes wrong."""
    save_all(inner)
    clock = Clock()
    store = FaultStore(inner, [Rule(Verb.CREATE, "manifest-1.json", action)])
    return publish_parts(store, BOTH, patience=Patience(clock=clock.read, sleep=clock.sleep))


def test_a_lost_answer_is_success() -> None:
    """The record is read back: it is ours, so the step exists."""
    inner = make_store()
    assert with_fault(inner, lose_answer(DOWN)).is_new
    assert ROLES == tuple(part.name for part in publish_both(inner).manifest.parts)


def test_an_answer_without_a_record_is_no_success() -> None:
    """`exists` may have been said of our own request, which may still come: the outcome is unknown."""
    inner = make_store()
    with pytest.raises(CommitOutcomeUnknown, match="could not be read back"):
        with_fault(inner, fail(BlobExists("there", file="manifest-1.json")))
    assert [] == named_attempts(inner)


def test_two_who_publish_at_once_make_one_record() -> None:
    """The second finds its generation taken, by the very same record."""
    inner = make_store()
    save_all(inner)
    others: list[Any] = []
    store = FaultStore(inner, [Rule(Verb.CREATE, "manifest-1.json", do_before(lambda: others.append(publish_both(inner))))])
    mine = publish_both(store)
    assert (mine.manifest, encode_manifest(mine.manifest)) == (others[0].manifest, inner.snapshot()["manifest-1.json"])


def test_what_stands_against_it_is_raised_before_the_record() -> None:
    """`decide` is the last word: what it raises ends the call with nothing published."""
    store = make_store()
    save_all(store)

    def refuse() -> None:
        raise CheckpointExists("no")

    with pytest.raises(CheckpointExists, match="no"):
        publish_parts(store, BOTH, decide=refuse)
    assert [] == named_attempts(store)


def test_parts_of_before_the_job_resumed_do_not_count() -> None:
    """An earlier job has left a part: it is waited for a new one, and taken only by its attempt."""
    clock = Clock()
    store = make_store(clock)
    old = save_part(store, "actor").attempt
    clock.sleep(100)
    save_part(store, "critic")
    with pytest.raises(CheckpointNotFound, match=rf"actor: .* before this job resumed; give its attempt \({old}\)"):
        publish_parts(store, ask(*ROLES, incarnation=RESUMED))
    publish_parts(store, ask("critic", actor=old, incarnation=RESUMED))
    assert old == named_attempts(store)[0]


def test_only_the_given_attempt_is_taken() -> None:
    """Whoever says which part is meant gets no other one."""
    store = make_store()
    save_all(store)
    with pytest.raises(CheckpointNotFound, match="actor: expected attempt aaaaaaaaaaaaa, found"):
        publish_parts(store, ask("critic", actor="a" * 13))


def test_a_published_part_is_not_saved_again() -> None:
    """Neither with `overwrite` nor without; before it is published a part may be replaced."""
    store = make_store()
    save_all(store)
    attempts = save_all(store, overwrite=True)
    publish_both(store)
    for overwrite in (False, True):
        with pytest.raises(CheckpointExists, match="expected a step that is not published"):
            save_part(store, "actor", overwrite=overwrite)
    assert attempts == seen_attempts(store)


def test_a_whole_checkpoint_is_no_step_in_parts() -> None:
    """Neither is a part saved into it, nor is it published, nor has it parts to load."""
    store = make_store()
    save(store)
    for act in (lambda: save_part(store, "actor"), lambda: publish_both(store)):
        with pytest.raises(CheckpointExists, match="a whole checkpoint"):
            act()
    with pytest.raises(CheckpointNotFound, match="load it without a role"):
        find_part(store, "actor")


def test_parts_of_a_deleted_step_do_not_come_back() -> None:
    """What is older than the tombstone does not count; a step saved anew does."""
    clock = Clock()
    store = make_store(clock)
    save_all(store)
    publish_both(store)
    clock.sleep(10)
    faulty = FaultStore(store, [Rule(Verb.CREATE, "parts/*", fail(DOWN), times=99)])
    with pytest.raises(StorageError):  # it dies before the parts are deleted
        delete_step(faulty)
    with pytest.raises(CheckpointNotFound, match="deleted"):
        publish_both(store)
    with pytest.raises(CheckpointNotFound, match="deleted"):
        find_part(store, "actor")
    clock.sleep(10)
    attempts = save_all(store, overwrite=True)
    assert (3, attempts) == (publish_both(store).manifest.generation, seen_attempts(store))


def test_a_job_that_went_back_replaces_the_step() -> None:
    """Until it publishes the step anew readers see all of the old one, then all of the new one; then old files go."""
    clock = Clock()
    store = make_store(clock)
    old = save_all(store, run_id="r")
    publish_both(store)
    clock.sleep(100)
    new = save_all(store, run_id="r", incarnation=RESUMED, overwrite=True)
    assert old == seen_attempts(store)
    outcome = publish_parts(store, ask(*ROLES, incarnation=RESUMED))
    tidy_parts(store, outcome.manifest, 0.0)
    assert (2, new, new) == (
        outcome.manifest.generation,
        seen_attempts(store),
        [part.entry.attempt for part in list_saved(store)],
    )
    assert not [key for key in store.snapshot() if any(attempt in key for attempt in old)]


def test_the_time_of_a_step_is_later_than_all_that_its_driver_knows() -> None:
    """Hosts that save parts may have clocks that are late, and where their jobs have gone on from makes later steps stale."""
    store = make_store()
    saved = save_all(store)
    ahead = Incarnation(after="2100-01-02T03:04:05.678Z")
    manifest = publish_parts(store, ask(*ROLES, incarnation=ahead)).manifest
    assert "2100-01-02T03:04:05.679Z" == manifest.time
    assert (None, saved) == (manifest.resumed, seen_attempts(store))


@pytest.mark.parametrize("since", ["", "2026-01-02T03:04:06.000Z"])
def test_a_step_says_where_its_driver_or_else_its_worlds_have_gone_on_from(since: str) -> None:
    """By the driver if it has loaded a step, else by the lowest one that a part was resumed from."""
    store = make_store()
    save_part(store, "actor", resumed=Resumed(70, "2026-01-02T03:04:05.500Z"))
    save_part(store, "critic", resumed=Resumed(80, "2026-01-02T03:04:05.600Z"))
    driver = Incarnation(resumed=90 if since else None, since=since)
    manifest = publish_parts(store, ask(*ROLES, incarnation=driver)).manifest
    expected = Resumed(90, since) if since else Resumed(70, "2026-01-02T03:04:05.500Z")
    assert (expected, True) == (manifest.resumed, manifest.time > expected.time)


def test_a_job_replaces_only_what_lies_behind_it() -> None:
    """A step from before the one that it resumed from, or published since, is not replaced."""
    clock = Clock()
    store = make_store(clock)
    save_all(store, run_id="r")
    publish_both(store)
    for incarnation in (replace(RESUMED, resumed=STEP), replace(RESUMED, since_s=1_000_000.0), replace(RESUMED, since_s=None)):
        with pytest.raises(CheckpointExists):
            save_part(store, "actor", incarnation=incarnation, overwrite=True)


def test_a_named_part_that_is_gone_is_damage() -> None:
    """The error names the part, whoever removed it."""
    store = make_store()
    save_all(store)
    publish_both(store)
    store.delete(["parts/actor/manifest-1.json"])
    with pytest.raises(CheckpointDamaged, match="expected part 'actor' as the record of the step names it"):
        find_part(store, "actor")


def test_a_store_without_guard_holds_steps_in_parts() -> None:
    """They are published there, and not replaced."""
    clock = Clock()
    store = UnguardedStore(make_store(clock))
    save_all(store, run_id="r")
    assert ("unguarded", True) == ((outcome := publish_both(store)).manifest.commit, outcome.is_new)
    clock.sleep(100)
    with pytest.raises(StorageUnguarded, match="not safe"):
        save_part(store, "actor", incarnation=RESUMED, overwrite=True)


def test_a_store_without_guard_does_not_replace_a_published_step() -> None:
    """Not even where somebody has deleted its parts, and saved new ones."""
    clock = Clock()
    store = UnguardedStore(make_store(clock))
    save_all(store, run_id="r")
    publish_both(store)
    clock.sleep(100)
    for role in ROLES:
        delete_step(part_store(store, role))
    save_all(store, run_id="r", incarnation=RESUMED)
    with pytest.raises(StorageUnguarded, match="Nothing was published"):
        publish_parts(store, ask(*ROLES, incarnation=replace(RESUMED, run_id=None)))


def test_a_record_that_others_change_all_the_time_is_given_up() -> None:
    """Whoever publishes loses every race, and says so in the end."""
    inner = make_store()
    save_all(inner)

    def bury() -> None:
        generation = read_step_record(inner).generation + 1
        create_record(inner, make_tombstone(generation, None))

    store = FaultStore(inner, [Rule(Verb.CREATE, "manifest-*", do_before(bury), times=99)])
    with pytest.raises(CommitConflict, match="others changed the record of the step 5 times"):
        publish_both(store)


def test_a_save_goes_on_where_the_record_of_the_step_cannot_be_seen() -> None:
    """Whoever publishes looks as well, so that is no reason to lose a part."""
    inner = make_store()
    store = FaultStore(inner, [Rule(Verb.LIST, "", fail(DOWN), nth=2, times=2)])
    attempt = save_part(store, "actor").attempt
    assert ([attempt], 2) == ([part.entry.attempt for part in list_saved(inner)], len(store.fired))


def test_a_record_that_is_cut_is_not_taken_for_a_part() -> None:
    """A store without atomic creation shows a record before it is whole."""
    store = make_store()
    save_all(store)
    record = store.snapshot()["parts/critic/manifest-1.json"]
    cut = MemoryStore(store.snapshot() | {"parts/critic/manifest-1.json": record[:-9]})
    with pytest.raises(CheckpointNotFound, match="critic: it is being committed"):
        publish_both(cut)
    with pytest.raises(
        CheckpointNotFound, match="no part 'critic' can be loaded: it is being committed. Parts that are there: actor"
    ):
        find_part(cut, "critic")


def test_only_parts_that_it_was_published_with_are_of_the_step() -> None:
    """A role without a part is told which there are."""
    store = make_store()
    save_all(store)
    publish_both(store)
    with pytest.raises(CheckpointNotFound, match="published without a part 'reference'; it has actor, critic"):
        find_part(store, "reference", published=True)


def test_a_part_that_cannot_be_tidied_up_is_a_warning() -> None:
    """The step exists: what goes wrong behind that must not look like a failure. What another save has begun stays."""
    store = make_store()
    save_all(store)
    manifest = publish_both(store).manifest
    (warning,) = tidy_parts(FaultStore(store, [Rule(Verb.LIST, "*", fail(DOWN))]), manifest, 0.0)
    assert "the store is down" in warning
    save(part_store(store, "actor"), overwrite=True)
    before = store.snapshot()
    assert ((), before) == (tidy_parts(store, manifest, 0.0), store.snapshot())


def test_a_named_part_is_committed_again() -> None:
    """Where another save took its place the part that the record names comes back, with the same files, when asked for again."""
    store = make_store()
    attempts = save_all(store)
    publish_both(store)
    save(part_store(store, "actor"), overwrite=True)  # somebody passes over the run
    assert attempts == seen_attempts(store)
    publish_both(store)
    (actor, _) = list_saved(store)
    assert (attempts[0], 3) == (actor.entry.attempt, actor.manifest.generation)
    create_record(part_store(store, "actor"), make_tombstone(4, None))  # a delete has begun
    publish_both(store)
    assert ["critic"] == [part.name for part in list_saved(store)]


@pytest.mark.parametrize("role", ["", "Actor", "a/b", "..", "a" * 65, 3])
def test_roles_are_names_of_directories(role: Any) -> None:
    """What cannot be one is refused before anything is asked of the store."""
    with pytest.raises(InvalidOption, match="role: expected"):
        check_role(role)
