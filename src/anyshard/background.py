"""Savers: the asynchronous saves of a group of ranks in this process, made by one thread in the order of the calls."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol, final

from anyshard.errors import EarlierSaveFailed, LimitExceeded, OperationFailed, StillPending, show_error
from anyshard.pending import Course, PendingSave, check_timeout
from anyshard.reports import SaveReport
from anyshard.threads import start_thread, yield_to_training

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_CRASHED_S = 30.0  # how long the end of the process waits after an uncaught exception
_HANG_UP_S = 1.0
_MAX_RECENT = 1024  # more than saves that can be under way
_LOGGED_S = 1.0  # how long the end of the process waits for the log of saves that are over
_HEARD_S = 10.0  # how long the coordinator's process stays for ranks that have not heard how its last save ended
_RUNS_AT_ONCE = 2  # that may have all their saves under way: or places with directories of their own would know no limit


class Task(Protocol):
    """One save, as the saver's thread makes it."""

    def run(self) -> SaveReport:
        """Make the save; raises what it fails with."""
        ...

    def close(self, failure: BaseException | None) -> None:
        """Give back what the save has borrowed: after `run`, or without it if that is never called. Again is nothing."""
        ...

    def find_unheard(self) -> tuple[int, ...]:
        """Ranks that may not know yet how it ended."""
        ...


@dataclass(eq=False, slots=True)
class Job:
    """A save that was called: the user's handle, the run that it belongs to, what makes it, and how long the end waits for it.

    Without a run (of a call that failed before it could say) it counts as one of each. A job is silent if what it fails with was
    raised by its call: no later call raises it.
    """

    pending: PendingSave
    course: Course
    run_path: str
    task: Task
    exit_timeout_s: float = 0.0
    is_silent: bool = False
    is_taken: bool = False  # by the thread that makes it
    number: int = 0  # in the order of the calls, the same on all ranks


@dataclass(frozen=True, slots=True)
class _Room:
    """How many jobs may be under way at once, of one run or (None) of all runs together."""

    run_path: str | None
    limit: int

    def counts(self, run_path: str) -> bool:
        """Whether a job of this run takes a place."""
        return self.run_path is None or not run_path or run_path == self.run_path

    def find_over(self, recent: Sequence[tuple[int, str]]) -> int:
        """The number of the last job that has to be over where there is a place left, 0 if there is none."""
        numbers = [number for number, run_path in recent if self.counts(run_path)]
        return numbers[-self.limit] if len(numbers) >= self.limit else 0


@final
class Saver:
    """Makes jobs one after the other, on a thread that lives while there are any. `is_loud`: log failures as errors.

    `hang_up` ends within so many seconds all talk with other ranks, for good. `tell` hears the report of each save that is
    committed, on the thread that has made it.
    """

    def __init__(
        self, *, is_loud: bool, hang_up: Callable[[float], None], tell: Callable[[SaveReport], None] = lambda _: None
    ) -> None:
        self._is_loud = is_loud
        self._hang_up = hang_up
        self._tell = tell
        self._jobs: deque[Job] = deque()  # those that are not over, the one that is being made first
        self._failed: deque[Job] = deque()  # whose failures nobody has been told of
        self._recent: deque[tuple[int, str]] = deque(maxlen=_MAX_RECENT)  # numbers and runs of the last jobs
        self._last: Task | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()

    @property
    def jobs(self) -> tuple[Job, ...]:
        """Those that are not over, in the order of the calls."""
        with self._lock:
            return tuple(self._jobs)

    @property
    def num_submitted(self) -> int:
        """How many jobs there were up to now."""
        return self._recent[-1][0] if self._recent else 0

    @property
    def is_idle(self) -> bool:
        """Whether no save is under way, and all failures were told."""
        with self._lock:
            return not self._jobs and not self._failed

    def check_outside(self, what: str) -> None:
        """Raise `OperationFailed` on the thread that makes the saves: `what` would wait for what it was called from."""
        if threading.current_thread() is self._thread and (jobs := self.jobs):
            raise OperationFailed(
                f"{what}: expected to be called outside of saves, found this thread in the asynchronous save to "
                f"{jobs[0].pending.url}, from within which it was called (by a sink). Do it on another thread",
                {},
            )

    def submit(self, job: Job) -> None:
        """Make this job after all that were submitted before; when the interpreter is ending and starts no more threads, now.

        A second time, after an interrupt of the first, it does what is still to be done. `LimitExceeded` if the system has no
        thread to give.
        """
        with self._lock:
            if not job.is_taken and job not in self._jobs:
                if not job.number:
                    job.number = self.num_submitted + 1
                    self._recent.append((job.number, job.run_path))
                job.pending.refuse_waits_by(self.check_outside)
                self._jobs.append(job)
            has_thread = self._thread is not None and self._thread.is_alive()  # else its start was interrupted
            if not self._jobs or has_thread or self._start(job):
                return
            self._thread = threading.current_thread()
        self._work()

    def _start(self, job: Job) -> bool:
        self._thread = threading.Thread(target=self._work_aside, name="anyshard-save", daemon=True)
        try:
            return start_thread(self._thread)
        except RuntimeError as error:
            self._thread = None
            self._jobs.remove(job)
            raise LimitExceeded(
                "expected to start a thread for an asynchronous save, found that the system starts none; raise the limit of "
                f"this process (ulimit -u, pids.max), or use anyshard.save ({error})"
            ) from error

    def await_room(self, run_path: str, *, limit: int, timeout_s: float) -> int:
        """Return once less than `limit` saves of a run are under way, and less than twice as many of all runs.

        The number of the last job that is therefore over on every rank which makes this call, whatever else is over here. All
        ranks find the same one: they make the same calls in the same order, each of which is one job, so their lists of jobs are
        alike; each rank makes them in that order, so of a list of which less than n are under way, the n-th from its end and
        all before it are over; and both waits are made by every rank that comes to this call.
        """
        deadline = time.monotonic() + timeout_s
        rooms = _Room(run_path, limit), _Room(None, _RUNS_AT_ONCE * limit)
        for room in rooms:
            while len(found := [job for job in self.jobs if room.counts(job.run_path)]) >= room.limit:
                self._await_end(found[0], deadline, timeout_s=timeout_s)
        recent = tuple(self._recent)
        return max(room.find_over(recent) for room in rooms)

    def await_idle(self, timeout_s: float) -> None:
        """Return once no save is under way, or after `timeout_s`; at once within a save."""
        deadline = time.monotonic() + timeout_s
        while (jobs := self.jobs) and threading.current_thread() is not self._thread:
            if not jobs[0].course.wait(None, max(0.0, deadline - time.monotonic())):
                return

    def await_heard(self, timeout_s: float = _HEARD_S) -> None:
        """Return once all ranks know how the last save ended, whose key-value store may end with this process."""
        deadline = time.monotonic() + timeout_s
        while self._last is not None and self._last.find_unheard() and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def await_logged(self) -> None:
        """Give the thread of saves that are all over the time to log how they ended."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread() and not self.jobs:
            thread.join(_LOGGED_S)

    def abandon(self) -> None:
        """Let the interpreter end while saves are under way: from now on their thread calls nothing that would not survive it."""
        if jobs := self.jobs:
            for job in jobs:
                job.is_silent = True
            self._hang_up(_HANG_UP_S)

    def pop_failure(self, last: int | None = None) -> BaseException | None:
        """The first failure that nobody was told of, of jobs up to number `last` (None: of all); further ones are notes of it."""
        with self._lock:
            failed = [job for job in self._failed if last is None or job.number <= last]
            self._failed = deque(job for job in self._failed if job not in failed)
        return _join([_find_failure(job) for job in failed if job.pending.take_failure()])

    def _await_end(self, job: Job, deadline: float, *, timeout_s: float) -> None:
        self.check_outside("the wait of async_save for an earlier save")
        if not job.course.wait(None, max(0.0, deadline - time.monotonic())):
            raise StillPending(
                f"{job.pending.url}: expected this earlier save to end within {timeout_s:g} s, found {job.pending.describe()}. "
                "At most max_in_flight saves of a run are under way at once, and twice as many of all: wait for it, or allow "
                "more time with timeout_s"
            )

    # The thread --------------------------------------------------------------------------------------------------------

    def _work_aside(self) -> None:
        yield_to_training()
        self._work()

    def _work(self) -> None:
        while (job := self._next()) is not None:
            report, failure = _make(job.task)
            with self._lock:  # before its end is told, so that who waits for that finds room
                self._jobs.popleft()
                self._last = job.task
                # Not what says that a failure was raised, or ranks would raise each other's for ever.
                if failure is not None and not job.is_silent and not isinstance(failure, EarlierSaveFailed):
                    self._failed.append(job)
                    job.pending.when_reported(partial(self._forget, job))
            if failure is not None:
                job.course.fail(failure)
            elif report is not None:
                job.course.finish(report)
            # Last, and not under the lock: a handler may be slow, or wait for a lock of its own that a waiter holds, or raise.
            with suppress(BaseException):
                self._log(job, report, failure)

    def _next(self) -> Job | None:
        with self._lock:
            if self._thread is not threading.current_thread():  # there is another one in its place
                return None
            if not self._jobs:
                self._thread = None
                return None
            self._jobs[0].is_taken = True
            return self._jobs[0]

    def _log(self, job: Job, report: SaveReport | None, failure: BaseException | None) -> None:
        if report is not None:
            self._tell(report)
        if failure is not None and not job.is_silent:
            level = logging.ERROR if self._is_loud else logging.INFO
            shown = show_error(failure)  # the error itself holds frames
            logger.log(level, "%s: the asynchronous save failed: %s", job.pending.url, shown)

    def _forget(self, job: Job) -> None:
        with self._lock:
            if job in self._failed:
                self._failed.remove(job)


def _make(task: Task) -> tuple[SaveReport | None, BaseException | None]:
    failure: BaseException | None = None
    report: SaveReport | None = None
    try:
        report = task.run()
    except BaseException as error:  # noqa: BLE001 - the border of the thread: raised by the user's next call or wait
        failure = error
    try:
        task.close(failure)
    except BaseException as error:  # noqa: BLE001 - as for run
        failure = failure or error
    return report, failure


def _find_failure(job: Job) -> BaseException:
    job.course.wait(None, None)  # it is noted a moment before it is told
    assert job.course.failure is not None
    return job.course.failure


def _join(failures: Sequence[BaseException]) -> BaseException | None:
    for other in failures[1:]:
        failures[0].add_note(f"a further save failed: {show_error(other)}")
    return failures[0] if failures else None


def finish_at_exit(savers: Sequence[Saver]) -> None:
    """Wait for all saves of this process up to their limits, for the interpreter ends; after an uncaught exception less.

    Failures that nobody was told of are logged.
    """
    began_s = time.monotonic()
    try:
        for job in (job for saver in savers for job in saver.jobs):
            _finish(job, began_s)
        for failure in (failure for saver in savers for failure in iter(saver.pop_failure, None)):
            shown = show_error(failure)
            logger.error("the process ends, and no call has raised what an asynchronous save failed with: %s", shown)
        for saver in savers:
            saver.await_heard()
            saver.await_logged()
    finally:
        for saver in savers:
            saver.abandon()


def _finish(job: Job, began_s: float) -> None:
    has_crashed = getattr(sys, "last_value", None) is not None
    limit_s = min(job.exit_timeout_s, _CRASHED_S) if has_crashed else job.exit_timeout_s
    if not job.course.wait(None, max(0.0, began_s + limit_s - time.monotonic())):
        logger.error(
            "%s: the process ends, and this save with it: expected its end within %g s, found %s. Unless other ranks complete "
            "it, it is not committed; anyshard.ops.clean removes what it has written. Wait for it with anyshard.wait_all(), or "
            "allow more time with exit_timeout_s",
            job.pending.url,
            limit_s,
            job.pending.describe(),
        )


def wait_all(savers: Sequence[Saver], timeout_s: float | None) -> None:
    """Return once no save of these savers is under way; raises the first failure that nobody was told of, or `StillPending`."""
    check_timeout(timeout_s)
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    for job in (job for saver in savers for job in saver.jobs):
        if not job.course.wait(None, None if deadline is None else max(0.0, deadline - time.monotonic())):
            raise StillPending(
                f"{job.pending.url}: expected all saves to end within {timeout_s:g} s, found {job.pending.describe()}; it goes on"
            )
    failures = [failure for saver in savers if (failure := saver.pop_failure()) is not None]
    if (failure := _join(failures)) is not None:
        raise failure
