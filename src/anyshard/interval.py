"""How often to save: the interval that loses the least training time, from measured costs. Knows no saves, only numbers.

The model, with M the mean time between failures of the job, which come at random at any moment, also during saves and loads:

- A call holds the training up for `stall_s`, and its checkpoint exists `duration_s` after the call (the same for `save`).
- Calls follow each other by an interval T, never shorter than `duration_s`: one save at a time. T - stall_s of it is training.
- A failure costs everything since the call of the last save that was committed, and `load_s` until training goes on from there.

After a failure the first save is committed load_s + (T - stall_s) + duration_s later, if no failure comes first, and each further
one T later. So the effective-training-time ratio, the training that is kept by all time that goes by, is

    ettr(T) = (T - stall_s) / M * sum over k >= 0 of exp(-(load_s + T - stall_s + duration_s + k T) / M)
            = (T - stall_s) / M * exp(-(load_s + duration_s - stall_s) / M) / (exp(T / M) - 1)

which for duration_s = stall_s is the complete model of Daly (2006). That a save goes on beside the training costs a factor that
does not depend on T, so the best T is Daly's, with the stall as his cost of a checkpoint:

- J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17 (9), 1974: T - stall_s = sqrt(2 stall_s M).
- J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22 (3), 2006:
  T = sqrt(2 stall_s M) (1 + r/3 + r^2/9) with r = sqrt(stall_s / 2M), for stall_s < 2 M; else T - stall_s = M.
- N. H. Vaidya, Impact of checkpoint latency on overhead ratio of a checkpointing scheme, IEEE Transactions on Computers 46 (8),
  1997, tells the two costs of a checkpoint apart: overhead (our stall) and latency (our duration).
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from anyshard.errors import InvalidOption

_ROUNDING = 1e-9  # an interval put together from steps may come out shorter than `duration_s` by this share


@dataclass(frozen=True, slots=True)
class IntervalAdvice:
    """How often to save, and what share of all time is then training that is kept.

    `interval_s` is from one call to the next, `num_steps` the same in training steps (None if `step_s` was not given), and
    `best_ettr` the ratio to expect with it. `optimum_s` is what the stall alone asks for: if `interval_s` is longer, saves take
    too long to be that frequent, and only faster storage helps.
    """

    stall_s: float
    duration_s: float
    load_s: float
    mtbf_s: float
    optimum_s: float
    interval_s: float
    num_steps: int | None
    best_ettr: float

    def ettr(self, interval_s: float) -> float:
        """The effective-training-time ratio to expect with another interval; `InvalidOption` if it is shorter than a save."""
        _check_seconds("interval_s", interval_s, can_be_zero=False)
        if not self.duration_s * (1 - _ROUNDING) <= interval_s:
            raise InvalidOption(
                f"interval_s: expected at least the {self.duration_s:g} s that a save takes (one is in flight at a time), "
                f"found {interval_s!r}; save less often"
            )
        return _Costs(self.stall_s, self.duration_s, self.load_s, self.mtbf_s).ettr(interval_s)


def advise_interval(
    *, stall_s: float, duration_s: float, load_s: float, mtbf_s: float, step_s: float | None = None
) -> IntervalAdvice:
    """How often to save so that the least training time is lost, in the mean, to saves and failures together.

    `stall_s` and `duration_s` are those of a `SaveReport`. `load_s` is all time from a failure until training goes on: to notice
    it, to start the job again, and the `duration_s` of a `LoadReport`. `mtbf_s` is of the whole job, see `job_mtbf_s`. With
    `step_s`, the time of a training step, the interval is a whole number of steps. Raises `InvalidOption`.

        report = pending.result()
        advice = advise_interval(stall_s=report.stall_s, duration_s=report.duration_s, load_s=180, mtbf_s=job_mtbf_s(5e7, 64))
    """
    _check_seconds("stall_s", stall_s)
    _check_seconds("duration_s", duration_s, can_be_zero=False)
    _check_seconds("load_s", load_s)
    _check_seconds("mtbf_s", mtbf_s, can_be_zero=False)
    if duration_s < stall_s:
        raise InvalidOption(f"duration_s: expected at least stall_s ({stall_s!r}), which is part of it, found {duration_s!r}")
    costs = _Costs(stall_s, duration_s, load_s, mtbf_s)
    interval_s, num_steps = max(costs.optimum_s, duration_s), None
    if step_s is not None:
        _check_seconds("step_s", step_s, can_be_zero=False)
        num_steps = costs.find_num_steps(step_s)
        interval_s = stall_s + num_steps * step_s
    return IntervalAdvice(
        stall_s, duration_s, load_s, mtbf_s, costs.optimum_s, interval_s, num_steps, best_ettr=costs.ettr(interval_s)
    )


def job_mtbf_s(host_mtbf_s: float, num_hosts: int) -> float:
    """Mean time between failures of a job that fails whenever one of its hosts does, each independently of the others."""
    _check_seconds("host_mtbf_s", host_mtbf_s, can_be_zero=False)
    if type(num_hosts) is not int or num_hosts < 1:
        raise InvalidOption(f"num_hosts: expected a whole number above 0, found {num_hosts!r}")
    return host_mtbf_s / num_hosts


@dataclass(frozen=True, slots=True)
class _Costs:
    """What was measured, with the formulas of the model."""

    stall_s: float
    duration_s: float
    load_s: float
    mtbf_s: float

    @property
    def optimum_s(self) -> float:
        """Daly's higher-order optimum, from call to call."""
        if self.stall_s >= 2 * self.mtbf_s:
            return self.mtbf_s + self.stall_s
        ratio = math.sqrt(self.stall_s / (2 * self.mtbf_s))
        return math.sqrt(2 * self.stall_s * self.mtbf_s) * (1 + ratio / 3 + ratio**2 / 9)

    def ettr(self, interval_s: float) -> float:
        """The ratio with an interval that is not shorter than a save; written so that nothing overflows."""
        kept = math.exp(-(self.load_s + self.duration_s - self.stall_s + interval_s) / self.mtbf_s)
        return (interval_s - self.stall_s) / self.mtbf_s * kept / -math.expm1(-interval_s / self.mtbf_s)

    def find_num_steps(self, step_s: float) -> int:
        """The best whole number of steps between two calls that leaves each save the time that it takes."""
        fewest = max(1, math.ceil((self.duration_s - self.stall_s) / step_s * (1 - _ROUNDING)))
        below = math.floor((self.optimum_s - self.stall_s) / step_s)
        return max(max(fewest, below), max(fewest, below + 1), key=lambda num: self.ettr(self.stall_s + num * step_s))


def _check_seconds(name: str, value: object, *, can_be_zero: bool = True) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    is_fine = is_number and 0 <= value <= sys.float_info.max and (value > 0 or can_be_zero)  # type: ignore[operator]
    if not is_fine:
        expected = "a number of seconds, 0 or more" if can_be_zero else "a number of seconds above 0"
        raise InvalidOption(f"{name}: expected {expected}, found {value!r}")
