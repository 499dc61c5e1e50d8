"""Real processes: agreed as every kind of group, dead, frozen or interrupted in the middle, and what they know of their job."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from anyshard.testing.launch import Launcher
from tests.coord import rank_cases

pytestmark = pytest.mark.slow

SAVED = b"table 0 planned; table 1 planned; table 2 planned"


def test_a_coordinator_that_is_killed_after_the_decision(launch: Launcher) -> None:
    """The others end within their patience, name it, and know that it was to be a commit."""
    with launch(rank_cases.die_after_the_decision, size=3) as launched:
        ended = launched.wait(timeout_s=60)
    assert -signal.SIGKILL == ended[0].exit_code
    expected = ("RankMissing", {0: "published: RankMissing: not heard of within 2 s"}, "commit")
    assert [expected] * 2 == [one.value for one in ended[1:]]


@pytest.mark.parametrize(("frozen", "at", "phase"), [(0, "table", "table"), (2, "table", "table"), (1, "durable", "durable")])
def test_a_rank_that_was_frozen_for_too_long(launch: Launcher, frozen: int, at: str, phase: str) -> None:
    """It fails as the others have failed, for want of itself, and all of them save together afterwards."""
    with launch(rank_cases.freeze, frozen, at, size=3) as launched:
        for rank in (frozen, *(rank for rank in range(3) if rank != frozen)):
            launched.wait_until_stopped(rank)
        for rank in range(3):
            launched.send_signal(rank, signal.SIGCONT)
        ended = launched.wait(timeout_s=60)
    expected = ("RankMissing", {frozen: f"{phase}: RankMissing: not heard of within 2 s"}, SAVED)
    assert [expected] * 3 == [one.value for one in ended]


@pytest.mark.parametrize("interrupted", [0, 1])
def test_ctrl_c_on_one_rank(launch: Launcher, interrupted: int) -> None:
    """It is raised there at once and ends the operation on all; whoever catches it may save again."""
    with launch(rank_cases.press_ctrl_c, interrupted, size=3) as launched:
        values = [one.value for one in launched.wait(timeout_s=60)]
    told = ("OperationFailed", {interrupted: "begin: KeyboardInterrupt: "}, True, SAVED)
    expected = [("KeyboardInterrupt", {}, True, SAVED) if rank == interrupted else told for rank in range(3)]
    assert expected == values


def test_a_freeze_during_a_call_is_not_the_stores_fault(launch: Launcher) -> None:
    """A process that was frozen for longer than a call may take still hears the answer."""
    with launch(rank_cases.freeze_in_a_call, size=1) as launched:
        launched.wait_until_stopped(0)
        threading.Event().wait(1.5)
        launched.send_signal(0, signal.SIGCONT)
        assert "answered" == launched.wait(timeout_s=60)[0].value


def test_every_kind_of_group_agrees(launch: Launcher) -> None:
    """Real ranks agree as the whole job, as a list, as a process group, and after the process group is destroyed."""
    with launch(rank_cases.save_as_every_group, size=3) as launched:
        values = [one.value or one.error for one in launched.wait(timeout_s=60)]
    same = {"job": SAVED, "list": SAVED, "kept": [SAVED] * 3, "after": SAVED}
    pair = b"table 0 planned; table 1 planned"
    assert [{**same, "group": pair}, {**same, "group": None}, {**same, "group": pair}] == values


def test_ranks_and_tokens_of_a_job(launch: Launcher, tmp_path: Path) -> None:
    """A group's ranks are numbers in the job; the token of a job lasts as long as its process group."""
    with launch(rank_cases.tell_ranks_and_tokens, str(tmp_path / "store"), size=3) as launched:
        values = [one.value or one.error for one in launched.wait(timeout_s=60)]
    same = {"all": (0, 1, 2), "stays": True, "without": (None, (0,)), "is_new": True}
    assert [
        {**same, "list": (0, 1), "group": (0, 2)},
        {**same, "list": (1,), "group": None},
        {**same, "list": (1, 2), "group": (0, 2)},
    ] == values
