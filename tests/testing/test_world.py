from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from anyshard.testing.ranks import CaseFailed
from anyshard.testing.world import World, Worlds
from tests.testing import cases

pytestmark = pytest.mark.slow


def test_a_case_returns_the_value_of_each_rank(worlds: Worlds) -> None:
    """Arguments arrive and values return as the plain values they are, in rank order."""
    args = (1, 2.5, "text", b"bytes", None, [1], {"key": (2, 3)})
    assert [(0, 2, args), (1, 2, args)] == worlds(2).run(cases.tell_rank, *args)


def test_cases_may_be_named(worlds: Worlds) -> None:
    """A case is found by `package.module:function`, and the process group works."""
    assert [3.0, 3.0] == worlds(2).run("tests.testing.cases:add_up")


def test_ranks_live_on(worlds: Worlds) -> None:
    """Further cases run in the same processes, which are not this one."""
    pids = worlds(2).run(cases.tell_pid)
    assert pids == worlds(2).run(cases.tell_pid)
    assert 3 == len({*pids, os.getpid()})


def test_a_failure_names_rank_and_traceback(worlds: Worlds) -> None:
    """What one rank raises is raised here with its traceback and what it printed, and the world lives on."""
    pids = worlds(2).run(cases.tell_pid)
    with pytest.raises(CaseFailed, match=r"rank 1:\nTraceback[^$]*rank 1 has a problem[^$]*rank 1 is about to fail") as caught:
        worlds(2).run(cases.fail_on, 1)
    assert [1] == list(caught.value.failures)
    assert pids == worlds(2).run(cases.tell_pid)


def test_ranks_that_wait_for_a_failed_one_are_ended() -> None:
    """The error comes long before the timeout, with the stack of the rank that was left waiting; the next case has new ranks."""
    with World(2) as world:
        with pytest.raises(CaseFailed) as caught:
            world.run(cases.fail_before_barrier, 0, timeout_s=1000)
        assert "has a problem" in caught.value.failures[0]
        assert "fail_before_barrier" in caught.value.failures[1]
        assert [3.0, 3.0] == world.run(cases.add_up)
        assert 2 == world.num_starts


def test_a_rank_that_died_between_cases_is_noticed() -> None:
    """The next case fails at once and says so; the one after has new ranks."""
    with World(1) as world:
        os.kill(world.run(cases.tell_pid)[0], signal.SIGKILL)
        with pytest.raises(CaseFailed, match="ended without an answer"):
            world.run(cases.tell_pid, timeout_s=1000)
        assert 1 == len(world.run(cases.tell_pid))


def test_hung_and_killed_ranks_end_their_world() -> None:
    """A case that hangs ends by its timeout with its stack, one that kills a rank at once, and no process is left behind."""
    with World(2) as world:
        pids = world.run(cases.tell_pid)
        with pytest.raises(CaseFailed) as caught:
            world.run(cases.hang_on, 1, timeout_s=0.5)
        assert [1] == list(caught.value.failures)
        assert "wait_for_ever" in caught.value.failures[1]
        pids += world.run(cases.tell_pid)
        with pytest.raises(CaseFailed, match="ended without an answer"):
            world.run(cases.kill_self, 1, timeout_s=1000)
    assert [] == [pid for pid in pids if Path(f"/proc/{pid}/exe").exists()]


def test_values_must_be_plain(worlds: Worlds) -> None:
    """A case that returns something else fails, as does one that nobody finds."""
    with pytest.raises(CaseFailed, match="UnsupportedValue"):
        worlds(2).run(cases.return_object)
    with pytest.raises(CaseFailed, match="no attribute 'missing'"):
        worlds(2).run("tests.testing.cases:missing")


def test_a_world_has_a_sane_size() -> None:
    """More ranks than the machine can run at once are refused."""
    with pytest.raises(ValueError, match="1 to 8"):
        World(9)
