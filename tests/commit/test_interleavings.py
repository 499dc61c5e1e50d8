"""Writers, a cleaner and a deleter at work on one step in any order of their store calls, some of them dying on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyshard.commit.attempt import abandoning, begin
from anyshard.commit.deletion import remove_superseded
from anyshard.commit.publish import publish
from anyshard.commit.resolve import check_complete, resolve
from anyshard.commit.thinning import thin_step
from anyshard.commit.tombstone import delete_step
from anyshard.errors import CheckpointNotFound, CommitConflict, StorageError
from anyshard.ops.clean import clean
from anyshard.records.manifest import Manifest
from anyshard.storage.memory import MemoryStore
from anyshard.storage.protocol import Store
from tests.commit.actors import Actor, Died
from tests.commit.steps import Clock, save, write_attempt

pytestmark = pytest.mark.slow


def write(store: Store) -> Manifest:
    """A save as the API does it, without any grace for readers."""
    attempt = begin(store, sections=("model",), overwrite=True)
    with abandoning(store, attempt):
        manifest = write_attempt(store, attempt)
        publish(store, manifest)
    remove_superseded(store, 0)
    return manifest


def write_more(store: Store) -> Manifest:
    """A save of two sections, one of which may be dropped later."""
    attempt = begin(store, sections=SECTIONS, overwrite=True)
    with abandoning(store, attempt):
        manifest = write_attempt(store, attempt, sections=SECTIONS)
        publish(store, manifest)
    remove_superseded(store, 0)
    return manifest


def thin(store: Store) -> object:
    """Drop one of two sections."""
    return thin_step(store, ("model",))


def clean_harshly(store: Store) -> object:
    """A clean that takes every unfinished save for dead."""
    return clean(store, older_than_s=0, grace_s=0)


WRITERS: tuple[Callable[[Store], object], ...] = (write, write)
ALL = (*WRITERS, clean_harshly, delete_step)
THINNING = (write_more, thin, thin, clean_harshly, delete_step)
SECTIONS = ("model", "extra")

schedules = st.lists(st.integers(0, len(ALL) - 1), max_size=120)
deaths = st.sets(st.integers(0, len(ALL) - 1))


def seen_by_readers(store: Store) -> Manifest | None:
    """The manifest that counts, which is complete, or None if there is none. Anything else is an error."""
    try:
        resolved = resolve(store)
    except CheckpointNotFound:
        return None
    check_complete(store, resolved.manifest, resolved.listing)
    return resolved.manifest


def play(store: Store, acts: Sequence[Callable[[Store], object]], schedule: list[int], dying: set[int]) -> list[object]:
    """Run the actors in the order of the schedule, looking after each call; then kill the dying ones and finish the others."""
    actors = [Actor(store, act) for act in acts]
    for number in schedule:
        actors[number % len(actors)].step()
        seen_by_readers(store)
    for number in dying & set(range(len(actors))):
        actors[number].kill()
    while not all(actor.is_done for actor in actors):
        for actor in actors:
            actor.step()
            seen_by_readers(store)
    return [actor.outcome for actor in actors]


@settings(max_examples=150)
@given(schedule=schedules, dying=deaths)
def test_no_interleaving_tears_a_checkpoint(schedule: list[int], dying: set[int]) -> None:
    """After every single store call readers see a complete checkpoint or none, and the next save succeeds."""
    store = MemoryStore(clock=Clock().read)
    save(store)
    play(store, ALL, schedule, dying)
    assert write(store) == seen_by_readers(store)


@settings(max_examples=100)
@given(schedule=schedules, dying=deaths)
def test_no_interleaving_with_thinners_tears_a_checkpoint(schedule: list[int], dying: set[int]) -> None:
    """Beside a writer, a cleaner and a deleter two thinners leave a complete checkpoint or none after every call."""
    store = MemoryStore(clock=Clock().read)
    write_more(store)
    play(store, THINNING, schedule, dying)
    last = write_more(store)
    assert last == seen_by_readers(store)
    thin(store)
    seen = seen_by_readers(store)
    assert seen is not None
    assert (("model",), last.blobs[:1], ("extra",)) == (seen.sections, seen.blobs, seen.thinned and seen.thinned.dropped)


@settings(max_examples=100)
@given(schedule=schedules, dying=st.sets(st.integers(0, 3)), is_first=st.booleans())
def test_what_a_save_reported_stays_until_another_replaces_it(schedule: list[int], dying: set[int], is_first: bool) -> None:
    """Without a deleter readers see in the end a checkpoint that its writer reported, died over, or that was there before."""
    store = MemoryStore(clock=Clock().read)
    before = None if is_first else save(store)
    outcomes = play(store, (*WRITERS, clean_harshly, clean_harshly), schedule, dying)[:2]
    seen = seen_by_readers(store)
    reported = [outcome for outcome in outcomes if isinstance(outcome, Manifest)]
    if reported and not any(isinstance(outcome, Died) for outcome in outcomes):
        assert seen in reported or (seen is not None and seen.blobs in [manifest.blobs for manifest in reported])
    elif not reported and not dying:
        assert (seen and seen.blobs) == (before and before.blobs)
    assert all(isinstance(outcome, (Manifest, CommitConflict, StorageError, Died)) for outcome in outcomes)
