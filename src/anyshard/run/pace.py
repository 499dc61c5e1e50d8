"""The pace of a run: which calls of `end_step` are for a save, and which is the last one; the same on all ranks."""

from __future__ import annotations

import logging
import math
import secrets
import signal
import time
import weakref
from collections.abc import Callable
from typing import Final, final

from anyshard.coord.group import Group
from anyshard.coord.summons import Kind
from anyshard.run.preemption import Preemption, PreemptionWatch
from anyshard.run.when import SavePolicy

logger = logging.getLogger(__name__)

_ASK_AGAIN_S: Final = 60.0  # after a save was asked for by time that never came
_NOTHING: Final[frozenset[str]] = frozenset()


@final
class Pace:
    """When this rank saves. `open` comes first, on all ranks; then one `count_call` for each call of `end_step`."""

    def __init__(self, every: SavePolicy | None, preemption: Preemption | None) -> None:
        self.is_open = False
        self._every = SavePolicy() if every is None else every
        self._preemption = preemption
        self._watch: PreemptionWatch | None = None
        self._is_asked = False  # whether this rank is the one that goes by its clock
        self._is_alone = True
        self._called_s = time.monotonic()
        self._asked_s = -math.inf

    @property
    def deadline_left_s(self) -> float:
        """The seconds that are left for the last save, infinite if the job is not to be stopped."""
        return math.inf if self._watch is None else self._watch.deadline_left_s

    def open(self, group: Group, hear: Callable[[Callable[[], bytes]], bytes]) -> None:
        """Begin to hear of signals and of other ranks, if anything here needs that. Again is nothing.

        `hear` has all ranks hear what the coordinator finds.
        """
        if self.is_open:
            return
        self._is_alone, self._is_asked = group.size == 1, group.is_coordinator
        if self._preemption is not None or (self._every.goes_by_time and not self._is_alone):
            token = hear(lambda: secrets.token_hex(8).encode("ascii"))
            self._watch = PreemptionWatch(self._preemption)
            self._watch.open(group.open_channel(token.decode("ascii")))
            weakref.finalize(self, self._watch.abandon).atexit = False  # or a Run that is gone would hold signals back
        self.is_open = True

    def count_call(self) -> frozenset[str]:
        """What the ranks have agreed on for this call of `end_step`: kinds of `Kind`, mostly none. Asks nobody."""
        if self._watch is None:
            return _NOTHING
        kinds = self._watch.count_call().kinds
        if Kind.SAVE in kinds:
            self._asked_s = -math.inf
        return kinds

    def is_due(self, step: int) -> bool:
        """Whether the number of the step says that it is to be saved."""
        return self._every.is_due(step)

    def is_time(self, *, is_saving: bool) -> bool:
        """Whether the clock says so to a rank that is alone; the coordinator of several asks all of them for a call soon."""
        if not self._is_asked or not self._every.goes_by_time:
            return False
        now_s = time.monotonic()
        if not self._every.is_wanted(now_s - self._called_s, is_saving=is_saving):
            return False
        if self._watch is not None and not self._is_alone and now_s - self._asked_s > _ASK_AGAIN_S:
            self._asked_s = now_s
            self._watch.summon(Kind.SAVE, "by time")
        return self._is_alone

    def note_save(self) -> None:
        """A save was called."""
        self._called_s = time.monotonic()

    def close(self, *, is_failing: bool = False) -> None:
        """Hear nothing any more. Again is nothing.

        A signal that came too late for a last save ends the process now, as without a Run; not if the job `is_failing` anyway,
        whose error is to be seen.
        """
        watch, self._watch = self._watch, None
        if watch is None:
            return
        watch.close()
        owed = watch.owed_signal
        if owed is not None and not is_failing and signal.getsignal(owed) is signal.SIG_DFL:  # other handlers have heard it
            logger.warning("%s came after the last end_step: it ends the process now", signal.Signals(owed).name)
            signal.raise_signal(owed)
