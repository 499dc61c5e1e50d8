from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from anyshard.commit.attempt import begin
from anyshard.commit.publish import publish
from anyshard.errors import BlobNotFound, CommitConflict, CommitOutcomeUnknown, StorageError
from anyshard.records.digests import digest_bytes
from anyshard.records.manifest import Manifest, encode_manifest
from anyshard.records.names import manifest_name
from anyshard.storage.memory import MemoryStore
from anyshard.storage.protocol import Store
from anyshard.storage.wrappers import FaultStore, Rule, Verb
from anyshard.storage.wrappers.faults import do_before, fail, lose_answer
from tests.commit.steps import ATTEMPTS, Clock, make_manifest, make_patience, save, verdict, write_attempt

DOWN = StorageError("the store is down", file="manifest-1.json")


def ready(store: Store, *, overwrite: bool = False) -> Manifest:
    """A manifest whose files are all written."""
    return write_attempt(store, begin(store, sections=("model",), overwrite=overwrite))


def faulty(inner: Store, *rules: Rule) -> FaultStore:
    return FaultStore(inner, rules)


def on_create(action: Callable[..., object]) -> Rule:
    return Rule(Verb.CREATE, "manifest-*", action)


def test_a_lost_answer_is_success() -> None:
    """The record is read back: it is ours, so the save exists."""
    inner = MemoryStore()
    store = faulty(inner, on_create(lose_answer(DOWN)))
    manifest = ready(store)
    publish(store, manifest)
    assert (encode_manifest(manifest), 1) == (inner.snapshot()["manifest-1.json"], len(store.fired))


def test_an_answer_of_exists_to_our_own_record_is_success() -> None:
    """A client that repeats a request whose answer was lost is told that the record exists: it is ours."""
    inner = MemoryStore()
    manifest = ready(inner)
    store = faulty(inner, on_create(do_before(lambda: inner.create("manifest-1.json", encode_manifest(manifest), token="x"))))
    publish(store, manifest)
    assert (1, 1) == (verdict(inner), len(store.fired))


def test_an_error_without_a_record_is_that_error() -> None:
    """If nothing can be read back the save does not exist and the store's error is raised."""
    inner = MemoryStore()
    store = faulty(inner, on_create(fail(DOWN)))
    with pytest.raises(StorageError, match="the store is down") as caught:
        publish(store, ready(store))
    assert (DOWN, "unfinished") == (caught.value, verdict(inner))


@pytest.mark.parametrize("late", [False, True], ids=["before its last look", "after its last look"])
def test_a_second_writer_at_the_same_generation_loses(late: bool) -> None:
    """The first record stands; the loser is told, whenever the other one came."""
    inner = MemoryStore()
    loser, winner = ready(inner), ready(inner)
    store = faulty(inner, *([on_create(do_before(lambda: publish(inner, winner)))] if late else []))
    if not late:
        publish(inner, winner)
    with pytest.raises(CommitConflict, match=winner.attempt if late else "found generation 1"):
        publish(store, loser)
    assert encode_manifest(winner) == inner.snapshot()["manifest-1.json"]


def test_a_record_of_a_later_release_is_a_conflict_too() -> None:
    """A record that this release cannot read has taken the generation all the same."""
    store = MemoryStore()
    manifest = ready(store)
    data = encode_manifest(make_manifest(1, ATTEMPTS[0]))
    body = data[: data.rindex(b"xxh3")].replace(b'"requires":[]', b'"requires":["wings"]')
    put = partial(store.create, "manifest-1.json", body + f"{digest_bytes(body)}\n".encode(), token="x")
    with pytest.raises(CommitConflict, match="wings"):
        publish(faulty(store, on_create(do_before(put))), manifest)


def test_an_unreadable_record_is_asked_for_until_it_answers() -> None:
    """Two failed reads are waited out, then the lost answer turns out to be success."""
    inner, clock = MemoryStore(), Clock()
    began_s = clock.now_s
    store = faulty(inner, on_create(lose_answer(DOWN)), Rule(Verb.READ, "manifest-1.json", fail(DOWN), nth=2, times=2))
    manifest = ready(store)
    publish(store, manifest, patience=make_patience(clock))
    assert (1, 2.0) == (verdict(inner), clock.now_s - began_s)


@pytest.mark.parametrize("action", [lose_answer(DOWN), fail(DOWN)], ids=["created", "not created"])
def test_an_unreadable_record_is_an_unknown_outcome(action: Callable[..., object]) -> None:
    """At the deadline the outcome is unknown, whatever it is, and every file is still there."""
    inner, clock = MemoryStore(), Clock()
    store = faulty(inner, on_create(action), Rule(Verb.READ, "manifest-1.json", fail(DOWN), nth=2, times=1000))
    manifest = ready(store)
    with pytest.raises(CommitOutcomeUnknown, match="nothing was deleted"):
        publish(store, manifest, patience=make_patience(clock))
    assert {manifest.blobs[0].name} < set(inner.snapshot())


def test_a_half_written_record_is_no_answer() -> None:
    """A record that cannot be decoded may be on its way or ours: the outcome is unknown."""
    store = MemoryStore()
    manifest = ready(store)
    put = partial(store.create, "manifest-1.json", encode_manifest(manifest)[:100], token="x")
    with pytest.raises(CommitOutcomeUnknown):
        publish(faulty(store, on_create(do_before(put))), manifest, patience=make_patience(Clock()))


@pytest.mark.parametrize("which", ["blob", "index"])
def test_a_file_that_vanished_before_the_commit_stops_it(which: str) -> None:
    """Just before publishing all files are looked for; a missing one is named and nothing is published."""
    store = MemoryStore()
    manifest = ready(store)
    assert manifest.index is not None
    name = manifest.blobs[0].name if which == "blob" else manifest.index.name
    store.delete([name])
    with pytest.raises(BlobNotFound, match=f"nothing was committed.*10 s after all ranks were done.*{name}"):
        publish(store, manifest, patience=make_patience(Clock()))
    assert "manifest-1.json" not in store.snapshot()


def test_a_writer_that_slept_through_generations_does_not_take_an_old_one() -> None:
    """The free name of a removed old record is no generation to commit at."""
    store = MemoryStore()
    sleeper = ready(store)
    save(store)
    save(store, overwrite=True, grace_s=-1)
    assert manifest_name(1) not in store.snapshot()
    with pytest.raises(CommitConflict, match="found generation 2"):
        publish(store, sleeper)
    assert 2 == verdict(store)


def test_a_writer_that_slept_between_check_and_creation_is_told() -> None:
    """Its record of an old generation changes nothing for readers, and it learns that it lost."""
    inner = MemoryStore()
    sleeper = ready(inner)

    def oversleep() -> None:
        save(inner)
        save(inner, overwrite=True, grace_s=-1)

    store = faulty(inner, on_create(do_before(oversleep)))
    with pytest.raises(CommitConflict, match="found generation 2"):
        publish(store, sleeper)
    assert 2 == verdict(inner)


def test_trouble_after_the_commit_is_no_failure() -> None:
    """If the next generation cannot be asked for, the save still exists and publish returns."""
    inner = MemoryStore()
    store = faulty(inner, Rule(Verb.READ, "manifest-2.json", fail(DOWN)))
    publish(store, ready(store))
    assert (1, 1) == (verdict(inner), len(store.fired))
