"""Deadlines: whoever asks a storage that hangs gets an error in time, and goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from anyshard.errors import LimitExceeded, StorageStuck
from anyshard.storage.protocol import Store
from anyshard.storage.wrappers.forward import Call, Verb, WrapperStore
from anyshard.threads import start_thread

T = TypeVar("T")

# The engine asks for these from threads of its own, with a patience of their own.
_UNTIMED = frozenset({Verb.CREATE_BLOB, Verb.WRITE_AT, Verb.FINISH, Verb.OPEN_BLOB, Verb.READ_INTO})
_POLL_S = 0.1
_IDLE_S = 0.05  # how long a thread waits for its next call before it ends
_BATCH = 1000  # keys deleted under one deadline


class TimedStore(WrapperStore):
    """A store whose verbs end within `timeout_s`: without an answer by then they raise `StorageStuck`.

    Each call runs on a daemon thread, which serves later calls too. A call that was given up may still take effect. So until it
    has come back every further call is `StorageStuck` at once, and nobody acts on what may yet change. An interrupt (Ctrl-C) is
    raised when the call that it met is over; only a second one cuts that short. Blobs are not timed, but `open_blob` and
    `create_blob` and what they give are for callers that wait with a deadline, as the engine does. When the interpreter is ending
    and starts no more threads, calls run on that of the caller, without a deadline.
    """

    def __init__(self, inner: Store, timeout_s: float) -> None:
        super().__init__(inner)
        self._timeout_s = timeout_s
        self._helpers = _Helpers()
        self._given_up: list[_Job] = []

    def around(self, call: Call, run: Callable[[], T]) -> T:
        """Run the call on another thread and wait for it, unless it is one of a blob."""
        return run() if call.verb in _UNTIMED else self._ask(f"{call.verb} {call.key}".rstrip(), run)

    def delete(self, keys: Sequence[str]) -> None:
        """Forward in batches, each with a deadline of its own."""
        for first in range(0, len(keys), _BATCH):
            batch = keys[first : first + _BATCH]
            self.around(Call(Verb.DELETE, f"{batch[0]} and {len(batch) - 1} more"), partial(self.inner.delete, batch))

    def now_s(self) -> float:
        """That of the inner store, in time."""
        return self._ask("now_s", self.inner.now_s)

    def _ask(self, what: str, run: Callable[[], T]) -> T:
        self._refuse_while_stuck(what)
        job = _Job(what, run)
        try:
            self._helpers.give(job)
            job.wait(self._timeout_s)
        except BaseException:  # an interrupt; what the call itself raises comes from `take_result`
            self._finish(job)
            raise
        if not job.is_over:
            self._given_up.append(job)
            raise StorageStuck(
                f"{self.url}: expected an answer to {what} within {self._timeout_s:g} s, found none. Check that the storage "
                "answers (a hung mount, its server, the network), or allow more time with timeout_s",
                file=what.partition(" ")[2],
            )
        result: T = job.take_result()
        return result

    def _finish(self, job: _Job) -> None:
        """Wait for a call whose caller was interrupted."""
        if job.cancel():
            return
        try:
            job.wait(self._timeout_s)
        finally:
            if not job.is_over:
                self._given_up.append(job)

    def _refuse_while_stuck(self, what: str) -> None:
        self._given_up = [job for job in self._given_up if not job.is_over]
        if self._given_up:
            job = self._given_up[0]
            raise StorageStuck(
                f"{self.url}: {what} was not asked for, since {job.what} has had no answer for {job.age_s:.1f} s and may still "
                "take effect. Check that the storage answers, then try again",
                file=what.partition(" ")[2],
            )


class _Job:
    """One call: done by a helper, awaited by the caller."""

    def __init__(self, what: str, run: Callable[[], object]) -> None:
        self.what = what
        self.is_over = False
        self._run = run
        self._began_s = time.monotonic()
        self._result: object = None
        self._error: BaseException | None = None
        self._right_to_begin = threading.Lock()
        self._over: SimpleQueue[None] = SimpleQueue()

    @property
    def age_s(self) -> float:
        """Seconds since the call was made."""
        return time.monotonic() - self._began_s

    def do(self) -> None:
        """Run the call and note its outcome, unless it was cancelled."""
        if self.cancel():
            try:
                self._result = self._run()
            except BaseException as error:  # noqa: BLE001 - the border of the thread: raised again on the caller's
                self._error = error
        self.is_over = True
        self._over.put(None)

    def cancel(self) -> bool:
        """Take the right to begin: whether the call had not begun (or been cancelled) before."""
        return self._right_to_begin.acquire(blocking=False)

    def wait(self, timeout_s: float) -> None:
        """Return when the call is over, or after `timeout_s`. Looks up often: a signal just before a wait ends none."""
        deadline = time.monotonic() + timeout_s
        while not self.is_over and (left_s := deadline - time.monotonic()) > 0:
            with suppress(Empty):
                self._over.get(timeout=min(left_s, _POLL_S))

    def take_result(self) -> Any:
        """What the call returned or raised."""
        error, self._error = self._error, None
        if error is None:
            return self._result
        try:
            raise error
        finally:
            del error  # it holds this frame


class _Helpers:
    """Daemon threads that do jobs, as many as there are callers at once."""

    def __init__(self) -> None:
        self._idle: list[_Helper] = []
        self._lock = threading.Lock()

    def give(self, job: _Job) -> None:
        """Have a thread begin the job now, or do it here if no thread can be started any more."""
        with self._lock:
            while self._idle:
                helper = self._idle.pop()
                if helper.is_alive():  # else it was left in the parent of a forked process
                    helper.jobs.put(job)
                    return
        helper = _Helper(self)
        helper.jobs.put(job)
        try:
            is_started = start_thread(helper)
        except RuntimeError as error:
            raise LimitExceeded(
                f"expected to start a thread for {job.what}, found that the system starts none. Raise the limit of this process "
                "(ulimit -u, pids.max), or have it use fewer threads"
            ) from error
        if not is_started:
            job.do()

    def serve(self, helper: _Helper) -> None:
        """Do the jobs that the helper is given until it has been idle for a while."""
        while (job := self._next(helper)) is not None:
            job.do()
            del job
            with self._lock:
                self._idle.append(helper)

    def _next(self, helper: _Helper) -> _Job | None:
        try:
            return helper.jobs.get(timeout=_IDLE_S)
        except Empty:
            with self._lock:  # under which jobs are given
                if not helper.jobs.empty():
                    return helper.jobs.get()
                if helper in self._idle:
                    self._idle.remove(helper)
                return None


class _Helper(threading.Thread):
    def __init__(self, helpers: _Helpers) -> None:
        super().__init__(name="anyshard-storage", daemon=True)
        self.jobs: SimpleQueue[_Job] = SimpleQueue()
        self._helpers = helpers

    def run(self) -> None:
        self._helpers.serve(self)
