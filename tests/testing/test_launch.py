from __future__ import annotations

import signal
from pathlib import Path

import pytest

from anyshard.testing.launch import Ended, Launcher
from anyshard.testing.ranks import CaseFailed
from tests.testing import cases

pytestmark = pytest.mark.slow


def test_ranks_run_the_case_and_end(launch: Launcher) -> None:
    """Each rank gives its value and ends well."""
    with launch(cases.tell_rank, "x", size=3) as launched:
        assert [Ended(0, (rank, 3, ("x",))) for rank in range(3)] == launched.wait()


def test_ranks_end_as_scripts_do(launch: Launcher, tmp_path: Path) -> None:
    """An exception ends with code 1 and its traceback, an exit with its code, and work at exit is done in all cases."""
    with launch(cases.end_as_scripts_do, str(tmp_path), size=4) as launched:
        ended = launched.wait()
        log = launched.read_logs()[1]
    assert [0, 1, 7, 0] == [one.exit_code for one in ended]
    assert "rank 1 gives up" in (ended[1].error or "")
    assert "rank 1 gives up" in log
    assert ["0", "1", "2", "3"] == sorted(path.name for path in tmp_path.iterdir())
    assert ended[0].value != ended[3].value


def test_a_rank_can_be_killed_alone(launch: Launcher) -> None:
    """A killed rank, the first included, takes no other with it."""
    with launch(cases.wait_for_ever, size=3) as launched:
        for rank in (0, 2, 1):
            launched.send_signal(rank, signal.SIGKILL)
        assert [Ended(-signal.SIGKILL)] * 3 == launched.wait()


def test_a_rank_can_be_stopped_and_woken(launch: Launcher) -> None:
    """A rank that stops itself is seen to be stopped, and goes on when it is told to."""
    with launch(cases.stop_self, 1, size=2) as launched:
        launched.wait_until_stopped(1)
        launched.send_signal(1, signal.SIGCONT)
        assert [Ended(0, 3.0)] * 2 == launched.wait()


def test_ranks_that_do_not_end_are_named(launch: Launcher) -> None:
    """After the timeout the error has the stacks of those that are still there, and leaving the block kills them."""
    with launch(cases.hang_on, 1, size=2) as launched, pytest.raises(CaseFailed) as caught:
        launched.wait(timeout_s=1)
    assert [1] == list(caught.value.failures)
    assert "wait_for_ever" in caught.value.failures[1]
    assert -signal.SIGKILL == launched.wait()[1].exit_code


def test_a_rank_that_ends_instead_of_stopping_is_named(launch: Launcher) -> None:
    """Waiting for a stop ends when the rank does."""
    with launch(cases.tell_pid, size=1) as launched, pytest.raises(CaseFailed, match="expected it to stop"):
        launched.wait_until_stopped(0)
