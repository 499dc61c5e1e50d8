"""Summons: all ranks get the same call, which none has begun, in whatever order they look; ranks that are missing are named."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyshard.coord.files import FileKeyValueStore
from anyshard.coord.group import Channel
from anyshard.coord.members import Members
from anyshard.coord.memory import MemoryKeyValueStore
from anyshard.coord.protocol import KeyValueStore
from anyshard.coord.summons import Call, Kind, Summons
from anyshard.errors import KeyValueStoreLost, OperationFailed, RankMissing
from tests.coord.conftest import Connect
from tests.coord.thread_ranks import make_groups, run_group

ROLL_CALL_S = 3.0
LATE_S = 10.0


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class CountingStore(MemoryKeyValueStore):
    """Counts requests; answers none once it is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.num_requests = 0
        self.is_lost = False

    def get(self, key: str) -> bytes | None:
        self._count()
        return super().get(key)

    def get_many(self, keys: Sequence[str]) -> tuple[bytes | None, ...]:
        self._count()
        return super().get_many(keys)

    def set(self, key: str, value: bytes) -> None:
        self._count()
        super().set(key, value)

    def set_if_absent(self, key: str, value: bytes) -> bytes:
        self._count()
        return super().set_if_absent(key, value)

    def _count(self) -> None:
        self.num_requests += 1
        if self.is_lost:
            raise KeyValueStoreLost("lost", {})


def one_store() -> Callable[[int], KeyValueStore]:
    """The same store for every rank."""
    store = MemoryKeyValueStore()
    return lambda _: store


def make_summons(size: int, store: Callable[[int], KeyValueStore], clock: Callable[[], float]) -> list[Summons]:
    """One per rank; in the job the ranks have the numbers 10, 11, ..."""
    numbers = tuple(range(10, 10 + size))
    channels = [Channel(Members(rank, numbers), store(rank), "c") for rank in range(size)]
    return [Summons(channel, roll_call_s=ROLL_CALL_S, poll_s=0.25, clock=clock) for channel in channels]


def look_all(ranks: Sequence[Summons], times: int = 3) -> None:
    """Every rank looks, in turn, often enough for a round."""
    for _ in range(times):
        for rank in ranks:
            rank.look()


def begin(rank: Summons, num_calls: int) -> list[tuple[int, set[str]]]:
    """Begin calls; those that something was agreed for."""
    calls = [rank.count_call() for _ in range(num_calls)]
    return [(call.number, set(call.kinds)) for call in calls if call.kinds]


def failure(rank: Summons) -> tuple[str, dict[int, str]]:
    with pytest.raises(OperationFailed) as caught:
        rank.count_call()
    return type(caught.value).__name__, caught.value.failures


# ------------------------------------------------------------------------------------------------------------- one agreement


@pytest.mark.parametrize("summoner", [0, 1, 2])
def test_the_call_after_the_highest_of_all(summoner: int) -> None:
    """Ranks that are some calls apart stop at one that is new to all of them."""
    ranks = make_summons(3, one_store(), Clock())
    for rank, num_calls in zip(ranks, (5, 3, 4), strict=True):
        assert [] == begin(rank, num_calls)
    ranks[summoner].summon(Kind.STOP, f"SIGTERM on rank {summoner}")
    look_all(ranks)
    assert [6] * 3 == [rank.stop_call for rank in ranks]
    assert [[(6, {"stop"})]] * 3 == [begin(rank, 4) for rank in ranks]
    assert [None] * 3 == [rank.look() for rank in ranks]


def test_a_rank_alone() -> None:
    """It agrees with itself at once, and has nothing to look for before."""
    (rank,) = make_summons(1, lambda _: MemoryKeyValueStore(), Clock())
    assert rank.look() is None
    rank.summon(Kind.SAVE, "10 min over")
    rank.look()
    call = rank.count_call()
    assert (Call(1, {"save": "10 min over"}), "10 min over") == (call, call.reason)
    assert not rank.is_over


def test_save_and_stop_in_one_round() -> None:
    """What a rank wants when it answers the summons of another kind is agreed for the same call."""
    ranks = make_summons(2, one_store(), Clock())
    ranks[0].summon(Kind.SAVE, "10 min over")
    ranks[1].summon(Kind.STOP, "SIGTERM on rank 11")
    look_all(ranks)
    assert [[(1, {"save", "stop"})]] * 2 == [begin(rank, 3) for rank in ranks]


def test_a_stop_that_comes_after_the_answer() -> None:
    """It has the round after that of the save."""
    ranks = make_summons(2, one_store(), Clock())
    ranks[0].summon(Kind.SAVE, "10 min over")
    ranks[0].look()
    ranks[1].look()
    ranks[1].summon(Kind.STOP, "SIGTERM on rank 11")
    look_all(ranks)
    assert [[(1, {"save", "stop"})]] * 2 == [begin(rank, 3) for rank in ranks]


def test_what_is_asked_for_again() -> None:
    """A wish that is decided for a call to come is not decided twice; after that call it is a new one."""
    ranks = make_summons(2, one_store(), Clock())
    for _ in range(2):
        for rank in ranks:
            rank.summon(Kind.SAVE, "10 min over")
        look_all(ranks)
    assert [[(1, {"save"})]] * 2 == [begin(rank, 5) for rank in ranks]
    ranks[1].summon(Kind.SAVE, "10 min over")
    look_all(ranks)
    assert [[(6, {"save"})]] * 2 == [begin(rank, 5) for rank in ranks]


def test_a_frozen_rank_waits_for_the_decision() -> None:
    """It begins no call between its answer and the decision, and the call goes on by itself then."""
    ranks = make_summons(2, one_store(), Clock())
    ranks[1].summon(Kind.STOP, "SIGTERM on rank 11")
    ranks[1].look()
    calls: list[Call] = []
    thread = threading.Thread(target=lambda: calls.append(ranks[1].count_call()))
    thread.start()
    ranks[0].look()
    assert thread.is_alive()
    ranks[1].look()
    thread.join(10)
    assert [Call(1, {"stop": "SIGTERM on rank 11"})] == calls


# ------------------------------------------------------------------------------------------------------- ranks that are missing


@pytest.mark.parametrize("missing", [0, 2])
def test_a_rank_that_does_not_answer(missing: int) -> None:
    """All others learn who it is, by its number in the job, and so does the rank itself if it wakes up."""
    clock = Clock()
    ranks = make_summons(3, one_store(), clock)
    others = [rank for number, rank in enumerate(ranks) if number != missing]
    others[0].summon(Kind.STOP, "SIGTERM on rank 11")
    look_all(others)
    assert all(rank.failure is None for rank in others)
    clock.now_s += LATE_S
    look_all(others)
    expected = ("RankMissing", {10 + missing: "roll call: RankMissing: did not answer within 3 s"})
    assert [expected] * 2 == [failure(rank) for rank in others]
    ranks[missing].look()
    assert expected == failure(ranks[missing])


def test_a_rank_that_has_left_is_not_waited_for() -> None:
    """It is named at once."""
    ranks = make_summons(3, one_store(), Clock())
    ranks[2].leave()
    ranks[1].summon(Kind.STOP, "SIGTERM on rank 11")
    look_all(ranks[:2])
    assert [("RankMissing", {12: "roll call: RankMissing: has left the run"})] * 2 == [failure(rank) for rank in ranks[:2]]


def test_a_save_without_a_rank_is_none() -> None:
    """Nothing is saved, which is logged, and nothing is raised; the next wish has its own round."""
    clock = Clock()
    ranks = make_summons(2, one_store(), clock)
    ranks[0].summon(Kind.SAVE, "10 min over")
    ranks[0].look()
    clock.now_s += LATE_S
    look_all(ranks)
    assert [[]] * 2 == [begin(rank, 2) for rank in ranks]
    ranks[0].summon(Kind.SAVE, "10 min over")
    look_all(ranks)
    assert [[(3, {"save"})]] * 2 == [begin(rank, 2) for rank in ranks]


def test_a_lost_store_in_a_roll_call() -> None:
    """The rank that was about to agree raises that."""
    store = CountingStore()
    ranks = make_summons(2, lambda _: store, Clock())
    ranks[1].summon(Kind.STOP, "SIGTERM on rank 11")
    store.is_lost = True
    look_all(ranks)
    assert isinstance(ranks[1].failure, KeyValueStoreLost)
    with pytest.raises(KeyValueStoreLost, match="lost"):
        ranks[1].count_call()


def test_a_lost_store_in_peace() -> None:
    """A rank that wants nothing goes on, and fails once it does."""
    store = CountingStore()
    rank = make_summons(2, lambda _: store, Clock())[1]
    store.is_lost = True
    assert rank.look() is None
    assert [] == begin(rank, 3)
    rank.summon(Kind.STOP, "SIGTERM on rank 11")
    assert ("KeyValueStoreLost", {}) == failure(rank)


# ---------------------------------------------------------------------------------------------------------------- what it costs


def test_requests() -> None:
    """Calls ask the store nothing; a look in peace is one request; of many ranks each looks more rarely."""
    store = CountingStore()
    ranks = make_summons(4, lambda _: store, Clock())
    begin(ranks[2], 1000)
    assert 0 == store.num_requests
    pauses = [rank.look() for rank in ranks]
    assert ([0.25] * 4, 4) == (pauses, store.num_requests)
    many = Summons(Channel(Members(5, tuple(range(9000))), store, "c"), roll_call_s=3.0, poll_s=0.25)
    pause_s = many.look()
    assert pause_s is not None
    assert 5000 == round(9000 / pause_s)


def test_keys_do_not_pile_up() -> None:
    """After many rounds there are as many as after two."""
    store = MemoryKeyValueStore()
    ranks = make_summons(3, lambda _: store, Clock())
    counts = []
    for _ in range(10):
        ranks[0].summon(Kind.SAVE, "10 min over")
        look_all(ranks)
        assert [1] * 3 == [len(begin(rank, 2)) for rank in ranks]
        counts.append(len(store.keys()))
    assert {counts[1]} == set(counts[1:])


# ------------------------------------------------------------------------------------------------------------------- all orders


class Stage:
    """Ranks that look on threads of their own, each of which goes on to its next request when it is told to."""

    def __init__(self, size: int) -> None:
        self.clock = Clock()
        self._store = MemoryKeyValueStore()
        self._go = [threading.Semaphore(0) for _ in range(size)]
        self._has_gone = threading.Semaphore(0)
        self._is_over = False
        self.ranks = make_summons(size, lambda rank: _TurnStore(self._store, lambda: self._pass_on(rank)), self.clock)
        self._threads = [threading.Thread(target=self._run, args=(rank,), daemon=True) for rank in range(size)]

    @contextmanager
    def play(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        yield
        self._is_over = True
        for rank, thread in enumerate(self._threads):
            while thread.is_alive():
                self.step(rank)
                thread.join(0.0001)

    def step(self, rank: int) -> None:
        """Let a rank go on to its next request."""
        self._go[rank].release()
        assert self._has_gone.acquire(timeout=10)

    def _run(self, rank: int) -> None:
        self._go[rank].acquire()
        while not self._is_over:
            if self.ranks[rank].is_over:
                self._pass_on(rank)
            self.ranks[rank].look()
        for _ in range(1000):  # whoever still steps this one
            self._has_gone.release()

    def _pass_on(self, rank: int) -> None:
        self._has_gone.release()
        self._go[rank].acquire()


class _TurnStore(MemoryKeyValueStore):
    """The store as one rank sees it: each verb waits for the rank's turn."""

    def __init__(self, store: MemoryKeyValueStore, wait: Callable[[], None]) -> None:
        super().__init__()
        self._values, self._wait = store._values, wait

    def get(self, key: str) -> bytes | None:
        self._wait()
        return super().get(key)

    def get_many(self, keys: Sequence[str]) -> tuple[bytes | None, ...]:
        self._wait()
        return super().get_many(keys)

    def set(self, key: str, value: bytes) -> None:
        self._wait()
        super().set(key, value)

    def set_if_absent(self, key: str, value: bytes) -> bytes:
        self._wait()
        return super().set_if_absent(key, value)

    def delete(self, key: str) -> None:
        self._wait()
        super().delete(key)


Act = tuple[str, int]
ACTS = st.lists(st.tuples(st.sampled_from(["step"] * 6 + ["call", "call", "stop", "save"]), st.integers(0, 2)), max_size=120)


def act(stage: Stage, heard: list[list[tuple[int, set[str]]]], action: str, rank: int) -> None:
    """One move of one rank; a call that would wait is not made."""
    summons = stage.ranks[rank]
    if action == "step":
        stage.step(rank)
    elif action == "call" and not summons._is_frozen and summons.failure is None:
        heard[rank] += begin(summons, 1)
    elif action in ("stop", "save"):
        summons.summon(Kind(action), f"{action} on rank {rank}")
    elif action == "late":
        stage.clock.now_s += LATE_S / 4


def finish(stage: Stage, heard: list[list[tuple[int, set[str]]]]) -> None:
    """Let all ranks go on until nothing more can be decided, then begin more calls than any has begun."""
    for _ in range(60):
        for rank in range(len(stage.ranks)):
            act(stage, heard, "step", rank)
    last = max(rank._calls for rank in stage.ranks) + 2
    for number, rank in enumerate(stage.ranks):
        if rank.failure is None:
            heard[number] += begin(rank, last - rank._calls)


@settings(max_examples=150)
@given(ACTS)
def test_any_order(acts: list[Act]) -> None:
    """Whatever the order of requests and calls is, all ranks hear of the same calls, and what was wanted comes to all."""
    stage = Stage(3)
    heard: list[list[Any]] = [[], [], []]
    with stage.play():
        for action, rank in acts:
            act(stage, heard, action, rank)
        finish(stage, heard)
    assert [heard[0]] * 3 == heard
    wanted, agreed = {action for action, _ in acts} & {"stop", "save"}, set().union(*(kinds for _, kinds in heard[0]))
    assert ("stop" in wanted, wanted) == ("stop" in agreed, wanted | agreed)
    assert "stop" in wanted or wanted == agreed
    assert [None] * 3 == [rank.failure for rank in stage.ranks]


@settings(max_examples=150)
@given(
    st.lists(st.tuples(st.sampled_from(["step"] * 6 + ["call", "call", "stop", "save", "late"]), st.integers(0, 2)), max_size=120)
)
def test_any_order_with_late_ranks(acts: list[Act]) -> None:
    """If ranks may be given up, all hear of the same calls and of the same failure all the same."""
    stage = Stage(3)
    heard: list[list[Any]] = [[], [], []]
    with stage.play():
        for action, rank in acts:
            act(stage, heard, action, rank)
        finish(stage, heard)
    assert [heard[0]] * 3 == heard
    assert 1 == len({str(rank.failure) for rank in stage.ranks})
    assert isinstance(stage.ranks[0].failure, RankMissing | None)


# ------------------------------------------------------------------------------------------------------------------ real stores


def test_over_every_kind_of_store(connect: Connect) -> None:
    """Ranks that look on one thread and count on another stop at one call; a channel of another name hears nothing of it."""
    together = threading.Barrier(3, timeout=30)

    def run(group: Any) -> tuple[int, str]:
        other = Summons(group.open_channel("other"), roll_call_s=30, poll_s=0.002)
        summons = Summons(group.open_channel("one"), roll_call_s=30, poll_s=0.002)
        watcher = threading.Thread(target=watch, args=(summons,), daemon=True)
        watcher.start()
        while Kind.STOP not in (call := summons.count_call()).kinds:
            if call.number == 5 + group.rank and group.rank == 1:
                summons.summon(Kind.STOP, "SIGTERM on rank 1")
            together.wait()  # as in a collective
        watcher.join(10)
        other.look()
        assert not other.is_stop_known
        return call.number, call.reason

    first, *rest = run_group(make_groups(3, connect), run)
    assert [first] * 2 == rest
    assert "SIGTERM on rank 1" == first[1]


def test_a_channel_of_a_process_that_ends(tmp_path: Path) -> None:
    """Once the group has hung up, its channels ask nothing any more either."""
    (group,) = make_groups(1, lambda: FileKeyValueStore(tmp_path))
    store = group.open_channel("one").store
    assert store.get("nothing") is None
    group.hang_up(10)
    with pytest.raises(KeyValueStoreLost, match="the process ends"):
        store.get("nothing")


def watch(summons: Summons) -> None:
    """Look until there is nothing more to look for."""
    while (pause_s := summons.look()) is not None:
        threading.Event().wait(pause_s)
