"""The crew: the first error stops all, a stuck call is named, no wait lasts for ever."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from anyshard.engine.crew import Crew, Patience, StorageStuck

IMPATIENT = Patience(timeout_s=0.3, report_s=0.1)


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """An event to block threads on; opened at the end so that none stays behind."""
    event = threading.Event()
    yield event
    event.set()


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
    threads = [thread for thread in threading.enumerate() if thread.name == "test-0"]
    gate.set()
    for thread in threads:
        thread.join(timeout=10)
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
