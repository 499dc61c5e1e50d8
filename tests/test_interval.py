"""The advised interval: against a simulation of failures, a numeric optimum, and figures worked out by hand."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import numpy as np
import pytest

from anyshard.errors import InvalidOption
from anyshard.interval import IntervalAdvice, advise_interval, job_mtbf_s

ROOT = Path(__file__).parents[1]

# stall_s, duration_s, load_s, mtbf_s: blocking and asynchronous, cheap and dear, frequent failures and rare ones
COSTS = [
    (0.4, 30.0, 180.0, 10_800.0),
    (30.0, 30.0, 180.0, 10_800.0),
    (5.0, 60.0, 20.0, 1_000.0),
    (60.0, 60.0, 60.0, 600.0),
    (0.01, 2.0, 5.0, 400.0),
]


def advise(costs: tuple[float, float, float, float], step_s: float | None = None) -> IntervalAdvice:
    stall_s, duration_s, load_s, mtbf_s = costs
    return advise_interval(stall_s=stall_s, duration_s=duration_s, load_s=load_s, mtbf_s=mtbf_s, step_s=step_s)


def simulate_lives(advice: IntervalAdvice, interval_s: float, *, num_failures: int) -> float:
    """The training that is kept by all time: life after life, save after save, as a job would live through it."""
    kept_s = all_s = 0.0
    for life_s in np.random.default_rng(7).exponential(advice.mtbf_s, num_failures).tolist():
        all_s += life_s
        train_s = interval_s - advice.stall_s
        called_s = advice.load_s + train_s
        while called_s + advice.duration_s <= life_s:
            kept_s += train_s
            called_s += interval_s
    return kept_s / all_s


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("factor", [1, 3])
def test_the_ratio_is_that_of_a_simulated_job(costs: tuple[float, float, float, float], factor: int) -> None:
    """The closed form gives what 20,000 simulated failures give, at the advised interval and at a longer one."""
    advice = advise(costs)
    interval_s = factor * advice.interval_s
    assert simulate_lives(advice, interval_s, num_failures=20_000) == pytest.approx(advice.ettr(interval_s), rel=0.02, abs=0.002)


@pytest.mark.parametrize("costs", COSTS)
def test_no_interval_is_better_than_the_advised_one(costs: tuple[float, float, float, float]) -> None:
    """Of 20,000 intervals not shorter than a save, none has a ratio that is better by more than a ten-thousandth."""
    advice = advise(costs)
    tried = np.geomspace(advice.duration_s, 20 * advice.interval_s, 20_000).tolist()
    best_s = max(tried, key=advice.ettr)
    assert (best_s, advice.ettr(best_s)) == pytest.approx((advice.interval_s, advice.best_ettr), rel=0.01, abs=1e-4)
    assert advice.ettr(best_s) <= advice.best_ettr * 1.0001


@pytest.mark.parametrize(("mtbf_min", "expected_min"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)])
def test_the_optimum_is_that_of_daly(mtbf_min: float, expected_min: float) -> None:
    """The training between two saves of 5 minutes is what Daly (2006) gives for his three examples (figures 3 to 5)."""
    advice = advise_interval(stall_s=300, duration_s=300, load_s=600, mtbf_s=60 * mtbf_min)
    assert expected_min == pytest.approx((advice.interval_s - 300) / 60, rel=0.01)


def test_a_cheap_save_gives_the_interval_of_young() -> None:
    """Where the stall is small beside the time between failures, training between two saves lasts sqrt(2 stall M)."""
    advice = advise_interval(stall_s=0.5, duration_s=10, load_s=60, mtbf_s=1e6)
    assert math.sqrt(2 * 0.5 * 1e6) == pytest.approx(advice.interval_s, rel=0.001)


def test_the_best_interval_does_not_depend_on_the_duration_of_a_save() -> None:
    """A save that takes longer beside the training costs ratio, but the interval stays; until it cannot be that short."""
    short, long, too_long = (advise((2.0, duration_s, 60.0, 10_000.0)) for duration_s in (2.0, 100.0, 500.0))
    assert short.interval_s == long.interval_s == long.optimum_s == too_long.optimum_s
    assert short.best_ettr * math.exp(-98 / 10_000) == pytest.approx(long.best_ettr)
    assert 500.0 == too_long.interval_s


@pytest.mark.parametrize(("costs", "step_s"), list(itertools.product(COSTS, [0.7, 11.0, 5_000.0])))
def test_a_number_of_steps_leaves_a_save_its_time(costs: tuple[float, float, float, float], step_s: float) -> None:
    """With a step's time the interval is so many steps and a stall; one step less or more is worse, or too short for a save."""
    advice = advise(costs, step_s)
    num_steps = advice.num_steps
    assert num_steps is not None
    assert advice.stall_s + num_steps * step_s == pytest.approx(advice.interval_s)
    assert advice.interval_s >= advice.duration_s * (1 - 1e-9)
    assert advice.ettr(advice.interval_s + step_s) <= advice.best_ettr
    less_s = advice.interval_s - step_s
    assert num_steps == 1 or less_s < advice.duration_s or advice.ettr(less_s) <= advice.best_ettr


def test_steps_that_fill_a_save_exactly_are_not_rounded_up() -> None:
    """0.1 s + 3 steps of 0.1 s are enough for a save of 0.4 s, whatever binary fractions make of that."""
    assert 3 == advise_interval(stall_s=0.1, duration_s=0.4, load_s=0, mtbf_s=1e-2, step_s=0.1).num_steps


@pytest.mark.parametrize("stall_s", [0, 1e-12, 1.0, 1e5, 1e9])
@pytest.mark.parametrize("mtbf_s", [1e-3, 1.0, 1e12])
def test_extreme_costs_give_a_ratio(stall_s: float, mtbf_s: float) -> None:
    """Nothing overflows: the ratio lies between 0 and 1, and the interval is not shorter than a save."""
    advice = advise_interval(stall_s=stall_s, duration_s=stall_s + 1, load_s=1e4, mtbf_s=mtbf_s)
    assert 0 <= advice.best_ettr <= 1
    assert stall_s + 1 <= advice.interval_s < math.inf


def test_hosts_share_their_failures() -> None:
    """A job on 64 hosts that fail every 1,000 hours each fails every 15.6 hours."""
    assert 56_250.0 == job_mtbf_s(1000 * 3600, 64)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stall_s": -1}, "stall_s: expected a number of seconds, 0 or more, found -1"),
        ({"stall_s": 11}, r"duration_s: expected at least stall_s \(11\), which is part of it, found 10"),
        ({"duration_s": 0}, "duration_s: expected a number of seconds above 0, found 0"),
        ({"load_s": math.nan}, "load_s: expected a number of seconds, 0 or more, found nan"),
        ({"mtbf_s": math.inf}, "mtbf_s: expected a number of seconds above 0, found inf"),
        ({"step_s": 0}, "step_s: expected a number of seconds above 0, found 0"),
        ({"mtbf_s": "1h"}, "mtbf_s: expected a number of seconds above 0, found '1h'"),
    ],
)
def test_costs_that_cannot_be_are_refused(changes: dict[str, float], message: str) -> None:
    """A wrong number is named with what was expected."""
    with pytest.raises(InvalidOption, match=f"^{message}$"):
        advise_interval(**{"stall_s": 1, "duration_s": 10, "load_s": 5, "mtbf_s": 1000} | changes)


def test_an_interval_shorter_than_a_save_is_refused() -> None:
    """The ratio of calls that would have to wait for each other is not made up."""
    with pytest.raises(InvalidOption, match="expected at least the 30 s that a save takes"):
        advise((0.4, 30.0, 180.0, 10_800.0)).ettr(29)


def test_hosts_that_cannot_be_are_refused() -> None:
    """A number of hosts is a whole number above 0."""
    with pytest.raises(InvalidOption, match="num_hosts: expected a whole number above 0, found 0"):
        job_mtbf_s(3600, 0)


def test_the_page_of_intervals_has_the_right_figures() -> None:
    """The worked example of docs/intervals.md runs, and gives the table that stands below it."""
    text = (ROOT / "docs/intervals.md").read_text(encoding="ascii")
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    rows = re.findall(r"^\| ([\d.]+) s \| ([\d.]+) s \| ([\d.]+) s \| (\d+) \| ([\d.]+) % \|", text, flags=re.MULTILINE)
    assert len(rows) >= 3
    found = {}
    exec(compile(code, "intervals.md", "exec"), found)
    for stall_s, duration_s, interval_s, num_steps, percent in rows:
        advice = found["advise"](float(stall_s), float(duration_s))
        expected = (f"{advice.interval_s:.1f}", str(advice.num_steps), f"{100 * advice.best_ettr:.2f}")
        assert expected == (interval_s, num_steps, percent)
