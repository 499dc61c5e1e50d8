"""What is logged of asynchronous saves, and that no handler can stop them: not by an error, not by being slow."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Never

import pytest
import torch

import anyshard
from anyshard.background import Job, Saver
from anyshard.pending import Course, PendingSave
from anyshard.reports import SaveReport
from anyshard.storage.memory import MemoryStore
from anyshard.storage.wrappers import FaultStore, Rule, Verb, fail
from tests.background import scenes
from tests.background.scenes import SOON_S, contents, make_small, saved_now

DENIED = anyshard.StorageDenied("may not", file="data/model", errno=errno.EACCES)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield from scenes.finish_all()


class Handler(logging.Handler):
    """A handler that does something with each record."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__(logging.WARNING)
        self.act = act

    def emit(self, record: logging.LogRecord) -> None:
        self.act()


@contextmanager
def handling(act: Callable[[], object]) -> Iterator[None]:
    handler, logger = Handler(act), logging.getLogger("anyshard")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def raise_it(error: type[BaseException]) -> Never:
    raise error("handler says no")


def begin_broken(url: str) -> anyshard.PendingSave:
    return anyshard.async_save(FaultStore(MemoryStore(url=url), [Rule(Verb.FINISH, "*", fail(DENIED))]), make_small("a"))


def shared() -> scenes.State:
    """A state that a save warns of: two tensors share memory."""
    base = torch.zeros(10)
    return {"extra": {"a": base[:6], "b": base[4:]}}


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_handler_that_raises(error: type[BaseException]) -> None:
    """The failed save ends with its own error, and the next one is made, as is one that a warning is logged of."""
    store = MemoryStore(url="memory:a/step_2")
    with handling(lambda: raise_it(error)):
        with pytest.raises(anyshard.StorageDenied):
            begin_broken("memory:a/step_1").committed(SOON_S)
        anyshard.async_save(MemoryStore(url="memory:a/step_3"), shared()).committed(SOON_S)
        anyshard.async_save(store, make_small("b")).committed(SOON_S)
    assert contents(store) == saved_now(make_small("b"))


def test_a_handler_that_hangs() -> None:
    """Waits and questions end while the saver's thread is in it: it holds no lock and has told the end before."""
    arrived, gate, store = threading.Event(), threading.Event(), MemoryStore(url="memory:a/step_2")

    def hang() -> None:
        arrived.set()
        gate.wait(SOON_S)

    anyshard.save(MemoryStore(url="memory:a/step_0"), make_small("0"))  # leaves the plan, which a call would wait for
    with handling(hang):
        failed = begin_broken("memory:a/step_1")
        assert arrived.wait(SOON_S)
        with pytest.raises(anyshard.StorageDenied):
            failed.committed(0)
        anyshard.wait_all(0)
        pending = anyshard.async_save(store, make_small("b"), options=anyshard.SaveOptions(max_in_flight=2))
        gate.set()
        pending.committed(SOON_S)
    assert contents(store) == saved_now(make_small("b"))


def test_warnings_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """What a report warns of is logged once, as of a blocking save, with the place."""
    for step in (1, 2):
        report = anyshard.async_save(MemoryStore(url=f"memory:a/step_{step}"), shared()).committed(SOON_S)
        scenes.join_threads()
        assert 1 == len(report.warnings)
    (record,) = [record for record in caplog.records if record.name == "anyshard.checkpointer"]
    assert ("WARNING", f"memory:a/step_1: {report.warnings[0]}") == (record.levelname, record.message)


# ------------------------------------------------------------------------------------------------------ the saver by itself


class Textless(Exception):
    """An error of a user's class that cannot say what it is."""

    def __str__(self) -> str:
        raise ValueError("no text")


class Failing:
    """A task that fails."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def run(self) -> SaveReport:
        raise self._error

    def close(self, failure: BaseException | None) -> None:
        pass

    def find_unheard(self) -> tuple[int, ...]:
        return ()


def make_job(error: BaseException) -> Job:
    course = Course()
    return Job(PendingSave("memory:a/step_1", None, _course=course), course, "memory:a", Failing(error))


def make_saver() -> Saver:
    return Saver(is_loud=True, hang_up=lambda _: None)


def test_an_error_without_a_text(caplog: pytest.LogCaptureFixture) -> None:
    """It is raised as it is, by a wait or as the note of another one, and logged by its class."""
    saver, jobs, first = make_saver(), [make_job(Textless()), make_job(Textless())], make_job(OSError("first"))
    for job in (first, *jobs):
        saver.submit(job)
    assert jobs[1].course.wait(None, SOON_S)
    with pytest.raises(Textless):
        jobs[1].pending.committed(SOON_S)
    failure = saver.pop_failure()
    assert (OSError, ["a further save failed: Textless (its text cannot be had: ValueError)"]) == (
        type(failure),
        getattr(failure, "__notes__", []),
    )
    scenes.join_threads()
    assert 2 == sum("failed: Textless" in message for message in caplog.messages)


def test_a_thread_that_is_dead() -> None:
    """A saver whose thread has ended for whatever reason, without a word, starts another one for the next save."""
    saver, job, dead = make_saver(), make_job(OSError("gone")), threading.Thread(target=lambda: None)
    dead.start()
    dead.join(SOON_S)
    saver._thread = dead
    saver.submit(job)
    assert job.course.wait(None, SOON_S)
    saver.pop_failure()
