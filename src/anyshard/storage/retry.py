"""Trying again: which requests, how often, after which pause. Knows nothing of what a request is."""

from __future__ import annotations

import enum
import logging
import os
import random
import ssl
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar, final

from anyshard.errors import StorageUnavailable
from anyshard.monitor.events import SILENT, Emitter

T = TypeVar("T")

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 20.0
_MAX_RENEWALS: Final = 3  # of one request: credentials that are fresh and still refused are wrong


class Verdict(enum.Enum):
    """What a failed request calls for."""

    AGAIN = "again"  # it may well succeed a moment later
    RENEW = "renew"  # it may well succeed with fresh credentials
    FINAL = "final"  # it would fail again


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """`max_attempts` of one request; `budget_s` is what all requests together may spend waiting between attempts.

    Each request that succeeds gives back half of what is spent then: so it bounds an outage, not a long operation.
    """

    max_attempts: int = 8
    budget_s: float = 300.0
    first_pause_s: float = _FIRST_PAUSE_S
    longest_pause_s: float = _LONGEST_PAUSE_S


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for, in words: `verb` and the full name of what it is about, of which `file` is the key."""

    verb: str
    name: str
    file: str


class Judge:
    """How a `Retrier` reads errors. Override what a backend knows better; these judge by Python's own classes."""

    def judge(self, error: Exception) -> Verdict:
        """Connections that break and calls that take too long may do better next time."""
        return Verdict.AGAIN if isinstance(error, (ConnectionError, TimeoutError, ssl.SSLError)) else Verdict.FINAL

    def describe(self, error: Exception) -> str:
        """The error in one line, without credentials."""
        return f"{type(error).__name__}: {error}"

    def renew(self, started_s: float) -> None:
        """Take fresh credentials, if those of now were already there at `started_s` (`time.monotonic`)."""

    def explain(self, error: Exception, request: Request) -> Exception:
        """What to raise instead of an error that is final."""
        del request
        return error


@final
class Retrier:
    """Makes requests again as long as that makes sense. Threads share the budget, so that an outage ends all of them in time.

    Each request that is made again is one line at DEBUG and one event `storage.retry`; all of them together are one warning,
    when the retrier is let go of or by `log_summary`.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        judge: Judge,
        *,
        events: Emitter = SILENT,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self._policy = policy
        self._judge = judge
        self._events = events
        self._pause = pause
        self._tally = _Tally(os.getpid())
        weakref.finalize(self, _log_summary, self._tally).atexit = False  # logging is over by then

    def run(self, send: Callable[[], T], request: Request) -> T:
        """What `send` returns.

        A final error is raised as the judge explains it, at once. When attempts or budget are used up it is
        `StorageUnavailable`, which says what was tried and what the last attempt failed with.
        """
        renewals = 0
        attempt = 1
        while True:
            started_s = time.monotonic()
            try:
                answer = send()
            except Exception as found:  # noqa: BLE001 - judged below, outside of this block: what it says must not be chained
                error = found.with_traceback(None)  # or the two would hold this frame, and so the retrier, for long
            else:
                self._tally.give_back()
                return answer
            verdict = self._judge.judge(error)
            renewals += verdict is Verdict.RENEW
            if verdict is Verdict.FINAL or renewals > _MAX_RENEWALS:
                raise self._judge.explain(error, request)
            self._wait(attempt, request, error)
            if verdict is Verdict.RENEW:
                self._judge.renew(started_s)
            attempt += 1

    def log_summary(self) -> None:
        """Log one warning if any request was made again since the last one."""
        _log_summary(self._tally)

    def _wait(self, attempt: int, request: Request, error: Exception) -> None:
        """Return after a pause; raise if there is to be no further attempt."""
        cause = self._judge.describe(error)
        if attempt >= self._policy.max_attempts:
            raise _unavailable(
                request, attempt, cause, "Check that the endpoint is right and answers, or raise max_attempts (storage_options)"
            )
        longest_s = min(self._policy.longest_pause_s, self._policy.first_pause_s * 2.0 ** (attempt - 1))
        pause_s = random.uniform(0.0, longest_s)  # noqa: S311 - spreads requests, guards nothing
        if not self._tally.spend(pause_s, self._policy.budget_s, f"{request.verb} {request.name}: {cause}"):
            spent = (
                f"All retries together may wait for {self._policy.budget_s:g} s (retry_budget_s), and hardly a request succeeds"
            )
            raise _unavailable(request, attempt, cause, f"{spent}. Check the store and the network, then try again")
        logger.debug("%s %s: attempt %d: %s; again in %.2f s", request.verb, request.name, attempt, cause, pause_s)
        self._events.event("storage.retry", duration_s=pause_s, file=request.file, detail=f"{request.verb}: {cause}")
        self._pause(pause_s)


@final
class _Tally:
    """What was made again so far. `pid`: in a forked child it is not told a second time."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._lock = threading.Lock()
        self._spent_s = 0.0
        self._num = 0
        self._waited_s = 0.0
        self._examples: Counter[str] = Counter()

    def spend(self, seconds: float, budget_s: float, example: str) -> bool:
        with self._lock:
            if self._spent_s + seconds > budget_s:
                return False
            self._spent_s += seconds
            self._waited_s += seconds
            self._num += 1
            if len(self._examples) < 100 or example in self._examples:
                self._examples[example] += 1
            return True

    def give_back(self) -> None:
        """A request was answered: the store is there, and what was spent counts only half."""
        with self._lock:
            self._spent_s /= 2.0

    def take(self) -> tuple[int, float, str]:
        with self._lock:
            taken = self._num, self._waited_s, "; ".join(example for example, _ in self._examples.most_common(3))
            self._num, self._waited_s = 0, 0.0
            self._examples.clear()
            return taken


def _log_summary(tally: _Tally) -> None:
    if sys.is_finalizing():  # nobody reads a log any more, and it would follow whatever the program says last
        return
    if tally.pid != os.getpid():
        return
    num, waited_s, examples = tally.take()
    if num:
        logger.warning(
            "storage: requests made again: %d, after %.1f s of waiting in all; most often: %s", num, waited_s, examples
        )


def _unavailable(request: Request, attempts: int, cause: str, advice: str) -> StorageUnavailable:
    return StorageUnavailable(
        f"could not {request.verb} {request.name}: attempts: {attempts}, the last one failed with: {cause}. {advice}",
        file=request.file,
        attempts=attempts,
    )
