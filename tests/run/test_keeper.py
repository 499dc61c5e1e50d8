"""The keeper and the steps that are busy: who waits for whom."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest

from anyshard.errors import StillPending
from anyshard.run import keeper as keeper_room
from anyshard.run.busy import BusySteps
from anyshard.run.catalog import Catalog
from anyshard.run.keeper import Keeper
from anyshard.run.policies import KeepLast
from anyshard.run.retention import prune
from anyshard.storage.memory import MemoryStore
from anyshard.storage.wrappers import FaultStore, Rule, Verb, do_before
from tests.run.made_steps import RUN, committed, write_run, write_step

LONG_S = 60.0


class Save:
    """A pending save that ends when it is told to."""

    def __init__(self, *, is_committed: bool = True) -> None:
        self.is_committed = is_committed
        self.over = threading.Event()
        self.was_waited_for = threading.Semaphore(0)  # in vain

    def wait_ended(self, timeout_s: float | None = None) -> bool:
        is_over = self.over.wait(timeout_s)
        if not is_over:
            self.was_waited_for.release()
        return is_over


class Passes:
    """Passes that begin by ringing and end when they are let."""

    def __init__(self) -> None:
        self.num = 0
        self.began = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)

    def __call__(self) -> None:
        self.num += 1
        self.began.release()
        assert self.may_end.acquire(timeout=LONG_S)


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def keeper_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "anyshard-keeper"]


def test_a_pass_is_made_on_a_thread_that_goes_away() -> None:
    """A request is served beside the caller, and `close` waits for it."""
    served: list[str] = []
    keeper = Keeper(lambda: served.append(threading.current_thread().name))
    assert [] == keeper_threads()
    keeper.request()
    assert (True, ["anyshard-keeper"]) == (keeper.close(LONG_S), served)


def test_requests_that_come_during_a_pass_are_met_by_one_more() -> None:
    """However many there are."""
    passes = Passes()
    keeper = Keeper(passes)
    keeper.request()
    assert passes.began.acquire(timeout=LONG_S)
    for _ in range(5):
        keeper.request()
    passes.may_end.release(2)
    assert (True, 2) == (keeper.close(LONG_S), passes.num)


def test_a_pass_waits_for_its_save_and_not_for_later_ones() -> None:
    """Or a job that always has a save under way would never be pruned."""
    passes, first, second = Passes(), Save(), Save()
    keeper = Keeper(passes)
    keeper.request(first)
    keeper.request(second)
    assert first.was_waited_for.acquire(timeout=LONG_S)
    assert first.was_waited_for.acquire(timeout=LONG_S)
    assert 0 == passes.num
    first.over.set()
    assert passes.began.acquire(timeout=LONG_S)
    second.over.set()
    passes.may_end.release(2)
    assert (True, 2) == (keeper.close(LONG_S), passes.num)


def test_saves_that_are_over_share_a_pass() -> None:
    """What is met by a pass that has not begun needs no other."""
    passes, first, second = Passes(), Save(), Save()
    keeper = Keeper(passes)
    keeper.request(first)
    keeper.request(second)
    second.over.set()
    first.over.set()
    passes.may_end.release(2)
    assert (True, 1) == (keeper.close(LONG_S), passes.num)


def test_a_save_that_has_failed_asks_for_no_pass() -> None:
    """Nothing has taken the place of what is there; one that is committed asks as ever."""
    passes, failed, good = Passes(), Save(is_committed=False), Save()
    keeper = Keeper(passes)
    keeper.request(failed)
    failed.over.set()
    assert (True, 0) == (keeper.close(LONG_S), passes.num)
    again = Keeper(passes)
    again.request(failed)
    again.request(good)
    good.over.set()
    passes.may_end.release(2)
    assert (True, 1) == (again.close(LONG_S), passes.num)


def test_failures_are_logged_and_the_keeper_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """What a pass raises reaches nobody, and the next request is served."""
    outcomes = iter([OSError("the storage is gone"), None])

    def work() -> None:
        outcome = next(outcomes)
        if outcome is not None:
            raise outcome

    keeper = Keeper(work)
    with caplog.at_level(logging.ERROR):
        keeper.request()
        assert keeper.close(LONG_S)
    assert "the storage is gone" in caplog.text
    other = Keeper(work)
    other.request()
    assert (True, None) == (other.close(LONG_S), next(outcomes, None))


def test_close_does_not_wait_for_ever() -> None:
    """A pass that hangs is left behind, and nothing is begun after it."""
    passes = Passes()
    keeper = Keeper(passes)
    keeper.request()
    assert passes.began.acquire(timeout=LONG_S)
    keeper.request()
    assert not keeper.close(0.05)
    keeper.request()
    (thread,) = keeper_threads()
    passes.may_end.release(3)
    thread.join(timeout=LONG_S)
    assert 1 == passes.num


def test_close_gives_up_a_save_that_does_not_end() -> None:
    """No pass is made for it."""
    passes = Passes()
    keeper = Keeper(passes)
    keeper.request(Save())
    assert (False, 0) == (keeper.close(0.05), passes.num)
    for thread in keeper_threads():
        thread.join(timeout=LONG_S)
    assert [] == keeper_threads()


def test_without_a_thread_nothing_is_pruned(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A system without threads costs a warning, an interpreter that is ending not even that; a later request tries again."""

    def refuse(thread: threading.Thread) -> bool:
        raise RuntimeError("can't start new thread")

    passes = Passes()
    keeper = Keeper(passes)
    with monkeypatch.context() as patched:
        patched.setattr(keeper_room, "start_thread", refuse)
        keeper.request()
        patched.setattr(keeper_room, "start_thread", lambda thread: False)
        keeper.request()
    assert (0, 1) == (passes.num, caplog.text.count("no thread could be started for retention"))
    passes.may_end.release()
    keeper.request()
    assert (True, 1) == (keeper.close(LONG_S), passes.num)


# Busy steps ------------------------------------------------------------------------------------------------------------


def test_busy_steps_are_a_set_of_claims() -> None:
    """A step is busy until each of its claims was released."""
    busy = BusySteps()
    for step in (3, 1, 3):
        busy.claim(step, LONG_S)
    busy.release(3)
    assert ({1, 3}, 2, True) == (set(busy), len(busy), 3 in busy)
    busy.release(3)
    assert ({1}, False) == (set(busy), 3 in busy)


def test_a_save_waits_for_retention_at_its_own_step_only() -> None:
    """Both would take the next generation of the step, and the save would lose."""
    busy, claimed = BusySteps(), threading.Event()
    with busy.holding(7) as is_free:
        busy.claim(8, 0)
        with pytest.raises(StillPending, match="step 7: expected retention to have deleted or thinned"):
            busy.claim(7, 0.01)
        waiter = in_thread(lambda: (busy.claim(7, LONG_S), claimed.set()))
        assert (True, {8}, False) == (is_free, set(busy), claimed.is_set())
    waiter.join(timeout=LONG_S)
    assert (True, {7, 8}) == (claimed.is_set(), set(busy))


def test_retention_leaves_a_claimed_step() -> None:
    """And holds nothing then."""
    busy = BusySteps()
    busy.claim(7, 0)
    with busy.holding(7) as is_free:
        busy.claim(7, 0)
    assert not is_free


def test_b136_a_slow_delete_delays_no_save() -> None:
    """While a deletion hangs other steps are saved and committed; the one that is being deleted comes after it (B136)."""
    store, busy, gate, reached = MemoryStore(), BusySteps(), threading.Event(), threading.Event()
    write_run(store, [1, 2, 3])

    def hang() -> None:
        reached.set()
        assert gate.wait(LONG_S)

    slow = FaultStore(store, [Rule(Verb.DELETE, "step_1/*", do_before(hang))])
    keeper = Keeper(lambda: prune(Catalog(slow), KeepLast(1), run_id=RUN, busy=busy))
    keeper.request()
    assert reached.wait(LONG_S)
    busy.claim(4, 0)
    write_step(store, 4)
    busy.release(4)
    keeper.request()
    again = in_thread(lambda: busy.claim(1, LONG_S))
    assert [2, 3, 4] == committed(store)
    gate.set()
    again.join(timeout=LONG_S)
    assert (True, [4]) == (keeper.close(LONG_S), committed(store))
