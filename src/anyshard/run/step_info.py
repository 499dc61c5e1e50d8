"""What is known of a step of a run, and which of them counts: facts and pure rules, without a store."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from anyshard.errors import InvalidOption
from anyshard.records.manifest import Resumed

STEP = re.compile(r"step_(?P<step>0|[1-9][0-9]{0,17})")
PINS_PREFIX = "pins/"
_MAX_STEP = 10**18
BEING_WRITTEN = "its record is being written"  # or was cut: the note of a step that may be the only one there is

_PIN = re.compile(rf"{PINS_PREFIX}{STEP.pattern}\.json")


class Condition(enum.StrEnum):
    """What a look at a step found."""

    COMMITTED = "committed"  # and all files are there
    DELETED = "deleted"
    PENDING = "pending"  # a save that has not ended, or never will, or parts that are not published
    DAMAGED = "damaged"  # the record cannot be used
    INCOMPLETE = "incomplete"  # files that the record names are missing


_RECORDED = (Condition.COMMITTED, Condition.INCOMPLETE)  # it was committed, and its record can be read


@dataclass(frozen=True, slots=True)
class StepInfo:
    """One step of a run, as it was when it was looked at.

    `generation`, `attempt`, `run_id`, `time` are those of the newest record (0, "", None, "" without one that can be read).
    `sections` are there, `dropped` were before it was thinned; those of a step in `parts` are named `<role>/<section>`. Of a
    pending or deleted step `parts` are those that are there unpublished. `nbytes` is what all its files take, `section_nbytes`
    the blobs of each section. `written_s` is when the newest record, or without one the newest file, was written by the store's
    clock. `note` says what is wrong, if anything is. `is_stale`: it is of before a rollback. `has_leftovers`: files are there
    that no reader needs. `resumed`: where the job that saved it had gone on from.
    """

    step: int
    url: str
    condition: Condition
    generation: int = 0
    attempt: str = ""
    run_id: str | None = None
    time: str = ""
    sections: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    nbytes: int = 0
    note: str = ""
    is_stale: bool = False
    is_pinned: bool = False
    section_nbytes: Mapping[str, int] = field(default_factory=dict)
    written_s: float = 0.0
    has_leftovers: bool = False
    resumed: Resumed | None = None

    @property
    def time_s(self) -> float:
        """`time` as Unix time; 0 without a record."""
        return to_unix_s(self.time) if self.time else 0.0

    @property
    def is_good(self) -> bool:
        """Whether it is committed, all of it is there, and no rollback has left it behind."""
        return self.condition is Condition.COMMITTED and not self.is_stale


def to_unix_s(time: str) -> float:
    """A time of a record as Unix time."""
    return datetime.fromisoformat(time).timestamp()


def step_prefix(step: int) -> str:
    """The prefix of a step's files below the run: never padded, so that a number has one name."""
    return f"step_{step}/"


def parse_step(prefix: str) -> int | None:
    """The number of the step with this prefix, None if it is none of a step."""
    match = STEP.fullmatch(prefix.removesuffix("/"))
    return int(match["step"]) if match and prefix.endswith("/") else None


def pin_key(step: int) -> str:
    """The key below the run whose presence pins a step."""
    return f"{PINS_PREFIX}step_{step}.json"


def parse_pin(key: str) -> int | None:
    """The number of the step that this key pins, None if it is no pin."""
    match = _PIN.fullmatch(key)
    return int(match["step"]) if match else None


def find_current(steps: Sequence[StepInfo]) -> str | None:
    """The id of the run that saved last here: that of the committed step with the latest time, of equal ones the highest step."""
    committed = [one for one in steps if one.condition is Condition.COMMITTED]
    return max(committed, key=lambda one: (one.time_s, one.step)).run_id if committed else None


def mark_stale(steps: Sequence[StepInfo]) -> tuple[StepInfo, ...]:
    """The same steps in rising order; those that a rollback of their run has left behind are stale.

    That shows in a lower number that was saved later, or in a later step whose job had gone on from a lower number.
    """
    latest_s: dict[str, float] = {}
    returns = {(one.run_id, one.resumed) for one in steps if one.resumed is not None and one.condition in _RECORDED}
    resumed = [(run_id, back.step, to_unix_s(back.time)) for run_id, back in returns if back is not None]
    marked = []
    for one in sorted(steps, key=lambda one: one.step):
        is_stale = False
        if one.condition is Condition.COMMITTED and one.run_id is not None:
            time_s = one.time_s
            is_stale = time_s < latest_s.get(one.run_id, time_s) or any(
                run_id == one.run_id and step < one.step and time_s <= back_s for run_id, step, back_s in resumed
            )
            latest_s[one.run_id] = max(time_s, latest_s.get(one.run_id, time_s))
        marked.append(replace(one, is_stale=is_stale))
    return tuple(marked)


def find_latest(steps: Sequence[StepInfo], run_id: str | None) -> StepInfo | None:
    """The good step of a run with the highest number; a thinned one only if no other is good. None if there is none."""
    good = [one for one in steps if one.is_good and one.run_id == run_id]
    return max(good, key=lambda one: (not one.dropped, one.step), default=None)


def check_step(step: object) -> int:
    """A number that a step may have."""
    if isinstance(step, bool) or not hasattr(step, "__index__") or not 0 <= step.__index__() < _MAX_STEP:
        raise InvalidOption(f"step: expected a whole number, 0 or more and below 10^18, found {step!r}")
    return int(step.__index__())
