"""Sending blobs again: those that storage did not take, whole, and no others; an answer that was lost is no failure."""

from __future__ import annotations

import threading
from collections import Counter
from types import TracebackType

import pytest

from anyshard.errors import BlobExists, StorageFull, StorageUnavailable
from anyshard.monitor.events import Emitter
from anyshard.monitor.sinks import RecordingSink
from anyshard.records.tail import CELL_NBYTES
from anyshard.storage.memory import MemoryBlobWriter, MemoryStore
from anyshard.storage.protocol import BlobWriter, Store
from anyshard.storage.wrappers import Call, FaultStore, Rule, SequentialStore, Verb, WrapperStore, fail, lose_answer

from .scene import Scene, make_arrays, make_pool, make_scene
from .test_lanes import Write, both

SIZES = {"a/w": 2 * CELL_NBYTES, "b/w": 4 * CELL_NBYTES + 100, "c/w": 5, "d/w": 3 * CELL_NBYTES}
BAD = "data/b/0.0-1-abcdefghijklm.bin"
EVER = 1 << 30
CALLS = [(Verb.CREATE_BLOB, 1), *((Verb.WRITE_AT, nth) for nth in (1, 3, 5)), (Verb.FINISH, 1)]
orders = pytest.mark.parametrize("order", [SequentialStore, WrapperStore])


class Calls(WrapperStore):
    """Counts the calls of each verb by key, and notes with what writers are left."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.counts: Counter[tuple[Verb, str]] = Counter()
        self.left_with: list[tuple[str, BaseException | None]] = []
        self._lock = threading.Lock()

    def around(self, call: Call, run):  # type: ignore[no-untyped-def]
        with self._lock:
            self.counts[call.verb, call.key] += 1
        return run()

    def create_blob(self, key: str, *, nbytes: int | None) -> BlobWriter:
        return _Left(self, key, super().create_blob(key, nbytes=nbytes))

    def count_created(self) -> dict[str, int]:
        """How often each section's blob was begun."""
        return {key.split("/")[1]: count for (verb, key), count in self.counts.items() if verb is Verb.CREATE_BLOB}


class _Left:
    def __init__(self, store: Calls, key: str, inner: BlobWriter) -> None:
        self._store, self._key, self._inner = store, key, inner
        self.write_at, self.finish = inner.write_at, inner.finish

    def __enter__(self) -> BlobWriter:
        self._inner.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._store.left_with.append((self._key, error))
        self._inner.__exit__(kind, error, traceback)


class LateStore(MemoryStore):
    """Says only at `finish` that a blob exists."""

    def create_blob(self, key: str, *, nbytes: int | None) -> MemoryBlobWriter:
        return MemoryBlobWriter(self._put, key, nbytes=nbytes)


@pytest.fixture(params=[1, 4])
def scene(request: pytest.FixtureRequest) -> Scene:
    return make_scene(make_arrays(SIZES), pool=make_pool(request.param))


def unavailable(text: str = "no answer") -> StorageUnavailable:
    return StorageUnavailable(text, file=BAD, attempts=8)


@both
@orders
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("times", [1, 2])
def test_blob_that_failed_is_sent_again_and_no_other(
    scene: Scene, write: Write, order: type[WrapperStore], call: tuple[Verb, int], times: int
) -> None:
    """At any call of a blob, at its first or its first two tries: the same files, every other blob sent once, nothing kept."""
    expected, before = MemoryStore(), threading.active_count()
    entries, num_free = scene.write(expected).blobs, scene.pool.num_free
    rules = [Rule(call[0], BAD, fail(unavailable()), nth=call[1], times=times)]  # the try that follows makes the next call
    store = Calls(FaultStore(order(inner := MemoryStore()), rules))
    assert entries == write(store, scene, threads=1)
    assert expected.snapshot() == inner.snapshot()
    assert {"a": 1, "b": times + 1, "c": 1, "d": 1} == store.count_created()
    assert (num_free, before) == (scene.pool.num_free, threading.active_count())


@both
@orders
@pytest.mark.parametrize(("verb", "nth"), CALLS)
def test_blob_that_fails_for_ever_is_the_error(
    scene: Scene, write: Write, order: type[WrapperStore], verb: Verb, nth: int
) -> None:
    """After two more rounds its first error is raised, with how often it was sent; every other blob was sent once."""
    errors = [unavailable(f"no answer {i}") for i in range(3)]
    given = iter(errors)

    def give_next(_call: Call, _run: object) -> None:
        raise next(given)

    store = Calls(FaultStore(order(inner := MemoryStore()), [Rule(verb, BAD, give_next, nth=nth, times=EVER)]))
    with pytest.raises(StorageUnavailable) as raised:
        write(store, scene, threads=1)
    assert raised.value is errors[0]
    assert [f"{BAD} was sent 3 times, the last of which ended with: no answer 2"] == raised.value.__notes__
    assert {"a": 1, "b": 3, "c": 1, "d": 1} == store.count_created()
    assert ["a", "c", "d"] == sorted(key.split("/")[1] for key in inner.snapshot())


@both
@orders
def test_many_threads_may_fail_in_one_try(scene: Scene, write: Write, order: type[WrapperStore]) -> None:
    """All blobs fail at every first write while others are under way; each is sent twice."""
    rules = [Rule(Verb.WRITE_AT, f"data/{name}/*", fail(unavailable())) for name in "abcd"]
    scene.write(expected := MemoryStore())
    write(store := Calls(FaultStore(order(inner := MemoryStore()), rules)), scene, threads=8)
    assert expected.snapshot() == inner.snapshot()
    assert dict.fromkeys("abcd", 2) == store.count_created()


@both
def test_without_resends_the_first_failure_ends_the_save(scene: Scene, write: Write) -> None:
    """Nothing is sent twice if that is not wanted."""
    store = Calls(FaultStore(SequentialStore(MemoryStore()), [Rule(Verb.FINISH, BAD, fail(unavailable()))]))
    with pytest.raises(StorageUnavailable) as raised:
        write(store, scene, resends=0)
    assert [f"{BAD} was sent once"] == raised.value.__notes__
    assert 1 == store.count_created()["b"]


@both
@orders
def test_writer_is_left_with_the_error(scene: Scene, write: Write, order: type[WrapperStore]) -> None:
    """So the store gives the upload up; a writer that finished is left without one."""
    store = Calls(order(FaultStore(MemoryStore(), [Rule(Verb.WRITE_AT, BAD, fail(error := unavailable()), nth=2)])))
    write(store, scene)
    assert [error, None] == [left for key, left in store.left_with if key == BAD]
    assert 5 == len(store.left_with)


@both
@orders
@pytest.mark.parametrize("inner", [MemoryStore, LateStore])
def test_lost_answer_of_finish_is_no_failure(
    scene: Scene, write: Write, order: type[WrapperStore], inner: type[MemoryStore]
) -> None:
    """What the second try finds there is what the first one sent; the store may say so at once, or only at the end."""
    entries = scene.write(expected := MemoryStore()).blobs
    store = Calls(order(FaultStore(found := inner(), [Rule(Verb.FINISH, BAD, lose_answer(unavailable()))])))
    assert entries == write(store, scene)
    assert expected.snapshot() == found.snapshot()
    assert 2 == store.count_created()["b"]


@both
@pytest.mark.parametrize("inner", [MemoryStore, LateStore])
@pytest.mark.parametrize("change", [b"x", bytes(4096), b""])
def test_other_bytes_under_our_name_are_an_error(scene: Scene, write: Write, inner: type[MemoryStore], change: bytes) -> None:
    """A blob that is there and is not what was sent is never taken for ours, nor touched."""
    scene.write(expected := MemoryStore())
    ours, found = expected.snapshot()[BAD], inner()
    other = {b"x": ours[:-1] + b"x", b"": b""}.get(change, ours + change)

    def put_other(_call: Call, _run: object) -> None:
        found.put(BAD, other, token="t")
        raise unavailable()

    with pytest.raises(BlobExists):
        write(SequentialStore(FaultStore(found, [Rule(Verb.FINISH, BAD, put_other)])), scene)
    assert other == found.snapshot()[BAD]


@both
def test_taken_name_is_an_error_of_the_first_try(scene: Scene, write: Write) -> None:
    """Even with our bytes: who made them is not known."""
    scene.write(expected := MemoryStore())
    with pytest.raises(BlobExists):
        write(MemoryStore({BAD: expected.snapshot()[BAD]}), scene)


@both
def test_lost_answer_is_asked_for_again(scene: Scene, write: Write) -> None:
    """If the tail cannot be read back now, a further try does."""
    rules = [Rule(Verb.FINISH, BAD, lose_answer(unavailable())), Rule(Verb.OPEN_BLOB, BAD, fail(unavailable()))]
    store = Calls(FaultStore(SequentialStore(MemoryStore()), rules))
    write(store, scene)
    assert 3 == store.count_created()["b"]


@both
def test_other_errors_end_the_save_in_any_try(scene: Scene, write: Write) -> None:
    """A full disk found in the second try is raised as it is."""
    full = StorageFull("no space left", file=BAD)
    rules = [Rule(Verb.WRITE_AT, BAD, fail(unavailable())), Rule(Verb.WRITE_AT, BAD, fail(full), nth=2)]
    with pytest.raises(StorageFull) as raised:
        write(Calls(FaultStore(SequentialStore(inner := MemoryStore()), rules)), scene)
    assert raised.value is full
    assert BAD not in inner.snapshot()


@both
def test_failure_elsewhere_ends_the_rounds(scene: Scene, write: Write) -> None:
    """What `check` raises after a blob has failed is the error, and the blob is not sent again."""
    sink = RecordingSink()

    def check() -> None:
        if any(event.name == "save.blob.resent" for event in sink.events):
            raise RuntimeError("rank 1 has failed")

    store = FaultStore(SequentialStore(inner := MemoryStore()), [Rule(Verb.WRITE_AT, BAD, fail(unavailable()))])
    with pytest.raises(RuntimeError, match="rank 1 has failed"):
        write(store, scene, check=check, events=Emitter([sink], operation="op", rank=0))
    assert BAD not in inner.snapshot()


@both
def test_event_says_which_blob_is_sent_again_and_why(scene: Scene, write: Write) -> None:
    """One per further try, with the first error."""
    sink = RecordingSink()
    store = FaultStore(SequentialStore(MemoryStore()), [Rule(Verb.FINISH, BAD, fail(unavailable()), times=2)])
    write(store, scene, events=Emitter([sink], operation="op", rank=0))
    found = [(event.file, event.detail) for event in sink.events if event.name == "save.blob.resent"]
    assert [(BAD, "try 2: no answer"), (BAD, "try 3: no answer")] == found
    names = [event.name for event in sink.events if event.file == BAD]
    assert (1, 1) == (names.count("save.blob.begin"), names.count("save.blob.durable"))


def test_sources_are_read_again_from_their_beginning(scene: Scene) -> None:
    """Rows are staged anew by the calling thread, a whole blob at a time, and other blobs are not."""
    rule = Rule(Verb.WRITE_AT, BAD, fail(unavailable()), nth=3)
    sink = RecordingSink()
    scene.write(FaultStore(SequentialStore(MemoryStore()), [rule]), events=Emitter([sink], operation="op", rank=0))
    again = [event for event in sink.events if event.name == "save.blob.resent"]
    staged = sink.events[sink.events.index(again[0]) :]
    files = [event.file for event in staged if event.name == "save.block.staged"]
    assert [BAD] * 5 == files
