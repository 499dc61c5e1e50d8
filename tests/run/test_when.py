"""When a run saves."""

from __future__ import annotations

import math

import pytest

from anyshard.errors import InvalidOption
from anyshard.run.pace import Pace
from anyshard.run.when import AnyOf, Continuously, EveryMinutes, EverySteps, SavePolicy


def due(policy: SavePolicy, last: int) -> list[int]:
    return [step for step in range(last + 1) if policy.is_due(step)]


def test_every_steps_counts_from_its_offset() -> None:
    """Step 0 is none of them, and an offset of -1 gives the n-th steps of a loop that counts from 0."""
    assert [3, 6, 9] == due(EverySteps(3), 10)
    assert [2, 5, 8] == due(EverySteps(3, offset=-1), 10)
    assert [7, 10] == due(EverySteps(3, offset=4), 10)


@pytest.mark.parametrize(("since_s", "expected"), [(0.0, False), (89.9, False), (90.0, True)])
def test_every_minutes_goes_by_the_time_since_the_last_call(since_s: float, expected: bool) -> None:
    """It never looks at the number of the step, nor at whether a save is under way."""
    policy = EveryMinutes(1.5)
    assert [expected] * 2 == [policy.is_wanted(since_s, is_saving=is_saving) for is_saving in (False, True)]
    assert [] == due(policy, 10)


def test_continuously_waits_for_the_save_before() -> None:
    """The next save is wanted as soon as none is under way."""
    assert [True, False] == [Continuously().is_wanted(0.0, is_saving=is_saving) for is_saving in (False, True)]


def test_policies_are_joined() -> None:
    """Any of them is enough, the same one counts once, and only those that go by time need the ranks to agree."""
    joined = EverySteps(4) | (EverySteps(6) | EverySteps(4)) | EveryMinutes(1)
    assert AnyOf((EverySteps(4), EverySteps(6), EveryMinutes(1))) == joined
    assert [4, 6, 8, 12] == due(joined, 12)
    assert joined.is_wanted(60.0, is_saving=True)
    assert [True, False, False] == [policy.goes_by_time for policy in (joined, EverySteps(4) | EverySteps(6), SavePolicy())]


def test_a_policy_reads_as_it_is_written() -> None:
    """Its repr gives it back."""
    joined = EverySteps(4, offset=1) | EveryMinutes(2.5) | Continuously()
    assert joined == eval(repr(joined))


@pytest.mark.parametrize("n", [0, -1, 2.0, True, "3"])
def test_every_steps_takes_whole_numbers(n: object) -> None:
    """Above 0; the message says what was found."""
    with pytest.raises(InvalidOption, match="EverySteps: n: .*found"):
        EverySteps(n)  # type: ignore[arg-type]


def test_every_steps_takes_a_whole_offset() -> None:
    """Of any sign."""
    with pytest.raises(InvalidOption, match="offset: expected a whole number, found 'a'"):
        EverySteps(2, offset="a")  # type: ignore[arg-type]


@pytest.mark.parametrize("minutes", [0, -1, math.nan, math.inf, True, "3"])
def test_every_minutes_takes_finite_times(minutes: object) -> None:
    """Above 0; the message says what was found."""
    with pytest.raises(InvalidOption, match="EveryMinutes: minutes: .*found"):
        EveryMinutes(minutes)  # type: ignore[arg-type]


def test_policies_join_only_policies() -> None:
    """Anything else is a mistake of the caller."""
    with pytest.raises(TypeError):
        EverySteps(1) | 3  # type: ignore[operator]


def test_a_pace_without_policies_saves_never() -> None:
    """It needs no other rank, either."""
    pace = Pace(None, None)
    assert (frozenset(), False, False) == (pace.count_call(), pace.is_due(100), pace.is_time(is_saving=False))
    assert math.inf == pace.deadline_left_s
    pace.close()
