"""Guards: what is found out about a store, how often it is asked, and what is left of the asking."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from anyshard import ops
from anyshard.commit import attempt, guard
from anyshard.commit.attempt import begin
from anyshard.commit.guard import UNGUARDED, Guards
from anyshard.commit.publish import publish
from anyshard.commit.resolve import resolve
from anyshard.errors import (
    BlobExists,
    CheckpointNotFound,
    CommitConflict,
    NotACheckpoint,
    StorageDenied,
    StorageError,
    StorageUnavailable,
    StorageUnguarded,
)
from anyshard.records.names import index_name, manifest_name
from anyshard.storage.memory import MemoryStore
from anyshard.storage.protocol import Store
from anyshard.storage.wrappers import CountingStore, FaultStore, Rule, Verb
from anyshard.storage.wrappers.faults import do_before, fail, lose_answer
from anyshard.storage.wrappers.unguarded import UnguardedStore
from tests.commit.guarding import GappedStore, HonouringStore, IgnoringStore, LyingStore, RefusingStore
from tests.commit.steps import Clock, contents, make_manifest, run_until, save, save_slowly, verdict, write_attempt, write_files

BAD = (IgnoringStore, RefusingStore, LyingStore, GappedStore)
DOWN = StorageUnavailable("the store is down", file="index", attempts=8)


def settle(store: Store, *, required: bool = False) -> Store:
    return Guards().settle(store, required=required)


def test_a_store_that_honours_the_condition() -> None:
    """It is the same place, known to be guarded, and nothing is left of the probe."""
    inner = MemoryStore()
    store = settle(HonouringStore(inner), required=True)
    assert (True, inner.url, inner.site, {}) == (store.capabilities.guarded, store.url, store.site, inner.snapshot())
    with pytest.raises(BlobExists):
        for data in (b"a", b"b"):
            store.create("manifest-1.json", data, token="x")


@pytest.mark.parametrize("kind", BAD)
def test_a_store_on_which_creates_cannot_be_relied_upon(kind: type[HonouringStore]) -> None:
    """It becomes one that says so, and whose own creates are refused when a key is there; nothing is left of the probe."""
    inner = MemoryStore()
    store = settle(kind(inner))
    assert (True, False, {}) == (isinstance(store, UnguardedStore), store.capabilities.guarded, inner.snapshot())
    store.create("manifest-1.json", b"a", token="x")
    with pytest.raises(BlobExists):
        store.create("manifest-1.json", b"b", token="x")
    assert {"manifest-1.json": b"a"} == inner.snapshot()


@pytest.mark.parametrize("kind", BAD)
def test_a_guard_that_is_required(kind: type[HonouringStore]) -> None:
    """Such a store is refused, with what to do, also when that was found out before."""
    guards, store = Guards(), kind(MemoryStore(url="memory:a"))
    for _ in range(2):
        with pytest.raises(StorageUnguarded, match="memory:a: expected .*that honours it .*; require_guarded=False saves"):
            guards.settle(store, required=True)
    assert 1 == guards.num_hits


@pytest.mark.parametrize("kind", [HonouringStore, IgnoringStore])
def test_a_site_is_probed_once(kind: type[HonouringStore]) -> None:
    """Other stores on the site are known without any request."""
    guards, inner = Guards(), MemoryStore()
    first = guards.settle(kind(inner), required=False)
    counting = CountingStore(inner)
    second = guards.settle(kind(counting), required=False)
    assert (first.capabilities, 1) == (second.capabilities, guards.num_hits)
    assert 0 == sum(counting.count(verb).calls for verb in Verb)


def test_many_threads_at_once() -> None:
    """One of them probes, with six creates on two keys, and all learn of it."""
    guards, counting = Guards(), CountingStore(MemoryStore())
    found: list[bool | None] = []

    def settle_one() -> None:
        found.append(guards.settle(HonouringStore(counting), required=False).capabilities.guarded)

    threads = [threading.Thread(target=settle_one) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert ([True] * 8, 7, 6) == (found, guards.num_hits, counting.count(Verb.CREATE).calls)


def test_what_a_store_says_itself_is_believed() -> None:
    """A store that knows is not asked, and is taken as it is or wrapped once."""
    inner = MemoryStore()
    counting = CountingStore(inner)
    unguarded = UnguardedStore(counting)
    assert (counting, unguarded) == (settle(counting), settle(unguarded))
    assert 0 == sum(counting.count(verb).calls for verb in Verb)


@pytest.mark.parametrize("error", [DOWN, StorageDenied("403", file="index")], ids=["down", "denied"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_store_that_does_not_answer(error: StorageUnavailable | StorageDenied, nth: int) -> None:
    """Its error is raised and nothing is remembered: asked again it is found to be guarded; nothing is left."""
    inner, guards = MemoryStore(), Guards()
    store = HonouringStore(FaultStore(inner, [Rule(Verb.CREATE, "*", fail(error), nth=nth)]))
    with pytest.raises(type(error)):
        guards.settle(store, required=False)
    assert {} == inner.snapshot()
    assert (True, 0) == (guards.settle(store, required=True).capabilities.guarded, guards.num_hits)


@pytest.mark.parametrize("kind", [HonouringStore, IgnoringStore])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_lost_answer_decides_nothing(kind: type[HonouringStore], nth: int) -> None:
    """Whether the condition was heard cannot be told from it."""
    verb = Verb.CREATE if kind is HonouringStore else Verb.PUT
    inner = MemoryStore()
    store = kind(FaultStore(inner, [Rule(verb, "*", lose_answer(DOWN), nth=nth)]))
    if (kind, nth) == (HonouringStore, 2):  # refused: there is no answer to lose
        assert settle(store).capabilities.guarded
    else:
        with pytest.raises(StorageUnavailable):
            settle(store)
    assert {} == inner.snapshot()


def test_a_new_name_that_is_taken() -> None:
    """A store that says so of a name that nobody has used is not to be judged."""
    inner = MemoryStore()
    store = FaultStore(inner, [Rule(Verb.CREATE, "*", fail(BlobExists("there", file="x")))])
    with pytest.raises(StorageError, match=r"index-1-probe.*expected a name that nobody has used to be free, found it taken"):
        settle(HonouringStore(store))
    assert {} == inner.snapshot()


def test_a_key_that_somebody_cleans_away() -> None:
    """A second create that goes through since the first key was deleted does not count against the store."""
    inner = MemoryStore()

    def clean_up() -> None:
        inner.delete(list(inner.snapshot()))

    store = FaultStore(inner, [Rule(Verb.CREATE, "*", do_before(clean_up), nth=2)])
    assert (True, 1) == (settle(HonouringStore(store)).capabilities.guarded, len(store.fired))


def test_a_key_that_cannot_be_removed(caplog: pytest.LogCaptureFixture) -> None:
    """The log says so, the verdict stands, and saves go on beside what is left."""
    inner = MemoryStore()
    store = settle(IgnoringStore(FaultStore(inner, [Rule(Verb.DELETE, "*", fail(StorageDenied("no", file="x")), times=9)])))
    assert ([False, True], 2) == ([store.capabilities.guarded, "could not be removed" in caplog.text], len(inner.snapshot()))
    assert 1 == save(store).generation


def test_a_system_without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nothing races, and the creates that follow each other decide."""

    def refuse(_thread: threading.Thread) -> bool:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(guard, "start_thread", refuse)
    assert [True, False] == [settle(kind(MemoryStore())).capabilities.guarded for kind in (HonouringStore, IgnoringStore)]


def test_no_save_is_taken_for_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes are no rivals, so no attempt has an id like theirs."""
    ids = iter(["probe" + "a" * 8, "b" * 13])
    monkeypatch.setattr(attempt, "make_attempt", lambda: next(ids))
    assert "b" * 13 == begin(MemoryStore(), sections=("model",), overwrite=False).id


def test_a_place_of_somebody_else() -> None:
    """Nothing is tried where nothing would be saved."""
    inner = MemoryStore({".metadata": b""})
    counting = CountingStore(inner)
    with pytest.raises(NotACheckpoint, match="PyTorch DCP"):
        settle(IgnoringStore(counting))
    assert (0, [".metadata"]) == (counting.count(Verb.PUT).calls, list(inner.snapshot()))


# What follows ----------------------------------------------------------------------------------------------------------


def test_nothing_is_replaced_on_an_unguarded_store() -> None:
    """overwrite=True is refused and says why, unless there is nothing to replace; after a delete the place is free again."""
    inner = MemoryStore()
    store = settle(IgnoringStore(inner))
    save(store, overwrite=True)
    before = inner.snapshot()
    with pytest.raises(StorageUnguarded, match="to replace it is not safe.*ops.delete"):
        begin(store, sections=("model",), overwrite=True)
    assert before == inner.snapshot()
    ops.delete(store)
    assert 3 == save(store, overwrite=True).generation


def test_a_damaged_checkpoint_is_not_replaced_there_either() -> None:
    """It can be deleted all the same."""
    store = settle(IgnoringStore(MemoryStore({manifest_name(1): b"{}"})))
    with pytest.raises(StorageUnguarded):
        begin(store, sections=("model",), overwrite=True)
    ops.delete(store)
    assert "deleted" == verdict(store)


@pytest.mark.parametrize("kind", [IgnoringStore, RefusingStore])
def test_a_delete_where_nothing_is_known(kind: type[HonouringStore]) -> None:
    """It finds out by itself what the store can do, and its tombstone says it."""
    inner = MemoryStore()
    save(inner)
    ops.delete(kind(inner))
    assert ["2 manifest"] == contents(inner)
    assert b'"commit":"unguarded"' in inner.snapshot()[manifest_name(2)]


def test_a_delete_of_nothing_tries_nothing() -> None:
    """Where there is no record no key is written."""
    counting = CountingStore(MemoryStore())
    with pytest.raises(CheckpointNotFound):
        ops.delete(IgnoringStore(counting))
    assert 0 == counting.count(Verb.PUT).calls


@pytest.mark.parametrize("kind", [IgnoringStore, RefusingStore])
def test_a_clean_never_fences_an_unguarded_store(kind: type[HonouringStore]) -> None:
    """An unfinished save is left whatever its age, and the report says why; superseded files go."""
    clock = Clock()
    inner = MemoryStore(clock=clock.read)
    store = UnguardedStore(kind(inner))
    save(store)
    ops.delete(store)
    inner.create(index_name(1, "a" * 13), b"late", token="x")
    writer = save_slowly(store)
    run_until(writer, "index")
    clock.sleep(1e9)
    report = ops.clean(kind(inner))
    assert ((index_name(1, "a" * 13),), None, 1) == (report.removed, report.fenced, len(report.in_progress))
    assert "may still be running" in report.warnings[0]
    assert UNGUARDED in report.warnings[0]
    run_until(writer, "published")
    assert 3 == verdict(inner)


def test_a_clean_of_a_guarded_store_that_does_not_know_it() -> None:
    """It tries, then fences; a dry run tries nothing and says so."""
    clock = Clock()
    inner = MemoryStore(clock=clock.read)
    run_until(save_slowly(inner), "index")
    clock.sleep(1e9)
    before = inner.snapshot()
    rehearsal = ops.clean(HonouringStore(inner), dry_run=True)
    assert (before, 1, True) == (inner.snapshot(), rehearsal.fenced, "dry run" in rehearsal.warnings[0])
    real = ops.clean(HonouringStore(inner))
    assert (rehearsal.removed, 1, ()) == (real.removed, real.fenced, real.warnings)


def test_a_claim_of_another_save() -> None:
    """Whoever sees it has lost: before it writes anything, or before it publishes; its files go and the other one's stay."""
    inner = MemoryStore()
    store = UnguardedStore(IgnoringStore(inner))
    early = begin(store, sections=("model",), overwrite=False)
    other = begin(store, sections=("model",), overwrite=False)
    manifest = write_attempt(store, other)
    with pytest.raises(CommitConflict, match=f"index-1-{other.id}.*died there.*with that attempt in their names"):
        begin(store, sections=("model",), overwrite=False)
    with pytest.raises(CommitConflict, match=other.id):
        publish(store, write_attempt(store, early))
    with pytest.raises(CommitConflict, match=early.id):
        publish(store, manifest)
    assert "unfinished" == verdict(inner)


@pytest.mark.parametrize("generation", [1, 5])
def test_a_claim_at_another_generation(generation: int) -> None:
    """A copy brings the generation of where it comes from: it and a save see each other all the same."""
    store = UnguardedStore(IgnoringStore(MemoryStore()))
    brought = make_manifest(generation, "a" * 13)
    own = begin(store, sections=("model",), overwrite=False)
    for _ in write_files(store, brought):
        pass
    for manifest, rival in ((write_attempt(store, own), brought.attempt), (brought, own.id)):
        with pytest.raises(CommitConflict, match=rival):
            publish(store, manifest)


def test_a_claim_is_nothing_to_a_guarded_store() -> None:
    """There the record decides, and one that died stands in nobody's way."""
    store = MemoryStore()
    run_until(save_slowly(store), "index")
    assert (save(store), 1) == (resolve(store).manifest, verdict(store))


def test_creates_of_an_unguarded_store() -> None:
    """A rival that puts between our put and our look has won; a key that nobody can read is not there, or not yet."""
    inner = MemoryStore()
    rival = partial(inner.put, "a", b"rival, longer", token="x")
    store = UnguardedStore(FaultStore(inner, [Rule(Verb.READ, "a", do_before(rival), nth=2)]))
    with pytest.raises(BlobExists, match="what another writer put at the same time"):
        store.create("a", b"ours", token="x")
    gone = UnguardedStore(FaultStore(inner, [Rule(Verb.READ, "b", do_before(lambda: inner.delete(["b"])), nth=2)]))
    with pytest.raises(StorageUnavailable, match="expected to read back"):
        gone.create("b", b"ours", token="x")


def test_a_store_that_cannot_read_parts_is_found_out() -> None:
    """Before there is a checkpoint that could not be loaded from it; and the probe is gone."""
    inner = HonouringStore(MemoryStore())
    store = FaultStore(inner, [Rule(Verb.READ_INTO, "*", fail(StorageError("non-partial response", file="a")))])
    with pytest.raises(StorageError, match="non-partial"):
        Guards().settle(store, required=False)
    assert () == inner.list("").entries
