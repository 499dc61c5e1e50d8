"""Preemption: a rank that is told to stop gets all ranks to stop at one step, with one last save, or ends at once without.

The roll call over all ranks tells the two meanings of a signal apart: the job is to go (all answer), or a rank has died and the
launcher takes down the rest (it does not answer). A thread, the watcher, hears signals and talks, since the main one may sit in a
collective; it knows nothing of saves.
"""

from __future__ import annotations

import atexit
import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Self, final

from anyshard.coord.group import Channel
from anyshard.coord.looks import Rarely
from anyshard.coord.summons import Call, Kind, Summons
from anyshard.errors import InvalidOption
from anyshard.run.data_workers import shield_forks
from anyshard.run.signals import SignalTap, end_by, is_main_thread

logger = logging.getLogger(__name__)

_CLOSE_S: Final = 10.0  # how long closing waits for a watcher whose key-value store does not answer
_UNSEEN: Final = (signal.SIGKILL, signal.SIGSTOP)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Preemption:
    """How a job is told to stop, and how long its end may take.

    Args:
        signals: any of them, on any rank, asks for the stop. What handles them in this process goes on doing so.
        deadline_s: when, after it has got a signal, a process is ended by it whatever it does then; let it be less than the time
            after which the cluster kills (under torchrun at most 30 s, if the signal goes to torchrun).
        roll_call_s: how long ranks wait for an answer of each other.
        notice: is asked again and again, on a thread of its own, and asks for the stop when it returns true.
        poll_s: how often a rank looks for what others have heard, and asks `notice`. With more than 1,250 ranks more rarely.
    """

    signals: Collection[int] = (signal.SIGTERM,)
    deadline_s: float = 60.0
    roll_call_s: float = 3.0
    notice: Callable[[], bool] | None = field(default=None)
    poll_s: float = 0.25

    def __post_init__(self) -> None:
        valid = signal.valid_signals() - set(_UNSEEN)
        if not isinstance(self.signals, Collection) or not set(self.signals) <= valid:
            raise InvalidOption(f"preemption: signals: expected signals that can be handled, found {self.signals!r}")
        for name in ("deadline_s", "roll_call_s", "poll_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise InvalidOption(f"preemption: {name}: expected seconds above 0, found {value!r}")
        if self.notice is not None and not callable(self.notice):
            raise InvalidOption(f"preemption: notice: expected a function or None, found {self.notice!r}")
        if self.roll_call_s >= self.deadline_s:
            raise InvalidOption(
                f"preemption: expected roll_call_s below deadline_s, found {self.roll_call_s:g} and {self.deadline_s:g}: no time "
                "would be left for the last save"
            )


@final
class PreemptionWatch:
    """One rank's watcher, from `open` to `close`: it hears wishes to stop or to save, and agrees with the others on a call.

    `open`, `count_call` and `close` are for the main thread; the rest is for any. Without a preemption no signal is heard and
    nothing is asked; wishes to save are agreed on all the same. A process that got a signal is ended by it, by the watcher, as if
    nobody had handled it, as soon as ranks are known to be missing, or at the deadline.
    """

    def __init__(self, preemption: Preemption | None) -> None:
        self._preemption = preemption or Preemption(signals=())
        self._summons: Summons | None = None
        self._tap = SignalTap(())
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []
        self._keep_tap = Rarely(self._tap.keep)
        self._rank = 0
        self._signal: int | None = None
        self._is_abandoned = self._is_answered = False
        self._asked_s: float | None = None  # when this rank first knew that some rank is to stop
        self._is_late = False

    @property
    def deadline_left_s(self) -> float:
        """The seconds that are left for the last save; infinite as long as this rank knows of no wish to stop."""
        if self._asked_s is None:
            return math.inf
        return max(0.0, self._asked_s + self._preemption.deadline_s - time.monotonic())

    @property
    def owed_signal(self) -> int | None:
        """The signal that this rank got and that no call was an answer to: once this is closed nobody else will give one."""
        return None if self._is_answered else self._signal

    def open(self, channel: Channel) -> None:
        """Begin to hear. All ranks open the same channel, once. Before that signals do what they did before."""
        assert self._summons is None, "a watch is opened once"
        options = self._preemption
        numbers = tuple(options.signals)
        if numbers and not is_main_thread():
            logger.warning("preemption: expected the main thread, found another one: signals are not heard, only other ranks")
            numbers = ()
        self._rank = channel.members.job_rank
        self._summons = Summons(channel, roll_call_s=options.roll_call_s, poll_s=options.poll_s)
        self._tap = SignalTap(numbers)
        self._tap.install()
        self._keep_tap = Rarely(self._tap.keep)
        shield_forks(self._tap)
        self._start(self._watch, "anyshard-watch")
        if options.notice is not None:
            self._start(self._ask_notice, "anyshard-notice")
        atexit.register(self.close)  # or the interpreter would end under the watcher

    def count_call(self) -> Call:
        """Begin the next call, once per step on every rank: what is agreed for it. Asks nobody, but waits for a roll call.

        Raises `RankMissing` if ranks are missing when some rank is to stop, `KeyValueStoreLost` if nothing can be agreed on.
        """
        assert self._summons is not None, "open comes first"
        self._keep_tap()
        call = self._summons.count_call()
        self._is_answered |= Kind.STOP in call.kinds
        return call

    def summon(self, kind: Kind, reason: str) -> None:
        """Ask all ranks for a call of this kind, soon; returns at once."""
        if self._summons is not None:
            self._summons.summon(kind, reason)
            self._tap.wake()

    def close(self) -> None:
        """End the watcher, and put back the handlers that were there before. Again is nothing."""
        if self._summons is None:
            return
        if self._tap.is_left:  # a fork, which has no watcher and is no rank
            self._summons = None
            return
        atexit.unregister(self.close)
        self._closing.set()
        self._tap.wake()
        for thread in self._threads:
            thread.join(_CLOSE_S if thread.name == "anyshard-watch" else 0.0)
        for number in self._tap.wait(0.0):  # that nobody has looked at any more
            self._signal = self._signal or number
        self._tap.remove()
        if not self._threads[0].is_alive():  # else the key-value store does not answer, and there is nobody to tell
            self._summons.leave()
        self._summons = None

    def abandon(self) -> None:
        """For a watch that nobody can close: hear nothing any more. At once, from any thread, even in the midst of a lock."""
        if self._summons is None or self._tap.is_left:
            return
        self._tap.lapse()
        self._is_abandoned = True
        self._tap.wake()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    # --------------------------------------------------------------------------------------------------------- the watcher

    def _start(self, target: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=target, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _watch(self) -> None:
        summons, tap = self._summons, self._tap
        assert summons is not None
        try:
            while not (self._closing.is_set() or self._is_abandoned):
                pause_s = summons.look()
                self._end_if_due(summons)
                for number in tap.wait(self._limit(pause_s)):
                    self._note_signal(number)
            if self._is_abandoned:
                self._end_abandoned(summons)
        except Exception:
            logger.exception("rank %d: the watcher has failed; signals are not heard any more", self._rank)

    def _end_abandoned(self, summons: Summons) -> None:
        self._closing.set()
        summons.leave()
        if not self._tap.is_hearing:  # else it is for the main thread, at the end of the process
            atexit.unregister(self.close)

    def _ask_notice(self) -> None:
        assert self._preemption.notice is not None
        has_failed = False
        while not self._closing.wait(self._preemption.poll_s):
            try:
                is_noticed = self._preemption.notice()
            except Exception:
                if not has_failed:
                    logger.warning("preemption: notice has failed; it is asked again and again all the same", exc_info=True)
                has_failed, is_noticed = True, False
            if is_noticed:
                self._ask_to_stop(f"notice on rank {self._rank}")
                return

    def _note_signal(self, number: int) -> None:
        if self._signal is None:
            self._signal = number
            self._ask_to_stop(f"{signal.Signals(number).name} on rank {self._rank}")

    def _ask_to_stop(self, reason: str) -> None:
        logger.warning("%s: asks all ranks to stop, %.0f s at most from now on", reason, self._preemption.deadline_s)
        self._note_asked()
        self.summon(Kind.STOP, reason)

    def _note_asked(self) -> None:
        if self._asked_s is None:
            self._asked_s = time.monotonic()

    def _end_if_due(self, summons: Summons) -> None:
        if summons.is_stop_known:
            self._note_asked()
        if self._signal is not None and summons.failure is not None:
            logger.error("rank %d: ends at once by its signal: %s", self._rank, summons.failure)
            end_by(self._signal)
        if self.deadline_left_s > 0.0 or self._is_late:
            return
        self._is_late = True
        at = "no common step was found" if summons.stop_call is None else f"its call {summons.stop_call} of end_step has not come"
        if summons.is_over and summons.failure is None and summons.stop_call is None:
            at = "its last save or what came after it has not ended"
        logger.error("rank %d: was to stop within %g s; %s", self._rank, self._preemption.deadline_s, at)
        if self._signal is not None:
            end_by(self._signal)

    def _limit(self, pause_s: float | None) -> float | None:
        left_s = math.inf if self._is_late else self.deadline_left_s
        limit_s = min(math.inf if pause_s is None else pause_s, left_s)
        return None if limit_s == math.inf else limit_s
