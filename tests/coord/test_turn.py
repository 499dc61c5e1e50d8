"""Turns of the threads of one process: one after the other, never one within another, and never for ever."""

from __future__ import annotations

import signal
import threading

import pytest

from anyshard.coord.turn import Turn
from anyshard.errors import OperationFailed

LONG_S = 30.0


def test_a_call_within_a_call_is_refused_at_once() -> None:
    """It would wait for itself; the error names both, and the outer call goes on."""
    turn = Turn()
    with turn.take("the save to a", LONG_S):
        with pytest.raises(OperationFailed, match="the save to b: .* found this thread in the save to a"):
            turn.take("the save to b", LONG_S).__enter__()
        with pytest.raises(OperationFailed, match="found this thread in the save to a"):
            turn.take("the save to b", LONG_S).__enter__()


def test_a_signal_handler_is_refused_at_once() -> None:
    """A handler runs on the thread that it interrupts, and so within its call."""
    turn, refusals = Turn(), list[str]()

    def handle(*_: object) -> None:
        with pytest.raises(OperationFailed, match="a signal handler sets a flag") as caught:
            turn.take("the last save", LONG_S).__enter__()
        refusals.append(caught.value.headline.split(":")[0])

    before = signal.signal(signal.SIGUSR2, handle)
    try:
        with turn.take("the save to a", LONG_S):
            signal.raise_signal(signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert ["the last save"] == refusals


def test_another_thread_waits_for_its_turn_up_to_a_time() -> None:
    """What holds the turn longer than that is named; once it has returned, an error or not, the next call has its turn."""
    turn, is_held, is_over = Turn(), threading.Event(), threading.Event()
    assert turn.is_free

    def hold() -> None:
        with pytest.raises(ValueError, match="the body's"), turn.take("the save to a", LONG_S):
            is_held.set()
            is_over.wait(LONG_S)
            raise ValueError("the body's")

    thread = threading.Thread(target=hold)
    thread.start()
    assert is_held.wait(LONG_S)
    assert not turn.is_free
    with pytest.raises(OperationFailed, match=r"the load of b: .* within 0\.05 s, found another thread still in the save to a"):
        turn.take("the load of b", 0.05).__enter__()
    is_over.set()
    with turn.take("the load of b", LONG_S):
        thread.join(LONG_S)


def test_what_would_wait_for_its_own_end_is_refused_at_once() -> None:
    """Who only waits for the turn's end can ask first; other threads, and this one afterwards, may wait."""
    turn, others = Turn(), list[object]()
    with turn.take("the save to a", LONG_S):
        with pytest.raises(OperationFailed, match="wait_all: .* found this thread in the save to a"):
            turn.check_outside("wait_all")
        thread = threading.Thread(target=lambda: others.append(turn.check_outside("wait_all")))
        thread.start()
        thread.join(LONG_S)
    turn.check_outside("wait_all")
    assert [None] == others
