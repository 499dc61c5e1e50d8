"""Deadlines: a hanging verb is an error in time, nobody acts on what may still change, and all else is as before."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from anyshard.errors import BlobExists, BlobNotFound, LimitExceeded, StorageStuck
from anyshard.storage.memory import MemoryStore
from anyshard.storage.protocol import Store
from anyshard.storage.wrappers import CountingStore, FaultStore, Rule, TimedStore, Verb, do_before
from anyshard.testing.store_fixtures import write_blob

VERBS: dict[Verb, Callable[[Store], object]] = {
    Verb.PREPARE: lambda store: store.prepare(["data/a/"]),
    Verb.CREATE: lambda store: store.create("b", b"", token="t"),
    Verb.READ: lambda store: store.read("a", max_nbytes=9),
    Verb.LIST: lambda store: store.list(""),
    Verb.DELETE: lambda store: store.delete(["a"]),
    Verb.FREE_NBYTES: lambda store: store.free_nbytes(),
}


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """An event to block calls on; opened at the end so that none stays behind."""
    event = threading.Event()
    yield event
    event.set()


def hanging(verb: Verb, gate: threading.Event, inner: Store | None = None) -> FaultStore:
    return FaultStore(inner or MemoryStore({"a": b"bytes"}), [Rule(verb, "*", do_before(gate.wait))])


def join_helpers() -> None:
    """Wait for all threads of timed stores, which end when they are idle."""
    for thread in threading.enumerate():
        if thread.name == "anyshard-storage":
            thread.join(timeout=30)
            assert not thread.is_alive()


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_that_hangs_is_an_error_in_time(verb: Verb, gate: threading.Event) -> None:
    """It names the verb and the store, and says what to look at."""
    store = TimedStore(hanging(verb, gate), 0.05)
    with pytest.raises(StorageStuck, match=rf"memory:: expected an answer to {verb}.* within 0\.05 s"):
        VERBS[verb](store)


def test_the_clock_of_the_store_is_asked_in_time(gate: threading.Event) -> None:
    """Some stores have to ask a server for the time."""

    def clock() -> float:
        if threading.current_thread().name == "anyshard-storage":
            gate.wait()
        return 0.0

    with pytest.raises(StorageStuck, match="now_s"):
        TimedStore(MemoryStore(clock=clock), 0.05).now_s()


def test_nothing_is_asked_while_a_given_up_call_is_out(gate: threading.Event) -> None:
    """A creation that may still happen is not read back, or deleted, too early; once it is over all goes on."""
    store = TimedStore(hanging(Verb.CREATE, gate), 0.05)
    with pytest.raises(StorageStuck):
        store.create("b", b"late", token="t")
    with pytest.raises(StorageStuck, match="read b was not asked for, since create b"):
        store.read("b", max_nbytes=9)
    gate.set()
    join_helpers()
    assert b"late" == store.read("b", max_nbytes=9)


def test_answers_and_errors_are_those_of_the_inner_store() -> None:
    """Whatever the inner store returns or raises comes out on the caller's thread."""
    store = TimedStore(MemoryStore({"a": b"bytes"}), 30)
    assert b"bytes" == store.read("a", max_nbytes=9)
    with pytest.raises(BlobExists):
        store.create("a", b"", token="t")
    with pytest.raises(BlobNotFound):
        store.read("b", max_nbytes=9)


def test_one_thread_serves_call_after_call() -> None:
    """Calls in a row share a thread, and nobody is left of it soon after."""
    names: set[int] = set()
    clock = lambda: float(names.add(threading.get_ident()) or 0)  # noqa: E731 - a clock that notes who asks
    store = TimedStore(MemoryStore(clock=clock), 30)
    names.clear()
    for _ in range(20):
        store.now_s()
    assert 1 == len(names)
    join_helpers()


def test_calls_at_once_do_not_wait_for_each_other(gate: threading.Event) -> None:
    """While one caller waits for its answer, another one gets its own."""
    store = TimedStore(hanging(Verb.READ, gate), 30)
    thread = threading.Thread(target=lambda: store.read("a", max_nbytes=9))
    thread.start()
    assert ["a"] == [entry.key for entry in store.list("").entries]
    gate.set()
    thread.join(timeout=30)


def test_blobs_are_left_to_their_callers(gate: threading.Event) -> None:
    """Verbs of blobs run on the thread that calls them, which has a patience of its own."""
    store = TimedStore(MemoryStore(), 30)
    before = threading.active_count()
    write_blob(store, "a", b"bytes")
    with store.open_blob("a") as reader:
        reader.read_into(0, memoryview(bytearray(5)))
    assert before == threading.active_count()


def test_keys_are_deleted_in_batches() -> None:
    """Two and a half thousand keys cost three waits, and all are gone."""
    names = [f"{i:04}" for i in range(2500)]
    inner = CountingStore(MemoryStore(dict.fromkeys(names, b"")))
    TimedStore(inner, 30).delete(names)
    assert ((), 2500) == (inner.list("").entries, inner.count(Verb.DELETE).calls)


def test_an_interrupt_waits_for_the_call_that_it_met() -> None:
    """Ctrl-C comes out once the call is over, so that what follows does not race with it."""
    done: list[str] = []
    store = FaultStore(MemoryStore(), [Rule(Verb.LIST, "*", do_before(lambda: os.kill(os.getpid(), signal.SIGINT)))])
    counting = CountingStore(store)
    with pytest.raises(KeyboardInterrupt):
        TimedStore(counting, 30).list("")
    done.extend(call.verb for call in store.fired)
    assert (["list"], 0) == (done, counting.count(Verb.LIST).in_flight)


def test_a_second_interrupt_leaves_the_call_behind(gate: threading.Event) -> None:
    """Whoever presses Ctrl-C twice gets out of a storage that hangs; what it still does keeps others out."""
    arrived = threading.Semaphore(0)

    def interrupt(_number: int, _frame: object) -> None:
        arrived.release()
        raise KeyboardInterrupt

    def press_twice() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            arrived.acquire(timeout=30)
        gate.wait()

    before = signal.signal(signal.SIGINT, interrupt)
    store = TimedStore(FaultStore(MemoryStore(), [Rule(Verb.LIST, "*", do_before(press_twice))]), 30)
    with pytest.raises(KeyboardInterrupt):
        store.list("")
    signal.signal(signal.SIGINT, before)
    with pytest.raises(StorageStuck, match="since list"):
        store.free_nbytes()


def test_a_forked_process_has_threads_of_its_own() -> None:
    """A store that was used before a fork answers in the child too, where its threads do not exist."""
    store = TimedStore(MemoryStore({"a": b"bytes"}), 30)
    store.list("")
    child = os.fork()
    if child == 0:
        os._exit(len(store.read("a", max_nbytes=9)))
    assert 5 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_no_thread_to_be_had_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says which limit to raise instead of a bare RuntimeError."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(LimitExceeded, match="ulimit -u"):
        TimedStore(MemoryStore(), 30).list("")
