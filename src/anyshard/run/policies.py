"""Keep policies: which steps of a run stay, whole or thinned to some sections. Pure rules over what is there, without a store.

Policies are put together with `|` (what one of them keeps is kept, and the more of it) and `&` (what both keep, and the less).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, Protocol, TypeAlias, final, runtime_checkable

from anyshard.errors import InvalidOption
from anyshard.run.step_info import StepInfo

# What is kept of each step that is kept: all of it (None), or these sections.
Choice: TypeAlias = Mapping[int, frozenset[str] | None]


@runtime_checkable
class KeepPolicy(Protocol):
    """A rule of retention. Called by each pass, on the thread of that; it must do nothing but choose."""

    def choose(self, steps: Sequence[StepInfo], now_s: float) -> Choice:
        """What to keep of `steps`, the good ones of the run in rising order, at `now_s` (Unix time, by the store's clock)."""
        ...

    def protects(self, step: int) -> bool:
        """Whether a step stays whatever becomes of it, even if a rollback has made it stale."""
        ...


class Policy:
    """What all policies here can do: be put together."""

    __slots__ = ()

    def choose(self, steps: Sequence[StepInfo], now_s: float) -> Choice:
        """What to keep of `steps`."""
        raise NotImplementedError

    def protects(self, step: int) -> bool:
        """No step but those that are chosen."""
        del step
        return False

    def __or__(self, other: KeepPolicy) -> Policy:
        return EitherPolicy(self, _checked(other))

    def __ror__(self, other: KeepPolicy) -> Policy:
        return EitherPolicy(_checked(other), self)

    def __and__(self, other: KeepPolicy) -> Policy:
        return BothPolicies(self, _checked(other))

    def __rand__(self, other: KeepPolicy) -> Policy:
        return BothPolicies(_checked(other), self)


@final
@dataclass(frozen=True, slots=True)
class KeepLast(Policy):
    """Keep the `n` steps with the highest numbers."""

    n: int

    def __post_init__(self) -> None:
        _check_count("KeepLast", self.n)

    def choose(self, steps: Sequence[StepInfo], now_s: float) -> Choice:
        """The last `n`, fewer only if there are no more."""
        del now_s
        return {one.step: None for one in steps[-self.n :]}


@final
@dataclass(frozen=True, slots=True)
class KeepEvery(Policy):
    """Keep the steps whose number is a multiple of `n`."""

    n: int

    def __post_init__(self) -> None:
        _check_count("KeepEvery", self.n)

    def choose(self, steps: Sequence[StepInfo], now_s: float) -> Choice:
        """All multiples of `n`."""
        del now_s
        return {one.step: None for one in steps if one.step % self.n == 0}


@final
@dataclass(frozen=True, slots=True)
class KeepFor(Policy):
    """Keep each step for so long after it was saved: seconds, or a `timedelta`. By the store's clock, which is one for all.

    A step that was thinned or copied counts as saved then.
    """

    duration: float | timedelta

    def __post_init__(self) -> None:
        if not (_is_number(self.duration) or isinstance(self.duration, timedelta)) or not self.duration_s > 0:
            raise InvalidOption(f"KeepFor: expected a number of seconds or a timedelta, above 0, found {self.duration!r}")

    @property
    def duration_s(self) -> float:
        """The same in seconds."""
        return self.duration.total_seconds() if isinstance(self.duration, timedelta) else float(self.duration)

    def choose(self, steps: Sequence[StepInfo], now_s: float) -> Choice:
        """Those that are younger, by when their records were written."""
        return {one.step: None for one in steps if now_s - one.written_s < self.duration_s}


@final
@dataclass(frozen=True, slots=True)
class KeepBest(Policy):
    """Keep the `n` steps with the best value of a metric that was given to the save: the lowest, or with mode "max" the highest.

    Of equal values the later step is better. A step without the metric, or whose value is NaN, is never a best one.
    """

    metric: str
    n: int
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        _check_count("KeepBest", self.n)
        if not isinstance(self.metric, str) or not self.metric:
            raise InvalidOption(f"KeepBest: expected the name of a metric, found {self.metric!r}")
        if self.mode not in ("min", "max"):
            raise InvalidOption(f"KeepBest: expected mode 'min' or 'max', found {self.mode!r}")

    def choose(self, steps: Sequence[StepInfo], now_s: float) -> Choice:
        """The best `n`, fewer if fewer have a value."""
        del now_s
        sign = 1.0 if self.mode == "min" else -1.0
        values = [(sign * one.metrics[self.metric], -one.step) for one in steps if self.metric in one.metrics]
        ranked = sorted(value for value in values if not math.isnan(value[0]))
        return {-negative: None for _, negative in ranked[: self.n]}


@final
@dataclass(frozen=True, slots=True, init=False)
class Protect(Policy):
    """Keep these steps, even if they are of before a rollback."""

    steps: tuple[int, ...]

    def __init__(self, steps: Collection[int]) -> None:
        if isinstance(steps, (str, bytes)) or not isinstance(steps, Collection) or not all(map(_is_step, steps)):
            raise InvalidOption(f"Protect: expected numbers of steps, found {steps!r}")
        object.__setattr__(self, "steps", tuple(sorted(set(steps))))

    def choose(self, steps: Sequence[StepInfo], now_s: float) -> Choice:
        """Those of them that are there."""
        del now_s
        return {one.step: None for one in steps if one.step in self.steps}

    def protects(self, step: int) -> bool:
        """Each of them."""
        return step in self.steps


@final
@dataclass(frozen=True, slots=True)
class WeightsOnly(Policy):
    """Keep of the steps that `policy` keeps no more than these sections: the rest is dropped, and nothing is rewritten.

    Of a step in parts that is the sections of each part. What holds none of them is kept as it is.
    """

    policy: KeepPolicy
    sections: tuple[str, ...] = ("model",)

    def __post_init__(self) -> None:
        _checked(self.policy)
        sections = self.sections
        if isinstance(sections, str) or not sections or not all(isinstance(one, str) and one for one in sections):
            raise InvalidOption(f"WeightsOnly: expected names of sections to keep, found {sections!r}")
        object.__setattr__(self, "sections", tuple(sorted(set(sections))))

    def choose(self, steps: Sequence[StepInfo], now_s: float) -> Choice:
        """The same steps, with less of each."""
        own = frozenset(self.sections)
        return _without_empty({step: _less(own, kept) for step, kept in self.policy.choose(steps, now_s).items()})

    def protects(self, step: int) -> bool:
        """As `policy` does; a stale step that stays is not thinned."""
        return self.policy.protects(step)


@final
@dataclass(frozen=True, slots=True, repr=False)
class EitherPolicy(Policy):
    """`left | right`."""

    left: KeepPolicy
    right: KeepPolicy

    def choose(self, steps: Sequence[StepInfo], now_s: float) -> Choice:
        """What one of them keeps; of what both keep the more."""
        left, right = self.left.choose(steps, now_s), self.right.choose(steps, now_s)
        both = {step: _more(left[step], right[step]) for step in left.keys() & right.keys()}
        return _without_empty({**left, **right, **both})

    def protects(self, step: int) -> bool:
        """If one of them does."""
        return self.left.protects(step) or self.right.protects(step)

    def __repr__(self) -> str:
        return f"({self.left!r} | {self.right!r})"


@final
@dataclass(frozen=True, slots=True, repr=False)
class BothPolicies(Policy):
    """`left & right`."""

    left: KeepPolicy
    right: KeepPolicy

    def choose(self, steps: Sequence[StepInfo], now_s: float) -> Choice:
        """What both keep, and the less of it; a step of which they keep different sections is not kept."""
        left, right = self.left.choose(steps, now_s), self.right.choose(steps, now_s)
        return _without_empty({step: _less(left[step], right[step]) for step in left.keys() & right.keys()})

    def protects(self, step: int) -> bool:
        """If both do."""
        return self.left.protects(step) and self.right.protects(step)

    def __repr__(self) -> str:
        return f"({self.left!r} & {self.right!r})"


def _more(left: frozenset[str] | None, right: frozenset[str] | None) -> frozenset[str] | None:
    return None if left is None or right is None else left | right


def _less(left: frozenset[str] | None, right: frozenset[str] | None) -> frozenset[str] | None:
    if left is None or right is None:
        return right if left is None else left
    return left & right


def _without_empty(choice: Choice) -> Choice:
    return {step: kept for step, kept in choice.items() if kept is None or kept}


def _checked(policy: KeepPolicy) -> KeepPolicy:
    if isinstance(policy, type) or not isinstance(policy, KeepPolicy):
        raise InvalidOption(f"keep: expected a policy such as KeepLast(3), found {policy!r}")
    return policy


def _check_count(name: str, n: object) -> None:
    if type(n) is not int or n < 1:
        raise InvalidOption(f"{name}: expected a whole number n of at least 1, found {n!r}")


def _is_step(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
