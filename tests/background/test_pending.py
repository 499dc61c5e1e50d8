"""Pending saves: moments and waits, how many are under way at once, in which order they are committed."""

from __future__ import annotations

import errno
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

import pytest
import torch

import anyshard
from anyshard.storage.memory import MemoryStore
from anyshard.storage.wrappers import FaultStore, Rule, Verb, fail
from tests.background import scenes
from tests.background.scenes import SOON_S, contents, gated, is_there, make_small, saved_now

DENIED = anyshard.StorageDenied("may not", file="data/model", errno=errno.EACCES)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield from scenes.finish_all()


def test_moments_come_in_order() -> None:
    """Staged when the call returns, durable before the record is there, committed when a reader finds it."""
    blobs = gated("memory:a/step_1", Verb.FINISH)
    both = scenes.Gated(blobs.store, Verb.CREATE, "manifest*")
    pending = anyshard.async_save(both.store, make_small("a"))
    pending.staged(SOON_S)
    blobs.await_arrival()
    with pytest.raises(anyshard.StillPending, match="to be durable within 0.02 s, found rank 0 in phase write"):
        pending.durable(0.02)
    blobs.gate.set()
    pending.durable(SOON_S)
    both.await_arrival()
    with pytest.raises(anyshard.StillPending, match="to be committed within 0.02 s, found rank 0 in phase publish"):
        pending.committed(0.02)
    assert (False, False) == (pending.is_done, is_there(blobs.place))
    both.gate.set()
    report = pending.committed(SOON_S)
    assert (True, True) == (pending.is_done, is_there(blobs.place))
    assert report is pending.result(0) is pending.committed()


def test_many_threads_wait_for_one_save() -> None:
    """Any number of threads may wait for any moment, each gets the same answer."""
    place = gated("memory:a/step_1")
    pending = anyshard.async_save(place.store, make_small("a"))
    with ThreadPoolExecutor(12) as threads:
        waits = [threads.submit(pending.committed, SOON_S) for _ in range(8)]
        others = [threads.submit(pending.durable, SOON_S) for _ in range(4)]
        place.await_arrival()
        place.gate.set()
        reports = {id(wait.result(SOON_S)) for wait in waits}
        assert [None] * 4 == [other.result(SOON_S) for other in others]
    assert {id(pending.result())} == reports


def test_a_signal_handler_asks_and_waits() -> None:
    """A handler that interrupts a wait may ask for the status and wait for the same save."""
    place, seen = gated("memory:a/step_1"), []

    def handle(number: int, frame: FrameType | None) -> None:
        seen.append(pending.status()[0].phase)
        place.gate.set()
        seen.append(pending.committed(SOON_S).step)

    before = signal.signal(signal.SIGUSR2, handle)
    try:
        pending = anyshard.async_save(place.store, make_small("a"))
        place.await_arrival()
        threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR2)).start()
        assert 1 == pending.committed(SOON_S).step
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert ["write", 1] == seen


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_so_many_saves_of_a_run_are_under_way(limit: int) -> None:
    """One more call waits until the first of them has ended; all are committed in the order of the calls."""
    options = anyshard.SaveOptions(max_in_flight=limit)
    places = [gated(f"memory:a/step_{number}") for number in range(limit + 1)]
    begun: list[anyshard.PendingSave] = []
    states = [make_small(str(number)) for number in range(limit + 1)]

    def call() -> None:
        begun.extend(
            anyshard.async_save(place.store, state, options=options) for place, state in zip(places, states, strict=True)
        )

    calling = threading.Thread(target=call)
    calling.start()
    places[0].await_arrival()
    calling.join(0.1)
    assert calling.is_alive()
    with pytest.raises(anyshard.StillPending, match=r"memory:a/step_0: expected all saves to end within 0\.01 s"):
        anyshard.wait_all(0.01)
    for number, place in enumerate(places):
        place.await_arrival()
        assert [True] * number + [False] * (limit + 1 - number) == [is_there(other.place) for other in places]
        place.gate.set()
    calling.join(SOON_S)
    anyshard.wait_all(SOON_S)
    assert [saved_now(state) for state in states] == [contents(place.place) for place in places]


def test_a_call_gives_up_on_room_in_time() -> None:
    """A further call of the same run raises `StillPending` after its timeout, says what it waits for, and saves nothing."""
    place, other = gated("memory:a/step_1"), MemoryStore(url="memory:a/step_2")
    pending = anyshard.async_save(place.store, make_small("a"))
    place.await_arrival()
    with pytest.raises(anyshard.StillPending, match=r"memory:a/step_1: expected this earlier save to end within 0\.1 s.*write"):
        anyshard.async_save(other, make_small("b"), options=anyshard.SaveOptions(timeout_s=0.1))
    place.gate.set()
    pending.committed(SOON_S)
    assert {} == other.snapshot()
    anyshard.async_save(other, make_small("b")).committed(SOON_S)
    assert contents(other) == saved_now(make_small("b"))


def test_saves_of_two_runs_do_not_count_together() -> None:
    """The bound is one of a run, the directory above the place: a save of another run is begun at once, and comes after."""
    places = [gated("memory:a/step_1"), gated("memory:b/step_1")]
    anyshard.save(MemoryStore(url="memory:c/step_1"), make_small("c"))  # leaves the plan
    pendings = [anyshard.async_save(place.store, make_small("x")) for place in places]
    places[0].await_arrival()
    assert [False, False] == [pending.is_done for pending in pendings]
    for place in places:
        place.gate.set()
    anyshard.wait_all(SOON_S)
    assert [True, True] == [is_there(place.place) for place in places]


def test_blocking_saves_and_loads_come_after_what_is_under_way(tmp_path: Path) -> None:
    """A load of what is just being saved waits for it, and so does a blocking save to the same place."""
    place, live = gated("memory:a/step_1"), make_small("blank")
    pending = anyshard.async_save(place.store, make_small("a"))
    place.await_arrival()
    threading.Timer(0.05, place.gate.set).start()
    anyshard.load(place.place, live)
    assert (True, "a") == (pending.is_done, live["seed"])
    second = scenes.Gated(place.place)
    pending = anyshard.async_save(second.store, make_small("b"), overwrite=True)
    second.await_arrival()
    threading.Timer(0.05, second.gate.set).start()
    anyshard.save(place.place, make_small("c"), overwrite=True)
    assert (True, 2) == (pending.is_done, pending.result().generation)
    assert contents(place.place) == saved_now(make_small("c"))


def test_a_load_waits_no_longer_than_its_timeout() -> None:
    """A load of another place behind a save that hangs goes on after `timeout_s`."""
    other, place, live = MemoryStore(url="memory:a/step_0"), gated("memory:a/step_1"), make_small("blank")
    anyshard.save(other, make_small("old"))
    pending = anyshard.async_save(place.store, make_small("a"))
    place.await_arrival()
    anyshard.load(other, live, options=anyshard.LoadOptions(timeout_s=0.1))
    assert (False, "old") == (pending.is_done, live["seed"])
    place.gate.set()
    pending.committed(SOON_S)


def test_saves_from_many_threads_are_all_committed() -> None:
    """Calls from several threads of one process come one after the other; each has its own state."""
    stores = [MemoryStore(url=f"memory:{number}/step_1") for number in range(6)]
    with ThreadPoolExecutor(6) as threads:
        calls = [threads.submit(anyshard.async_save, store, make_small(str(i))) for i, store in enumerate(stores)]
        assert [1] * 6 == [call.result(SOON_S).committed(SOON_S).step for call in calls]
    assert [saved_now(make_small(str(i))) for i in range(6)] == list(map(contents, stores))


class Nested:
    """A stateful that saves while it is saved."""

    def state_dict(self) -> dict[str, object]:
        anyshard.async_save(MemoryStore(url="memory:a/step_9"), make_small("x"))
        return {}

    def load_state_dict(self, state: dict[str, object]) -> None:
        raise NotImplementedError


def test_a_save_within_the_call_of_another_one() -> None:
    """An async_save from within a state_dict of one is refused with the way out, and both of these ends are clean."""
    with pytest.raises(anyshard.OperationFailed, match="found this thread in the call of async_save to memory:a/step_1"):
        anyshard.async_save(MemoryStore(url="memory:a/step_1"), {"nested": Nested()})
    store = MemoryStore(url="memory:a/step_1")
    anyshard.async_save(store, {"w": torch.ones(3)}).committed(SOON_S)
    assert is_there(store)


def test_an_argument_that_cannot_be() -> None:
    """Options of another verb are refused by the call itself, and no later call raises that again."""
    with pytest.raises(anyshard.InvalidOption, match="options: expected SaveOptions, found LoadOptions"):
        anyshard.async_save("memory:", {}, options=anyshard.LoadOptions())  # type: ignore[arg-type]
    with pytest.raises(anyshard.InvalidPath):
        anyshard.async_save("gopher://x/y", make_small("a"))
    store = MemoryStore(url="memory:a/step_1")
    assert 1 == anyshard.async_save(store, make_small("a")).committed(SOON_S).step


@pytest.mark.parametrize("verb", ["wait_all", "committed", "async_save"])
def test_a_wait_of_a_save_for_itself_is_refused(verb: str) -> None:
    """A sink, which is called by the thread that saves, gets the error of nested calls at once; the save is whole."""
    begun, errors, store = list[anyshard.PendingSave](), list[str](), MemoryStore(url="memory:a/step_1")
    other, options = MemoryStore(url="memory:a/step_2"), anyshard.SaveOptions(timeout_s=SOON_S)
    waits = {
        "wait_all": lambda: anyshard.wait_all(SOON_S),
        "committed": lambda: begun[0].committed(SOON_S),
        "async_save": lambda: anyshard.async_save(other, make_small("b"), options=options),
    }

    class Waiting:
        def emit(self, event: anyshard.Event) -> None:
            if event.name == "save.publish.begin":
                assert has_begun.wait(SOON_S)
                try:
                    waits[verb]()
                except anyshard.OperationFailed as error:
                    errors.append(str(error))

    has_begun = threading.Event()
    anyshard.save(MemoryStore(url="memory:a/step_0"), make_small("0"))  # leaves the plan
    begun.append(anyshard.async_save(store, make_small("a"), sinks=[Waiting()]))
    has_begun.set()
    begun[0].committed(SOON_S)
    assert contents(store) == saved_now(make_small("a"))
    assert [True] == ["in the asynchronous save to memory:a/step_1, from within which" in error for error in errors]


@pytest.mark.parametrize("limit", [1, 3])
def test_a_failure_of_a_rank_alone_is_raised_by_the_next_call(limit: int) -> None:
    """However many may be under way, and wherever they go."""
    options = anyshard.SaveOptions(max_in_flight=limit)
    anyshard.save(MemoryStore(url="memory:a/0/step"), make_small("0"))
    failing = FaultStore(MemoryStore(url="memory:a/1/step"), [Rule(Verb.FINISH, "*", fail(DENIED))])
    anyshard.async_save(failing, make_small("a"), options=options)
    scenes.background().saver.await_idle(SOON_S)
    with pytest.raises(anyshard.StorageDenied):
        anyshard.async_save(MemoryStore(url="memory:a/2/step"), make_small("b"), options=options)
    anyshard.async_save(MemoryStore(url="memory:a/3/step"), make_small("b"), options=options).committed(SOON_S)


def test_saves_in_directories_of_their_own_have_a_bound_too() -> None:
    """Twice as many as of one run: the next call waits until the first of them has ended."""
    places = [gated(f"memory:{number}/step") for number in range(3)]
    anyshard.save(MemoryStore(url="memory:c/step_1"), make_small("c"))  # leaves the plan
    for place in places[:2]:
        anyshard.async_save(place.store, make_small("x"))
    with pytest.raises(anyshard.StillPending, match="memory:0/step: expected this earlier save to end"):
        anyshard.async_save(places[2].store, make_small("x"), options=anyshard.SaveOptions(timeout_s=0.1))
    for place in places:
        place.gate.set()
    anyshard.wait_all(SOON_S)
    assert [True, True, False] == [is_there(place.place) for place in places]
