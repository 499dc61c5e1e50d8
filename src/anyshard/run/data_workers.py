"""Data workers: children of a rank that go on loading while the rank stops, though a signal to all has hit them as well.

Launchers signal whole process groups. A data worker that ends by that takes the rank with it, in the midst of its step, before
the last save. So it passes over signals that are not of its parent, as long as that lives.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Collection
from multiprocessing import util
from types import FrameType

from anyshard.run.signals import SignalTap, end_by


def shield_forks(tap: SignalTap) -> None:
    """From now on, while the tap lives, let processes that `multiprocessing` forks pass over its signals."""
    util.register_after_fork(tap, _shield_fork)


def shield_worker(_worker_id: int = 0, *, signals: Collection[int] = (signal.SIGTERM,)) -> None:
    """Let this process, a data worker, pass over signals that are not of its parent, as long as that lives.

    Workers that are forked while a run with preemption is open are so by themselves. Others (`multiprocessing_context="spawn"`)
    call it first of all: `DataLoader(..., worker_init_fn=shield_worker)`. The main thread calls it. A program that such
    a worker starts has these signals blocked.
    """
    for number in signals:
        signal.signal(number, _pass)  # for threads of libraries, which were there before and take signals too
    _stand_guard(signals)


def _shield_fork(tap: SignalTap) -> None:
    if tap.is_left and tap.numbers:
        _stand_guard(tap.numbers)


def _stand_guard(numbers: Collection[int]) -> None:
    # Blocked, since torch gives a data worker a handler of its own later, which ends it. Threads that it starts inherit that.
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    threading.Thread(target=_guard, args=(numbers, os.getppid()), name="anyshard-guard", daemon=True).start()


def _guard(numbers: Collection[int], parent: int) -> None:
    while True:
        found = signal.sigwaitinfo(numbers)
        if parent in (found.si_pid, 0) or os.getppid() != parent:
            _deliver(found.si_signo)


def _deliver(number: int) -> None:
    """Do what the signal does here, as if this thread had not taken it."""
    if signal.getsignal(number) is _pass:
        end_by(number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    signal.raise_signal(number)
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})


def _pass(_number: int, _frame: FrameType | None) -> None:
    """Nothing: whether the signal counts is for the guard to say."""
