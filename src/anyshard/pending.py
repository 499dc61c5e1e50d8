"""Pending saves: the user's handle of an asynchronous save, and the course that the threads which make it set."""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

from anyshard.engine.bell import Bell
from anyshard.errors import InvalidOption, StillPending
from anyshard.progress import RankStatus
from anyshard.reports import SaveReport, StagingReport

_POLL_S = 0.05  # how soon a second waiter notices; the first one is woken
_SHOWN = 8
_MAX_WAITERS = 4  # that are woken at once


class Moment(enum.IntEnum):
    """What a pending save comes to, in this order."""

    STAGED = 1
    DURABLE = 2
    COMMITTED = 3


@final
class Course:
    """How far a save has come, or that it has failed. Set by the threads that make it, awaited by any other."""

    def __init__(self) -> None:
        self.report: SaveReport | None = None
        self.failure: BaseException | None = None
        self.is_over = False  # last of all, so who sees it sees the rest
        self._reached = 0
        self._bell = Bell()

    def reach(self, moment: Moment) -> None:
        """Note that a moment has come."""
        self._reached = max(self._reached, moment)
        self._ring()

    def finish(self, report: SaveReport) -> None:
        """Note that the save is committed."""
        self.report = report
        self._reached = Moment.COMMITTED
        self._end()

    def fail(self, failure: BaseException) -> None:
        """Note that it has failed; the first failure stays."""
        if not self.is_over:
            self.failure = failure
            self._end()

    def wait(self, moment: Moment | None, timeout_s: float | None) -> bool:
        """Return once the moment has come (None: the end) or the save is over; false if neither came within `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.is_over and (moment is None or self._reached < moment):
            left_s = _POLL_S if deadline is None else deadline - time.monotonic()
            if left_s <= 0:
                return False
            self._bell.wait(min(left_s, _POLL_S))
        return True

    def has_reached(self, moment: Moment) -> bool:
        """Whether the moment has come."""
        return self._reached >= moment

    def _end(self) -> None:
        self.is_over = True
        self._ring()

    def _ring(self) -> None:
        for _ in range(_MAX_WAITERS):
            self._bell.ring()


@dataclass(slots=True)
class Stall:
    """How long a save has held its caller: the call itself, and steps of optimizers that had to wait for the copy.

    What still holds it counts up to now, for a save may be committed before a step that waited, or the call, has gone on.
    """

    began_s: float = field(default_factory=time.perf_counter)
    _call_s: float | None = None  # once the call is over
    _steps_s: float = 0.0
    _waits: list[float] = field(default_factory=list)  # when steps that still wait began to

    @property
    def seconds(self) -> float:
        """Both together."""
        now_s = time.perf_counter()
        call_s = now_s - self.began_s if self._call_s is None else self._call_s
        return call_s + self._steps_s + sum(now_s - began_s for began_s in tuple(self._waits))

    def end_call(self) -> None:
        """Note that the call returns."""
        self._call_s = time.perf_counter() - self.began_s

    def hold_step(self, wait: Callable[[], object]) -> None:
        """Have a step wait."""
        began_s = time.perf_counter()
        self._waits.append(began_s)
        try:
            wait()
        finally:
            self._waits.remove(began_s)
            self._steps_s += time.perf_counter() - began_s


def check_timeout(timeout_s: object) -> None:
    """Raise `InvalidOption` for what is neither None nor a number of seconds."""
    if timeout_s is not None and not (isinstance(timeout_s, (int, float)) and timeout_s >= 0):
        raise InvalidOption(f"timeout_s: expected None or a number of seconds, 0 or more, found {timeout_s!r}")


def _say_nothing() -> tuple[RankStatus, ...]:
    return ()


def _do_nothing() -> None:
    return


def _allow(what: str) -> None:
    del what


@final
@dataclass(eq=False, slots=True)
class PendingSave:
    """A save that goes on while training does. Made by `anyshard.async_save`.

    Three moments can be waited for, each by a method that returns once it has come, raises what the save failed with, or
    `StillPending` after `timeout_s` (None: as long as it takes; the save itself has its own timeouts). A failure that no wait has
    raised is raised by a later save of the same ranks (see docs/async.md).
    """

    url: str
    step: int | None
    staging: StagingReport = field(default_factory=lambda: StagingReport(0, 0, 0))
    _course: Course = field(default_factory=Course, repr=False)
    _stall: Stall = field(default_factory=Stall, repr=False)
    _ask: Callable[[], tuple[RankStatus, ...]] = field(default=_say_nothing, repr=False)
    _is_reported: bool = field(default=False, repr=False)
    _forget: Callable[[], None] = field(default=_do_nothing, repr=False)
    _check_outside: Callable[[str], None] = field(default=_allow, repr=False)
    _pid: int = field(default_factory=os.getpid, repr=False)

    def staged(self, timeout_s: float | None = None) -> None:
        """Return once nothing of the save depends on the app state any more: tensors may be changed by anybody, moved, freed."""
        self._await(Moment.STAGED, timeout_s)

    def durable(self, timeout_s: float | None = None) -> None:
        """Return once the bytes of this rank are safe in the storage."""
        self._await(Moment.DURABLE, timeout_s)

    def committed(self, timeout_s: float | None = None) -> SaveReport:
        """Return once the checkpoint exists, with the report that `anyshard.save` would have returned."""
        self._await(Moment.COMMITTED, timeout_s)
        assert self._course.report is not None
        return self._course.report

    def result(self, timeout_s: float | None = None) -> SaveReport:
        """As `committed`."""
        return self.committed(timeout_s)

    @property
    def is_done(self) -> bool:
        """Whether the save is over: committed or failed."""
        self._check_process()
        return self._course.is_over

    def wait_ended(self, timeout_s: float | None = None) -> bool:
        """Return once the save is over, committed or failed; false if it is not within `timeout_s`. Raises no failure of it."""
        self._check_process()
        return self._course.wait(None, timeout_s)

    @property
    def is_committed(self) -> bool:
        """Whether the checkpoint exists."""
        self._check_process()
        return self._course.has_reached(Moment.COMMITTED)

    @property
    def stall_s(self) -> float:
        """How long training was held by this save up to now: the call, and optimizer steps that had to wait for the copy."""
        return self._stall.seconds

    def status(self) -> tuple[RankStatus, ...]:
        """Where each rank is, as far as it was heard of; the last word of other ranks may be some seconds old. Does not wait."""
        self._check_process()
        return self._ask()

    def take_failure(self) -> bool:
        """Note that the failure is raised now; false if it was before."""
        was_reported, self._is_reported = self._is_reported, True
        return not was_reported

    def when_reported(self, forget: Callable[[], None]) -> None:
        """Let `forget` be called when a wait raises the failure, which holds the frames of those who were told."""
        self._forget = forget

    def refuse_waits_by(self, check_outside: Callable[[str], None]) -> None:
        """Let `check_outside` raise where a wait that takes long would be one of the save for itself."""
        self._check_outside = check_outside

    def describe(self) -> str:
        """How far the slowest rank is, in words."""
        statuses = self._ask()
        if absent := [one.rank for one in statuses if not one.phase]:
            return f"nothing heard yet of rank {', '.join(map(str, absent[:_SHOWN]))}"
        found = list(statuses)
        last = min(found, key=lambda one: (one.written_nbytes, one.rank), default=None)
        if last is None:
            return "nothing heard of it yet"
        return (
            f"rank {last.rank} in phase {last.phase} for {last.phase_s:.1f} s with {last.written_nbytes} of {last.nbytes} bytes "
            "written"
        )

    def _await(self, moment: Moment, timeout_s: float | None) -> None:
        self._check_process()
        check_timeout(timeout_s)
        has_come = self._course.wait(moment, 0)
        if not has_come:
            self._check_outside(f"the wait for the save to {self.url}")
            has_come = self._course.wait(moment, timeout_s)
        failure = self._course.failure
        if failure is not None and not self._course.has_reached(moment):
            self._is_reported = True
            self._forget()
            raise failure
        if not has_come:
            raise StillPending(
                f"{self.url}: expected the save to be {moment.name.lower()} within {timeout_s:g} s, found {self.describe()}; it "
                "goes on: wait again, or see status()"
            )

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise InvalidOption(
                f"{self.url}: expected the pending save to be used in process {self._pid}, which began it, found process "
                f"{os.getpid()}, a fork of it; only the first one saves"
            )
