"""A crew: the threads of one operation. The first error stops them all, and no wait lasts for ever.

Tasks are few and long (a block each), so plain threads and one queue are enough. Threads are daemons: a call that never comes
back from a broken storage must not keep the interpreter from exiting.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from types import TracebackType
from typing import Self, TypeVar

from anyshard.errors import StorageStuck

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
    """Threads that run tasks in the order of `submit`. After the first error of any of them no further task starts.

    Leaving the context waits until no task runs and raises the first error. If nothing moves for `patience.timeout_s`, it raises
    `StorageStuck` and leaves the threads behind: while `has_stragglers` holds, what the tasks use must not be taken from them.
    """

    def __init__(self, num_threads: int, *, name: str, patience: Patience) -> None:
        self._patience = patience
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._num_open = 0
        self._num_done = 0
        self._failure: BaseException | None = None
        self._calls: dict[int, Call] = {}
        self._threads = [threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True) for i in range(num_threads)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is not None:
            self._fail(error)
        for _ in self._threads:
            self._tasks.put(None)
        if not isinstance(error, StorageStuck):
            self._come_to_rest()
        if error is None:
            self.check()

    @property
    def has_stragglers(self) -> bool:
        """Whether a task still runs; after the context only if the wait for it was given up."""
        return self._num_open > 0

    def submit(self, task: Callable[[], None]) -> None:
        """Queue a task for the next idle thread."""
        with self._changed:
            self._num_open += 1
        self._tasks.put(task)

    def check(self) -> None:
        """Raise the first error, if there is one."""
        if self._failure is not None:
            raise self._failure

    @contextmanager
    def call(self, verb: str, *, file: str, position: int) -> Iterator[None]:
        """Note a call into a store for as long as it lasts, so that a stuck one can be named."""
        me = threading.get_ident()
        self._calls[me] = Call(verb, file, position, time.monotonic())
        try:
            yield
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

    def _come_to_rest(self) -> None:
        try:
            self.wait_for(self._is_idle, despite_failure=True)
        except BaseException as error:
            self._fail(error)  # what is still queued must not start later, when nobody waits for it
            raise
        for thread in self._threads:
            thread.join()

    def _is_idle(self, timeout_s: float) -> bool | None:
        with self._changed:
            return self._changed.wait_for(lambda: self._num_open == 0, timeout_s) or None

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

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                if self._failure is None:
                    task()
            except BaseException as error:  # noqa: BLE001 - the border of the thread: raised again by the owner of the crew
                self._fail(error)
            del task
            with self._changed:
                self._num_open -= 1
                self._num_done += 1
                self._changed.notify_all()
