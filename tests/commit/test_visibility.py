"""What is there but not seen yet: listings and reads that lag, answers that were lost, disks that are not shared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anyshard.commit.attempt import abandoning, begin
from anyshard.commit.publish import Patience, create_record, publish
from anyshard.commit.resolve import MAX_UNLISTED, look, resolve
from anyshard.errors import BlobExists, BlobNotFound, CommitConflict, CommitOutcomeUnknown, StorageError, StorageUnavailable
from anyshard.records.manifest import BlobEntry, Manifest, encode_manifest
from anyshard.records.names import blob_name, manifest_name
from anyshard.storage.memory import MemoryStore
from anyshard.storage.protocol import Store
from anyshard.storage.wrappers import CountingStore, FaultStore, Rule, Verb
from anyshard.storage.wrappers.faults import do_before, fail, lose_answer
from anyshard.storage.wrappers.lagging import LaggingStore
from anyshard.storage.wrappers.unguarded import UnguardedStore
from tests.commit.guarding import IgnoringStore
from tests.commit.steps import Clock, contents, make_manifest, make_patience, save, verdict, write_attempt

DOWN = StorageUnavailable("given up after 8 attempts", file="manifest-1.json", attempts=8)


def ready(store: Store) -> Manifest:
    """A manifest whose files are all written."""
    return write_attempt(store, begin(store, sections=("model",), overwrite=False))


# Files that come up late -----------------------------------------------------------------------------------------------


def test_files_that_are_listed_late_are_waited_for() -> None:
    """The save is published as soon as the listing shows all of its files, and the pauses grow."""
    clock, pauses_s = Clock(), list[float]()
    store = CountingStore(LaggingStore(MemoryStore(), listing_s=9, clock=clock.read))

    def pause(seconds: float) -> None:
        pauses_s.append(seconds)
        clock.sleep(seconds)

    publish(store, ready(store), patience=replace(make_patience(clock), sleep=pause))
    assert 1 == verdict(store)
    assert [0.05, 0.1, 0.2, 0.4, 0.8, 1, 1] == pauses_s[:7]
    assert 9 == pytest.approx(sum(pauses_s), abs=1)


def test_files_that_are_listed_too_late() -> None:
    """After the visibility timeout they count as missing, and nothing is published."""
    clock = Clock()
    began_s = clock.now_s
    inner = MemoryStore()
    store = LaggingStore(inner, listing_s=11, clock=clock.read)
    with pytest.raises(BlobNotFound, match="10 s after all ranks were done"):
        publish(store, ready(store), patience=make_patience(clock))
    assert (10, "unfinished") == (pytest.approx(clock.now_s - began_s), verdict(inner))


def test_nobody_waits_longer_than_for_the_storage() -> None:
    """A short timeout of the save bounds this wait too."""
    clock = Clock()
    patience = replace(make_patience(clock), timeout_s=2)
    began_s = clock.now_s
    with pytest.raises(BlobNotFound):
        publish(MemoryStore(), make_manifest(1, "a" * 13), patience=patience)
    assert 2 == pytest.approx(clock.now_s - began_s)


def test_a_save_that_is_overtaken_while_it_waits() -> None:
    """Its files are missed since the winner's cleaning removed them: it is told at once."""
    clock = Clock()
    store = MemoryStore()
    manifest = ready(store)

    def overtake(seconds: float) -> None:
        clock.sleep(seconds)
        save(store)

    assert manifest.index is not None
    store.delete([manifest.index.name])
    with pytest.raises(CommitConflict, match="found generation 1"):
        publish(store, manifest, patience=replace(make_patience(clock), sleep=overtake))


def spread(manifest: Manifest, *, num_ranks: int) -> Manifest:
    """The same with a blob of each rank."""
    names = (blob_name("model", rank, k=0, generation=1, attempt=manifest.attempt) for rank in range(num_ranks))
    blobs = tuple(BlobEntry(name, "model", rank, 4096, 64, manifest.blobs[0].tail_digest) for rank, name in enumerate(names))
    return replace(manifest, blobs=blobs, world_size=num_ranks)


def test_b050_a_directory_of_its_own_on_each_host() -> None:
    """The error names the files, the ranks and hosts that wrote them, the coordinator's host, and what has to be so."""
    store = MemoryStore(url="memory:run")
    manifest = spread(ready(store), num_ranks=4)
    with pytest.raises(BlobNotFound) as caught:
        publish(store, manifest, hosts=("a", "a", "b", "b"), patience=make_patience(Clock()))
    text = str(caught.value)
    assert "memory:run: nothing was committed, for 3 file(s)" in text
    assert f"{manifest.blobs[2].name}: expected 4096 bytes, found nothing; " in text
    assert "written by rank 1 on a, ranks 2, 3 on b, and are missed by the coordinator, on a." in text
    assert "the directory is not the same on all hosts" in text
    assert manifest.blobs[1].name == caught.value.file


def test_b050_hundreds_of_hosts() -> None:
    """The message stays short."""
    manifest = spread(ready(MemoryStore()), num_ranks=400)
    hosts = [f"host{rank // 8}" for rank in range(400)]
    with pytest.raises(BlobNotFound, match=r"and 396 more.*ranks 0, 1, 2, 3, 4, \.\.\. on host0,.* on 45 more hosts") as caught:
        publish(MemoryStore(), manifest, hosts=hosts, patience=make_patience(Clock()))
    assert len(str(caught.value)) < 1500


# Records whose creation was answered badly -----------------------------------------------------------------------------


def test_a_lost_answer_and_a_record_that_is_read_late() -> None:
    """The record is looked for until it comes up, and is ours."""
    clock = Clock()
    inner = MemoryStore()
    store = LaggingStore(FaultStore(inner, [Rule(Verb.CREATE, "manifest-*", lose_answer(DOWN))]), clock=clock.read)
    manifest = ready(store)
    hidden = FaultStore(store, [Rule(Verb.READ, "manifest-1.json", fail(BlobNotFound("cached", file="x")), times=5)])
    publish(hidden, manifest, patience=make_patience(clock))
    assert (1, 5) == (verdict(inner), len(hidden.fired))


def test_given_up_and_never_seen() -> None:
    """A request that was given up may take effect at any time: the outcome is unknown, every file stays, and then it exists."""
    clock, inner = Clock(), MemoryStore()
    began_s = clock.now_s
    store = FaultStore(inner, [Rule(Verb.CREATE, "manifest-*", fail(DOWN))])
    attempt = begin(store, sections=("model",), overwrite=False)
    manifest = write_attempt(store, attempt)
    with pytest.raises(CommitOutcomeUnknown, match="nothing was deleted") as caught, abandoning(store, attempt):
        publish(store, manifest, patience=make_patience(clock))
    assert (DOWN, 10) == (caught.value.__cause__, pytest.approx(clock.now_s - began_s))
    inner.create(manifest_name(1), encode_manifest(manifest), token="late")
    assert 1 == verdict(inner)


def test_said_to_exist_and_never_seen() -> None:
    """A record that is there but cannot be read may be ours: the outcome is unknown and every file stays."""
    inner = MemoryStore()
    store = FaultStore(inner, [Rule(Verb.CREATE, "manifest-*", fail(BlobExists("there", file="x")))])
    attempt = begin(store, sections=("model",), overwrite=False)
    with pytest.raises(CommitOutcomeUnknown, match="nothing was deleted"), abandoning(store, attempt):
        publish(store, write_attempt(store, attempt), patience=make_patience(Clock()))
    assert ["1 blob", "1 index"] == contents(inner)


def test_said_to_exist_and_superseded_since() -> None:
    """The generations that came after it explain that it is not there any more."""
    inner = MemoryStore()

    def overtake() -> None:
        save(inner)
        save(inner, overwrite=True, grace_s=-1)
        raise BlobExists("there", file="x")

    store = FaultStore(inner, [Rule(Verb.CREATE, "manifest-*", do_before(overtake))])
    with pytest.raises(CommitConflict, match="found generation 2"):
        publish(store, ready(store), patience=make_patience(Clock()))
    assert 2 == verdict(inner)


def test_a_put_that_was_given_up_may_still_come() -> None:
    """On an unguarded store the claim stays, so that no other save makes what the late put would replace."""
    inner = MemoryStore()
    late = FaultStore(inner, [Rule(Verb.PUT, "manifest-*", fail(DOWN))])
    store = UnguardedStore(IgnoringStore(late))
    attempt = begin(store, sections=("model",), overwrite=False)
    manifest = write_attempt(store, attempt)
    with pytest.raises(CommitOutcomeUnknown), abandoning(store, attempt):
        publish(store, manifest, patience=make_patience(Clock()))
    with pytest.raises(CommitConflict, match=attempt.id):
        save(store)
    inner.put(manifest_name(1), encode_manifest(manifest), token="x")
    assert manifest == resolve(store).manifest


# Two claims on a listing that lags -------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag_s", [0, 5, 9.5])
@pytest.mark.parametrize("between_s", [0, 0.01, 1])
def test_of_two_claims_at_most_one_is_published(lag_s: float, between_s: float) -> None:
    """However late a listing shows them: whoever sees its own claim sees an earlier one too."""
    clock = Clock()
    inner = MemoryStore()
    store = UnguardedStore(LaggingStore(IgnoringStore(inner), listing_s=lag_s, clock=clock.read))
    first, second = (begin(store, sections=("model",), overwrite=False) for _ in range(2))
    early = write_attempt(store, first)
    clock.sleep(between_s)
    late = write_attempt(store, second)
    with pytest.raises(CommitConflict, match=first.id):
        publish(store, late, patience=make_patience(clock))
    with pytest.raises(CommitConflict, match=second.id):
        publish(store, early, patience=make_patience(clock))
    store.delete([name for name in inner.snapshot() if second.id in name])
    publish(store, early, patience=make_patience(clock))
    assert early == resolve(inner).manifest


def test_an_early_claim_is_published_before_a_late_one_shows() -> None:
    """Whoever waits for its own claim need not see those made after it; they see it."""
    clock = Clock()
    inner = MemoryStore()
    store = UnguardedStore(LaggingStore(IgnoringStore(inner), listing_s=5, clock=clock.read))
    first, second = (begin(store, sections=("model",), overwrite=False) for _ in range(2))
    early = write_attempt(store, first)
    clock.sleep(3)
    late = write_attempt(store, second)
    publish(store, early, patience=make_patience(clock))
    with pytest.raises(CommitConflict):
        publish(store, late, patience=make_patience(clock))
    assert early == resolve(inner).manifest


# Requests --------------------------------------------------------------------------------------------------------------


def count_requests(store: CountingStore) -> dict[str, int]:
    return {str(verb): calls for verb in Verb if (calls := store.count(verb).calls)}


def test_requests_of_a_resolve() -> None:
    """Three listings (root, data/, one section), the newest record, and the one after it, which is not there."""
    inner = MemoryStore()
    save(inner)
    store = CountingStore(inner)
    resolve(store)
    assert {"list": 3, "read": 2} == count_requests(store)


@pytest.mark.parametrize("num_hidden", [1, 2])
def test_requests_of_a_resolve_where_the_listing_lags(num_hidden: int) -> None:
    """Each record that is not listed yet costs one read, and the newest counts."""
    clock = Clock()
    inner = MemoryStore()
    save(inner)
    lagging = LaggingStore(inner, listing_s=5, clock=clock.read)
    for generation in range(2, 2 + num_hidden):
        create_record(lagging, make_manifest(generation, "b" * 13))
    store = CountingStore(lagging)
    assert 1 + num_hidden == resolve(store).manifest.generation
    assert {"list": 3, "read": 1 + num_hidden} == count_requests(store)


@pytest.mark.parametrize("guarded", [True, False])
def test_requests_of_a_publish(guarded: bool) -> None:
    """One look at the step and a last one at the next generation; an unguarded store adds the look before and after the put."""
    store = CountingStore(MemoryStore())
    outer = store if guarded else UnguardedStore(IgnoringStore(store))
    manifest = ready(outer)
    before = count_requests(store)
    publish(outer, manifest, patience=Patience())
    after = {verb: calls - before.get(verb, 0) for verb, calls in count_requests(store).items()}
    expected = {"list": 3, "read": 1, "create": 1} if guarded else {"list": 3, "read": 3, "put": 1}
    assert expected == {verb: calls for verb, calls in after.items() if calls}


def test_what_answers_everything_is_no_store() -> None:
    """A server that has content under every name ends the search, with what to check."""

    class Portal(MemoryStore):
        def read(self, key: str, *, max_nbytes: int) -> bytes:
            return b"<html>log in</html>"

    store = CountingStore(Portal())
    with pytest.raises(StorageError, match="Check the endpoint"):
        look(store)
    assert MAX_UNLISTED == store.count(Verb.READ).calls
