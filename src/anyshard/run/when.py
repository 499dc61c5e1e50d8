"""When a run saves: small policies, joined with `|`. They know numbers and seconds, no saves.

A policy says two things. `is_due` goes by the number of the step alone, so all ranks find the same without a word. `is_wanted`
goes by a clock, which no two ranks share: the coordinator asks it, and all ranks then agree on the call at which they save.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from anyshard.errors import InvalidOption

_MINUTE_S = 60.0


class SavePolicy:
    """When to save. Subclasses say it by the number of the step, by time, or both; this one never does."""

    __slots__ = ()

    @property
    def goes_by_time(self) -> bool:
        """Whether `is_wanted` may ever be true, so that the ranks have to agree on a call."""
        return False

    def is_due(self, step: int) -> bool:
        """Whether this step is to be saved, by its number alone."""
        return False

    def is_wanted(self, since_s: float, *, is_saving: bool) -> bool:
        """Whether it is time for a save: `since_s` after the last one was called, which may still be under way (`is_saving`)."""
        return False

    def __or__(self, other: SavePolicy) -> SavePolicy:
        if not isinstance(other, SavePolicy):
            return NotImplemented
        return AnyOf(_parts_of(self) + tuple(part for part in _parts_of(other) if part not in _parts_of(self)))


@final
@dataclass(frozen=True, slots=True)
class EverySteps(SavePolicy):
    """Save steps offset + n, offset + 2n, ...: with n = 100 and a loop that counts from 0, steps 100, 200, ...

    `offset=-1` saves steps 99, 199, ..., the hundredth, the two hundredth of such a loop.
    """

    n: int
    offset: int = 0

    def __post_init__(self) -> None:
        if type(self.n) is not int or self.n < 1:
            raise InvalidOption(f"EverySteps: n: expected a whole number above 0, found {self.n!r}")
        if type(self.offset) is not int:
            raise InvalidOption(f"EverySteps: offset: expected a whole number, found {self.offset!r}")

    def is_due(self, step: int) -> bool:
        """See `SavePolicy`."""
        return step > self.offset and (step - self.offset) % self.n == 0


@final
@dataclass(frozen=True, slots=True)
class EveryMinutes(SavePolicy):
    """Save when `minutes` have gone by since the last save of the run was called."""

    minutes: float

    def __post_init__(self) -> None:
        value = self.minutes
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise InvalidOption(f"EveryMinutes: minutes: expected a number above 0, found {value!r}")

    @property
    def goes_by_time(self) -> bool:
        """See `SavePolicy`."""
        return True

    def is_wanted(self, since_s: float, *, is_saving: bool) -> bool:
        """See `SavePolicy`."""
        return since_s >= self.minutes * _MINUTE_S


@final
@dataclass(frozen=True, slots=True)
class Continuously(SavePolicy):
    """Save again as soon as the save before has ended: the least training that can be lost, at the price of busy storage."""

    @property
    def goes_by_time(self) -> bool:
        """See `SavePolicy`."""
        return True

    def is_wanted(self, since_s: float, *, is_saving: bool) -> bool:
        """See `SavePolicy`."""
        return not is_saving


@final
@dataclass(frozen=True, slots=True)
class AnyOf(SavePolicy):
    """Save when any of these says so; made by `|`."""

    policies: tuple[SavePolicy, ...]

    @property
    def goes_by_time(self) -> bool:
        """See `SavePolicy`."""
        return any(policy.goes_by_time for policy in self.policies)

    def is_due(self, step: int) -> bool:
        """See `SavePolicy`."""
        return any(policy.is_due(step) for policy in self.policies)

    def is_wanted(self, since_s: float, *, is_saving: bool) -> bool:
        """See `SavePolicy`."""
        return any(policy.is_wanted(since_s, is_saving=is_saving) for policy in self.policies)

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.policies))


def _parts_of(policy: SavePolicy) -> tuple[SavePolicy, ...]:
    return policy.policies if isinstance(policy, AnyOf) else (policy,)
