"""The crew: the first error stops all, a stuck call is named, no wait lasts for ever."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress

import pytest

from anyshard.engine.crew import Crew, Patience, StorageStuck
from anyshard.errors import LimitExceeded, StorageUnavailable

from .scene import CtrlC, join_threads

IMPATIENT = Patience(timeout_s=0.3, report_s=0.1)


def test_all_tasks_are_done_when_the_context_is_left() -> None:
    """Leaving the crew waits for every task."""
    done: list[int] = []
    with Crew(3, name="test", patience=Patience()) as crew:
        for i in range(100):
            crew.submit(lambda i=i: done.append(i))
    assert list(range(100)) == sorted(done)
    assert not crew.has_stragglers


def test_first_error_is_raised_and_later_tasks_are_skipped() -> None:
    """With one thread nothing that was queued behind the failing task runs."""
    done: list[int] = []

    def fail() -> None:
        raise OSError("disk on fire")

    with pytest.raises(OSError, match="disk on fire"), Crew(1, name="test", patience=Patience()) as crew:
        crew.submit(fail)
        crew.submit(lambda: done.append(1))
    assert [] == done


def test_error_of_the_owner_stops_the_crew() -> None:
    """An error in the body is raised as it is, once the threads have come to rest."""
    before = threading.active_count()
    with pytest.raises(KeyError), Crew(2, name="test", patience=Patience()):
        raise KeyError("mine")
    assert before == threading.active_count()


def test_owner_learns_of_a_failure_while_it_waits() -> None:
    """A wait for something that never comes ends with the error of the thread that should have brought it."""

    def fail() -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"), Crew(1, name="test", patience=Patience()) as crew:
        crew.submit(fail)
        crew.wait_for(lambda timeout_s: None)


def test_nothing_starts_after_the_wait_was_given_up(gate: threading.Event) -> None:
    """When a stuck thread comes back at last, it finds no more work."""
    done: list[int] = []
    with pytest.raises(StorageStuck), Crew(1, name="test", patience=IMPATIENT) as crew:
        crew.submit(gate.wait)
        crew.submit(lambda: done.append(1))
    gate.set()
    join_threads("test-")
    assert [] == done
    assert not crew.has_stragglers


def test_stuck_call_is_logged_then_raised_with_its_file(gate: threading.Event, caplog: pytest.LogCaptureFixture) -> None:
    """A call that does not come back is logged at intervals and ends the wait with its verb, file and position (B021)."""
    caplog.set_level(logging.WARNING)

    def hang() -> None:
        with crew.call("read", file="data/model/0.0.bin", position=4096):
            gate.wait()

    with pytest.raises(StorageStuck, match=r"read data/model/0\.0\.bin at byte 4096") as raised:  # noqa: SIM117 - the crew must exist
        with Crew(1, name="test", patience=IMPATIENT) as crew:
            crew.submit(hang)
    assert "data/model/0.0.bin" == raised.value.file
    assert crew.has_stragglers
    assert any("no progress" in message and "data/model/0.0.bin" in message for message in caplog.messages)


def test_threads_come_with_tasks_and_go_with_them() -> None:
    """However many threads are allowed, there are never more than tasks, and none outlives the last task."""
    before, met = threading.active_count(), threading.Barrier(3)
    with Crew(1_000_000, name="test", patience=Patience()) as crew:
        for _ in range(3):
            crew.submit(lambda: met.wait(timeout=30))
        assert threading.active_count() <= before + 3
    assert before == threading.active_count()


def limit_threads(monkeypatch: pytest.MonkeyPatch, num_threads: int) -> None:
    """Let the system start `num_threads` further threads of a crew, and no more."""
    start, left = threading.Thread.start, iter(range(num_threads))

    def start_or_fail(thread: threading.Thread) -> None:
        if thread.name.startswith("test-") and next(left, None) is None:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)


def test_the_threads_that_could_be_started_do_all_tasks(monkeypatch: pytest.MonkeyPatch, gate: threading.Event) -> None:
    """A system that starts one thread of eight makes it slower, not fail."""
    limit_threads(monkeypatch, 1)
    done: list[int] = []
    with Crew(8, name="test", patience=Patience()) as crew:
        crew.submit(lambda: done.append(int(gate.wait(timeout=30))))
        for i in range(2, 20):
            crew.submit(lambda i=i: done.append(i))
        gate.set()
    assert list(range(1, 20)) == done


def test_no_thread_at_all_is_an_error_that_names_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nothing can be done, and what was shared is still put away."""
    limit_threads(monkeypatch, 0)
    put_away: list[int] = []
    crew = Crew(8, name="test", patience=Patience(), at_rest=lambda: put_away.append(1))
    with pytest.raises(LimitExceeded, match="threads=8"), crew:
        crew.submit(lambda: None)
    assert ([1], False) == (put_away, crew.has_stragglers)


def test_interrupt_is_raised_when_running_tasks_have_ended(ctrl_c: CtrlC) -> None:
    """Ctrl-C while the owner waits stops what has not begun, and leaves no thread that still does something."""
    done: list[str] = []

    def run() -> None:
        ctrl_c.press()
        done.append("first")

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt), Crew(1, name="test", patience=Patience()) as crew:
        crew.submit(run)
        crew.submit(lambda: done.append("second"))
    assert (["first"], False, before) == (done, crew.has_stragglers, threading.active_count())


def test_second_interrupt_ends_the_wait(ctrl_c: CtrlC, gate: threading.Event) -> None:
    """Whoever presses Ctrl-C again does not want to wait for a storage that hangs."""

    def run() -> None:
        ctrl_c.press()
        ctrl_c.press()
        gate.wait()

    with pytest.raises(KeyboardInterrupt), Crew(1, name="test", patience=Patience()) as crew:
        crew.submit(run)
    assert crew.has_stragglers


def test_interrupt_in_a_hanging_storage_is_raised_in_time(ctrl_c: CtrlC, gate: threading.Event) -> None:
    """The wait for running tasks ends with the patience, as the interrupt that it was."""

    def run() -> None:
        ctrl_c.press()
        gate.wait()

    with pytest.raises(KeyboardInterrupt), Crew(1, name="test", patience=IMPATIENT) as crew:
        crew.submit(run)
    assert crew.has_stragglers


def test_last_straggler_puts_away(gate: threading.Event) -> None:
    """What tasks share is put away once, when the last of them is over, also long after the owner has left."""
    events: list[str] = []
    crew = Crew(2, name="test", patience=IMPATIENT, at_rest=lambda: events.append("put away"))
    with pytest.raises(StorageStuck), crew:
        for _ in range(2):
            crew.submit(lambda: events.append("back") if gate.wait() else None)
    assert [] == events
    gate.set()
    join_threads("test-")
    assert ["back", "back", "put away"] == events


def test_at_rest_runs_on_a_thread_of_the_crew_before_the_owner_leaves() -> None:
    """What is put away may call a storage that hangs, so it is not done by the owner."""
    names: list[str] = []
    with Crew(2, name="test", patience=Patience(), at_rest=lambda: names.append(threading.current_thread().name)):
        pass
    assert ["test-0"] == names


def test_calls_that_fail_are_no_progress() -> None:
    """A store that answers every call with an error does not keep the owner waiting: only what succeeds does."""
    is_over = threading.Event()

    def fail_again_and_again() -> None:
        while not is_over.wait(0.01):
            with suppress(StorageUnavailable), crew.call("write", file="a"):
                raise StorageUnavailable("busy", file="a")

    crew = Crew(1, name="test", patience=IMPATIENT)
    try:
        with pytest.raises(StorageStuck), crew:
            crew.submit(fail_again_and_again)
            crew.finish(lambda: None)
    finally:
        is_over.set()
