"""Memberships: the groups of ranks that this process is in, and what it keeps for each of them from call to call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from anyshard.agreed_plan import PlanCache
from anyshard.coord.group import Group, make_lone_group
from anyshard.coord.turn import Turn
from anyshard.records.manifest import Parent

if TYPE_CHECKING:
    from anyshard.adapters.capture_cache import CaptureCache
    from anyshard.async_saving import Background
    from anyshard.background import Saver
    from anyshard.coord.torch_dist import GroupLike


_KEPT_GONE = 4


@dataclass(slots=True)
class Membership:
    """One group, records of its app states, its plans, the checkpoint that it has loaded, and what asynchronous saves need.

    Ranks agree on one thing at a time: by turns.
    """

    group: Group
    plans: PlanCache = field(default_factory=PlanCache)
    captures: CaptureCache | None = None
    parent: Parent | None = None
    turn: Turn = field(default_factory=Turn)
    background: Background | None = None

    def find_captures(self) -> CaptureCache:
        """The records of app states that were saved."""
        from anyshard.adapters.capture_cache import CaptureCache

        if self.captures is None:
            self.captures = CaptureCache()
        return self.captures

    @contextmanager
    def take_turn(self, what: str, timeout_s: float) -> Iterator[Group]:
        """The group, for one operation that is made now, after all saves of it that are under way and end within `timeout_s`.

        For others several ranks wait as long again, for their turn, and then raise; a process alone goes on beside them.
        """
        self.check_outside(what)
        self._await_saves(timeout_s)
        with self.take_turn_of_saver(timeout_s, what) as group:
            yield group

    @contextmanager
    def take_calls_and_turn(self, what: str, timeout_s: float) -> Iterator[Group]:
        """As `take_turn`, for what uses the arenas and caches of asynchronous saves: while no call of `async_save` does."""
        self.check_outside(what)
        assert self.background is not None
        with self.background.calls.take(what, timeout_s):
            self._await_saves(timeout_s)
            with self.take_turn_of_saver(timeout_s, what) as group:
                yield group

    @contextmanager
    def take_turn_of_saver(self, timeout_s: float, what: str = "an asynchronous save") -> Iterator[Group]:
        """As `take_turn`, for those saves themselves."""
        if self.group.size == 1:
            yield make_lone_group(self.group.ranks[0])
            return
        with self.turn.take(what, timeout_s):
            yield self.group

    def check_outside(self, what: str) -> None:
        """Raise `OperationFailed` if this thread is within a call of the same ranks, for `what` would wait for its end."""
        self.turn.check_outside(what)
        if self.background is not None:
            self.background.calls.check_outside(what)

    def raise_earlier(self, what: str, timeout_s: float) -> None:
        """Raise the failure of an earlier asynchronous save that nobody was told of, once the saves under way have ended.

        They are waited for up to `timeout_s`.
        """
        self.check_outside(what)
        self._await_saves(timeout_s)
        if self.background is not None:
            self.background.raise_earlier(timeout_s)

    def _await_saves(self, timeout_s: float) -> None:
        if self.background is not None:
            self.background.saver.await_idle(timeout_s)


@final
class Memberships:
    """The memberships by the ranks of their groups, as long as the job is the same."""

    def __init__(self) -> None:
        self._job: object = None
        self._found: dict[tuple[int, ...], Membership] = {}
        self._backgrounds: list[Background] = []  # of earlier jobs too, for their saves go on
        self._lock = threading.RLock()  # a signal handler may save while this thread has it

    @property
    def savers(self) -> tuple[Saver, ...]:
        """All that may have something to do or to tell."""
        with self._lock:
            return tuple(background.saver for background in self._backgrounds)

    def check_outside(self, what: str) -> None:
        """Raise `OperationFailed` if this thread is within a call of `async_save`, or makes saves: `what` would wait for it."""
        for background in tuple(self._backgrounds):
            background.calls.check_outside(what)
            background.saver.check_outside(what)

    def find(self, group: GroupLike, timeout_s: float) -> Membership:
        """The membership in a group; made when it is first asked for."""
        from anyshard.coord.torch_dist import find_ranks, job_token, make_group

        job, ranks = job_token(), find_ranks(group)
        with self._lock:
            if job is not self._job:  # the ranks of another job are others, whatever their numbers are
                self._job, self._found = job, {}
            found = self._found
        self._free_gone()
        if ranks not in found:  # not under the lock: this asks the job's store; of two threads the first one's stays
            found.setdefault(ranks, Membership(make_group(group, timeout_s=timeout_s)))
        return found[ranks]

    def _free_gone(self) -> None:
        """Free the arenas of groups of earlier jobs that have nothing to do or tell any more, and forget the groups.

        But not the last ones, for whose ends the end of the process may have to wait: other ranks may not know them yet.
        """
        with self._lock:
            alive = [membership.background for membership in self._found.values()]
            gone = [one for one in self._backgrounds if not any(one is other for other in alive) and one.is_idle]
            for background in gone:
                background.means.arenas.close()
            forgotten = gone[:-_KEPT_GONE]
            self._backgrounds = [one for one in self._backgrounds if not any(one is other for other in forgotten)]

    def find_background(self, membership: Membership, make: Callable[[], Background]) -> Background:
        """What a membership has for asynchronous saves; made when it is first asked for."""
        with self._lock:
            if membership.background is None:
                membership.background = make()
                self._backgrounds.append(membership.background)
            return membership.background
