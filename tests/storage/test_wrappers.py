"""Wrappers: each changes what it says and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from anyshard.errors import BlobExists, StorageError, StorageFull
from anyshard.storage.memory import MemoryStore
from anyshard.storage.wrappers import (
    Action,
    Call,
    Count,
    CountingStore,
    FaultStore,
    LatencyStore,
    Rule,
    SequentialStore,
    ThrottledStore,
    Verb,
    WrapperStore,
    answer,
    do_before,
    fail,
    flip_bit,
    lose_answer,
    read_short,
)
from anyshard.testing.store_fixtures import keys_below, read_range, write_blob

FULL = StorageFull("full", file="a")


def use_every_verb(store: WrapperStore) -> None:
    """One call of each verb, on a store that is empty."""
    store.prepare(("data/",))
    store.create("a", b"12345", token="t")
    store.put("c", b"1234", token="t")
    write_blob(store, "data/b", b"123456")
    store.read("a", max_nbytes=5)
    read_range(store, "data/b", 0, 6)
    store.list("")
    store.free_nbytes()
    store.delete(("a",))


def test_wrapper_sees_every_verb() -> None:
    """Each verb of store, writer and reader passes through `around`, once, with its key and its bytes."""
    calls: list[Call] = []

    class Seeing(WrapperStore):
        def around(self, call, run):  # type: ignore[no-untyped-def]
            calls.append(call)
            return run()

    use_every_verb(Seeing(MemoryStore()))
    assert sorted(Verb) == sorted(call.verb for call in calls)
    moved = {call.verb: (call.key, call.nbytes) for call in calls if call.nbytes}
    assert {Verb.CREATE: ("a", 5), Verb.PUT: ("c", 4), Verb.WRITE_AT: ("data/b", 6), Verb.READ_INTO: ("data/b", 6)} == moved


def test_latency_sleeps_before_the_given_verbs() -> None:
    """Only verbs of the table sleep, each as long as it says."""
    slept: list[float] = []
    use_every_verb(LatencyStore(MemoryStore(), {Verb.CREATE: 0.5, Verb.LIST: 0.25}, sleep=slept.append))
    assert [0.5, 0.25] == slept


def test_throttle_sleeps_for_the_bytes_moved() -> None:
    """Each call that moves bytes takes their time: here 1 s for each of 5, 4, 6, 5 and 6 bytes."""
    slept: list[float] = []
    use_every_verb(ThrottledStore(MemoryStore(), nbytes_per_s=1.0, sleep=slept.append))
    assert [5.0, 4.0, 6.0, 5.0, 6.0] == slept


def test_counting_counts_calls_and_bytes() -> None:
    """Calls are counted when they begin, bytes when they succeed, also those that `read` returned."""
    store = CountingStore(MemoryStore())
    use_every_verb(store)
    with pytest.raises(BlobExists):
        store.create("data/b", b"123", token="t")
    found = {verb: store.count(verb) for verb in (Verb.CREATE, Verb.READ, Verb.WRITE_AT, Verb.DELETE)}
    expected = {Verb.CREATE: (2, 5), Verb.READ: (1, 5), Verb.WRITE_AT: (1, 6), Verb.DELETE: (1, 0)}
    assert {verb: Count(calls, nbytes, 0, 1) for verb, (calls, nbytes) in expected.items()} == found


def test_counting_knows_how_many_ran_at_once() -> None:
    """Three calls that wait for each other count as three in flight."""
    barrier = threading.Barrier(3, timeout=30)
    inner = FaultStore(MemoryStore({"a": b"x"}), (Rule(Verb.READ, "a", do_before(barrier.wait), times=3),))
    store = CountingStore(inner)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: store.read("a", max_nbytes=1), range(3)))
    assert Count(calls=3, nbytes=3, in_flight=0, max_in_flight=3) == store.count(Verb.READ)


def with_fault(action: Action, verb: Verb, **options: int) -> FaultStore:
    """A store with one blob and one rule for it."""
    return FaultStore(MemoryStore({"a": b"\x00\x00"}), (Rule(verb, "*", action, **options),))


def test_fault_strikes_the_nth_calls_only() -> None:
    """`nth` and `times` count matching calls; `fired` lists those that went wrong."""
    store = with_fault(fail(FULL), Verb.READ, nth=2, times=2)
    outcomes = []
    for _ in range(4):
        try:
            outcomes.append(store.read("a", max_nbytes=2))
        except StorageFull:
            outcomes.append(b"failed")
    assert [b"\x00\x00", b"failed", b"failed", b"\x00\x00"] == outcomes
    assert (Call(Verb.READ, "a"),) * 2 == store.fired


@pytest.mark.parametrize(("glob", "fires"), [("manifest-*", True), ("*", True), ("manifest-2.json", False), ("data/*", False)])
def test_fault_matches_keys_by_glob(glob: str, fires: bool) -> None:
    """A rule counts only calls of its verb on keys that its glob matches."""
    store = FaultStore(MemoryStore(), (Rule(Verb.CREATE, glob, fail(FULL)),))
    store.list("")
    try:
        store.create("manifest-1.json", b"", token="t")
    except StorageFull:
        assert fires
    assert fires == bool(store.fired)


def test_first_rule_that_fires_wins() -> None:
    """Of two rules for one call the first acts, and both have counted it."""
    store = FaultStore(MemoryStore(), (Rule(Verb.LIST, "*", fail(FULL)), Rule(Verb.LIST, "*", fail(KeyError("second")), nth=2)))
    with pytest.raises(StorageFull):
        store.list("")
    with pytest.raises(KeyError):
        store.list("")


def test_failed_create_creates_nothing() -> None:
    """`fail` happens before the call."""
    store = FaultStore(MemoryStore(), (Rule(Verb.CREATE, "*", fail(FULL)),))
    with pytest.raises(StorageFull):
        store.create("a", b"", token="t")
    assert keys_below(store, "") == ()


def test_lost_answer_creates() -> None:
    """`lose_answer` happens after the call."""
    store = FaultStore(MemoryStore(), (Rule(Verb.CREATE, "*", lose_answer(FULL)),))
    with pytest.raises(StorageFull):
        store.create("a", b"", token="t")
    assert keys_below(store, "") == ("a",)


@pytest.mark.parametrize("verb", [Verb.WRITE_AT, Verb.FINISH])
def test_fault_in_a_writer_leaves_no_blob(verb: Verb) -> None:
    """A fault while a blob is written reaches the caller, and the inner writer gives the blob up."""
    store = FaultStore(MemoryStore(), (Rule(verb, "*", fail(FULL)),))
    with pytest.raises(StorageFull):
        write_blob(store, "a", b"12345")
    assert keys_below(store, "") == ()


@pytest.mark.parametrize(
    "read", [lambda store: store.read("a", max_nbytes=2), lambda store: read_range(store, "a", 0, 2)], ids=["read", "read_into"]
)
def test_bit_flips_in_what_was_read(read: Callable[[FaultStore], bytes]) -> None:
    """`flip_bit` changes exactly that bit once; the blob itself is intact."""
    store = FaultStore(
        MemoryStore({"a": b"\x00\x00"}), tuple(Rule(verb, "a", flip_bit(9)) for verb in (Verb.READ, Verb.READ_INTO))
    )
    assert [b"\x00\x02", b"\x00\x00"] == [read(store), read(store)]


def test_short_reads() -> None:
    """`read_short` cuts the result of `read` and fails `read_into`."""
    assert with_fault(read_short(1), Verb.READ).read("a", max_nbytes=2) == b"\x00"
    with pytest.raises(StorageError, match="expected 2 bytes at 0, found 1"):
        read_range(with_fault(read_short(1), Verb.READ_INTO), "a", 0, 2)


def test_answer_replaces_the_call() -> None:
    """`answer` gives a value without asking the inner store (B055: a probe that says the disk is nearly full)."""
    assert with_fault(answer(10), Verb.FREE_NBYTES).free_nbytes() == 10


@pytest.mark.parametrize("positions", [(4, 0), (0, 0), (0, 8)])
def test_sequential_store_refuses_other_orders(positions: tuple[int, int]) -> None:
    """Without `parallel_writes` a write that does not begin where the last one ended is an error."""
    store = SequentialStore(MemoryStore())
    with store.create_blob("a", nbytes=12) as writer, pytest.raises(StorageError, match="no parallel_writes"):
        for position in positions:
            writer.write_at(position, memoryview(b"1234"))


def test_sequential_store_refuses_writes_at_once() -> None:
    """A write that begins while another one runs is an error, even at the right position."""
    started, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        started.set()
        go_on.wait(30)

    store = SequentialStore(FaultStore(MemoryStore(), (Rule(Verb.WRITE_AT, "*", do_before(wait)),)))
    with store.create_blob("a", nbytes=8) as writer, ThreadPoolExecutor(1) as pool:
        first = pool.submit(writer.write_at, 0, memoryview(b"1234"))
        started.wait(30)
        with pytest.raises(StorageError, match="while another one ran"):
            writer.write_at(4, memoryview(b"5678"))
        go_on.set()
        assert first.result(30) is None


def test_sequential_store_says_so() -> None:
    """Only `parallel_writes` differs from the inner store."""
    capabilities = SequentialStore(MemoryStore()).capabilities
    assert (False, True) == (capabilities.parallel_writes, capabilities.guarded)
