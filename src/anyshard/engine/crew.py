"""A crew: the threads of one operation. The first error stops them all, and no wait lasts for ever.

Tasks are few and long (a block each), so threads come and go with them: one is started for a task while there are fewer than
allowed, and ends when it finds no further task. Nothing has to tell an idle thread to go, so none is ever left waiting. Threads
are daemons: a call that never comes back from a broken storage must not keep the interpreter from exiting. Once that exits it
may start no more threads: then the owner runs the tasks itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Self, TypeVar

from anyshard.engine.bell import Bell
from anyshard.errors import LimitExceeded, StorageStuck
from anyshard.threads import start_thread

logger = logging.getLogger(__name__)

T = TypeVar("T")

_POLL_S = 0.1  # how soon a waiting owner notices that a thread has failed


@dataclass(frozen=True, slots=True)
class Patience:
    """How long an operation waits while nothing moves: a log line every `report_s`, an error after `timeout_s`."""

    timeout_s: float = 1800.0
    report_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Call:
    """One call into a store that has not come back yet."""

    verb: str
    file: str
    position: int
    began_s: float

    def __str__(self) -> str:
        return f"{self.verb} {self.file} at byte {self.position} (for {time.monotonic() - self.began_s:.1f} s)"


class Crew:
    """Up to `num_threads` threads that run tasks in the order of `submit`. After the first error no further task starts.

    Leaving the context waits until no task runs and raises the first error; an interrupt (Ctrl-C) stops the tasks and is raised
    once they have come to rest, which only a second interrupt cuts short. If nothing moves for `patience.timeout_s`,
    `StorageStuck` is raised and the threads are left behind: while `has_stragglers` holds, what the tasks use must not be taken
    from them. `at_rest` is called once, by a thread of the crew, when no task runs any more and none ever will, however late
    that is: it puts away what the tasks shared.
    """

    def __init__(self, num_threads: int, *, name: str, patience: Patience, at_rest: Callable[[], None] | None = None) -> None:
        self._max_threads = num_threads
        self._name = name
        self._patience = patience
        self._last = at_rest
        self._tasks: deque[Callable[[], None]] = deque()
        self._threads: list[threading.Thread] = []
        self._num_threads = 0
        self._num_busy = 0  # counted by the threads themselves, which no interrupt can reach
        self._num_done = 0  # tasks, and calls into the store that succeed: those are progress
        self._is_over = False
        self._failure: BaseException | None = None
        self._calls: dict[int, Call] = {}
        self._lock = threading.Lock()
        self._bell = Bell()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        is_interrupted = not isinstance(error, Exception | None)
        if error is not None:
            self._fail(error)
        try:
            if not isinstance(error, StorageStuck):
                self._come_to_rest()
        except StorageStuck as stuck:
            self._fail(stuck)
            if not is_interrupted:
                raise
        except BaseException as interrupt:
            self._fail(interrupt)
            if not is_interrupted:
                with suppress(StorageStuck):
                    self._come_to_rest()
            raise
        finally:
            self._put_away()
        if error is None:
            self.check()

    @property
    def has_stragglers(self) -> bool:
        """Whether a task still runs or may start; after the context only if the wait for it was given up."""
        return not self._is_at_rest()

    def submit(self, task: Callable[[], None]) -> None:
        """Queue a task. `LimitExceeded` if it needs a thread, and the system has none to give."""
        self._tasks.append(task)
        try:
            if self._num_threads < self._max_threads and not self._add_thread():
                self._work_here()
        except RuntimeError as error:
            if not self._num_threads and self._tasks:
                raise LimitExceeded(
                    f"expected to start up to threads={self._max_threads} threads, found that the system starts none. Lower the "
                    "option threads= or ANYSHARD_STORAGE_THREADS, or raise the limit of this process (ulimit -u, pids.max)"
                ) from error

    def finish(self, check: Callable[[], None]) -> None:
        """Wait until all that was submitted is done. `check` is called now and then; what it raises ends the wait."""

        def attempt(timeout_s: float) -> bool | None:
            check()
            return self._await_rest(timeout_s)

        self.wait_for(attempt)

    def check(self) -> None:
        """Raise the first error, if there is one."""
        if self._failure is not None:
            raise self._failure

    @contextmanager
    def call(self, verb: str, *, file: str, position: int = 0, despite_failure: bool = False) -> Iterator[None]:
        """Note a call into a store for as long as it lasts, so that a stuck one can be named; after an error none begins."""
        if not despite_failure:
            self.check()
        me = threading.get_ident()
        self._calls[me] = Call(verb, file, position, time.monotonic())
        try:
            yield
            with self._lock:
                self._num_done += 1
        finally:
            del self._calls[me]

    def wait_for(self, attempt: Callable[[float], T | None], *, despite_failure: bool = False) -> T:
        """Repeat `attempt(timeout_s)` until it gives an answer; raises the crew's first error, or `StorageStuck`."""
        seen, since, reported = self._num_done, time.monotonic(), 0
        while (answer := attempt(_POLL_S)) is None:
            if not despite_failure:
                self.check()
            if seen != self._num_done:
                seen, since, reported = self._num_done, time.monotonic(), 0
            waited_s = time.monotonic() - since
            if waited_s >= self._patience.timeout_s:
                raise self._stuck(waited_s)
            if waited_s >= (reported + 1) * self._patience.report_s:
                reported += 1
                logger.warning("no progress for %.1f s, waiting for: %s", waited_s, self._describe_calls())
        return answer

    # The owner ---------------------------------------------------------------------------------------------------------

    def _come_to_rest(self) -> None:
        self.wait_for(self._await_rest, despite_failure=True)
        self._put_away()
        self.wait_for(self._await_rest, despite_failure=True)
        for thread in self._threads:  # they have nothing left to do but to end
            thread.join()

    def _put_away(self) -> None:
        """Have a thread call `at_rest`: a new one, or the last one that was left behind when it comes back."""
        self._is_over = True
        with suppress(RuntimeError):
            if self._last is None or self._add_thread():
                return
        self._work_here()

    def _work_here(self) -> None:
        """Be a thread of the crew for what there is to do now."""
        with self._lock:
            self._num_threads += 1
        self._work()

    def _await_rest(self, timeout_s: float) -> bool | None:
        if not self._is_at_rest():
            self._bell.wait(timeout_s)
        return self._is_at_rest() or None

    def _is_at_rest(self) -> bool:
        with self._lock:
            return not self._num_busy and not self._has_next()

    def _add_thread(self) -> bool:
        """Start one more thread; false if the interpreter starts none any more, `RuntimeError` if the system has none."""
        with self._lock:
            self._num_threads += 1
            thread = threading.Thread(target=self._work, name=f"{self._name}-{self._num_threads - 1}", daemon=True)
        is_started = False
        try:
            is_started = start_thread(thread)
        finally:
            if not is_started:
                with self._lock:
                    self._num_threads -= 1
        if is_started:
            self._threads = [one for one in self._threads if one.is_alive()] + [thread]
        return is_started

    def _describe_calls(self) -> str:
        calls = sorted(self._calls.copy().values(), key=lambda call: call.began_s)
        return "; ".join(map(str, calls)) or "no call into storage"

    def _stuck(self, waited_s: float) -> StorageStuck:
        files = [call.file for call in self._calls.copy().values()]
        return StorageStuck(
            f"expected progress within {self._patience.timeout_s:.0f} s, found none for {waited_s:.1f} s, "
            f"waiting for: {self._describe_calls()}. Check that the storage answers, or allow more time",
            file=files[0] if files else "",
        )

    # The threads -------------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (task := self._take()) is not None:
            try:
                task()
            except BaseException as error:  # noqa: BLE001 - the border of the thread: raised again by the owner of the crew
                self._fail(error)
            del task
            with self._lock:
                self._num_busy -= 1
                self._num_done += 1
            self._bell.ring()

    def _take(self) -> Callable[[], None] | None:
        with self._lock:
            if not self._has_next():
                self._num_threads -= 1
                return None
            if self._is_over:
                task, self._last = self._last, None
            else:
                task = self._tasks.popleft()
            self._num_busy += 1
            return task

    def _has_next(self) -> bool:
        if self._is_over:
            return self._last is not None and not self._num_busy
        return self._failure is None and bool(self._tasks)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._failure = self._failure or error
            dropped, self._tasks = self._tasks, deque()
        del dropped  # what these tasks held is freed outside of the lock
