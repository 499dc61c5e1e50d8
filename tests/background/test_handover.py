"""Handovers: a value, an error or the end of patience, whichever comes first."""

from __future__ import annotations

import threading
from itertools import count

import pytest

import anyshard
from anyshard.handover import Handover
from tests.background.scenes import SOON_S


def test_a_value_that_does_not_come() -> None:
    """A wait ends after its time, and says for what it was; it looks around meanwhile."""
    handover, looks = Handover[int](), count()
    with pytest.raises(anyshard.StillPending, match=r"expected the plan from another thread within 0\.2 s"):
        handover.receive("the plan", 0.2, check=lambda: next(looks) and None)
    assert (True, False) == (next(looks) > 0, handover.settle(0.1))


def test_a_value_that_comes_in_time() -> None:
    """Who waits for it gets it, and an error after it comes too late."""
    handover = Handover[int]()
    threading.Timer(0.05, handover.give, (7,)).start()
    assert 7 == handover.receive("the plan", SOON_S)
    handover.fail(OSError("late"))
    assert (7, True) == (handover.receive("the plan", 0), handover.settle(0))
