"""Loading the newest good step: which steps come into question, in which order, and what an error of loading one of them means.

Every rank goes through the same list and meets the same errors, so all come to the same step without a further word.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from anyshard.errors import (
    AnyshardError,
    BlobNotFound,
    CheckpointDamaged,
    CheckpointNotFound,
    CheckpointReplaced,
    LoadInterrupted,
    NotACheckpoint,
    OperationFailed,
)
from anyshard.reports import LoadReport
from anyshard.run.step_info import BEING_WRITTEN, Condition, StepInfo

logger = logging.getLogger(__name__)

_DAMAGE = (CheckpointDamaged, NotACheckpoint, CheckpointNotFound, CheckpointReplaced, BlobNotFound)
_DAMAGE_NAMES = frozenset(kind.__name__ for kind in _DAMAGE)
_FAULTY = (Condition.DAMAGED, Condition.INCOMPLETE)
_MAX_REASON = 1000  # characters
_UNDEFINED = "The app state is undefined now, since a step was loaded in part. Load a checkpoint in full before you use it"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A step that may be loaded; with a `fault` it cannot be, and that is why."""

    step: int
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The steps that come into question, the newest first; with none `advice` says what there is instead."""

    found: tuple[Candidate, ...]
    advice: str = ""

    def encode(self) -> bytes:
        """As JSON, for the other ranks."""
        return json.dumps([[[one.step, one.fault] for one in self.found], self.advice]).encode("ascii")


def decode_candidates(data: bytes) -> Candidates:
    """What the coordinator has told."""
    found, advice = json.loads(data)
    return Candidates(tuple(Candidate(step, fault) for step, fault in found), advice)


class Load(Protocol):
    """Loads one step. With `verify` and `strict` instead of what the options say, if they are not None."""

    def __call__(self, step: int, *, verify: Literal["first"] | None, strict: bool | None) -> LoadReport: ...


def list_candidates(steps: Sequence[StepInfo], run_id: str | None, *, role: str = "") -> Candidates:
    """The steps of the run that are not of before a rollback, the newest first.

    Whole ones come before thinned ones. Without a role only steps that are not in parts, with one only those that have its part.
    Steps with damage or an unfinished save, of which nobody can tell whose they are, are among them as faults.
    """
    own = [one for one in steps if one.run_id == run_id and not one.is_stale and one.condition in (Condition.COMMITTED, *_FAULTY)]
    last_s = max((one.time_s for one in own), default=0.0)
    lost = [one for one in steps if one.condition in _FAULTY and one.run_id != run_id and _may_be_last(one, last_s)]
    fit = [one for one in (*own, *lost) if (role in one.parts if role else not one.parts) or one.condition in _FAULTY]
    newest = max((one.step for one in fit), default=math.inf)
    unfinished = [one for one in steps if one.condition is Condition.PENDING and (one.step > newest or one.note == BEING_WRITTEN)]
    ordered = sorted((*fit, *unfinished), key=lambda one: (not one.dropped, one.step), reverse=True)
    found = tuple(Candidate(one.step, "" if one.is_good else one.note or "only an unfinished save is there") for one in ordered)
    return Candidates(found, "" if found else _advise(own, role))


def _may_be_last(one: StepInfo, last_s: float) -> bool:
    """Whether a step with a fault, not known to be of this run, may be what was saved last: one of another run that is newer."""
    return one.run_id is None or one.time_s > last_s


def _advise(own: Sequence[StepInfo], role: str) -> str:
    roles = sorted({part for one in own for part in one.parts})
    if roles:
        return f"its steps are in parts: pass role= one of {', '.join(roles)}"
    return f"none of its steps has a part {role!r}: load without role=" if own and role else ""


def load_newest(candidates: Sequence[Candidate], load: Load, *, url: str) -> tuple[int, LoadReport]:
    """Load the first of the candidates that is whole; its step and the report, which names those that were skipped.

    Damage leads to the next one; every other error is raised. If tensors may have changed before the damage was found, the step
    is tried once more with all bytes checked first, for only that tells every rank what is wrong; and an older step then has to
    fill everything (`strict`), or nobody could say what the app state holds. With no whole step among them: `CheckpointDamaged`,
    or `LoadInterrupted` if the app state is undefined now.
    """
    skipped: list[tuple[int, str]] = []
    has_touched = False
    for candidate in candidates:
        reason = candidate.fault
        if not reason:
            try:
                report = _load_twice(candidate.step, load, strict=True if has_touched else None)
                return candidate.step, _tell_skipped(report, skipped)
            except _TouchedError as error:
                has_touched, reason = True, error.reason
            except AnyshardError as error:
                if not is_damage(error):
                    _note_skipped(error, skipped, has_touched=has_touched)
                    raise
                reason = describe(error)
        skipped.append((candidate.step, reason))
        logger.warning("%s: step %d is skipped: %s", url, candidate.step, reason)
    raise _make_hopeless(url, skipped, has_touched=has_touched)


class _TouchedError(Exception):
    """A step turned out to be damaged when tensors had changed already."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def _load_twice(step: int, load: Load, *, strict: bool | None) -> LoadReport:
    try:
        return load(step, verify=None, strict=strict)
    except LoadInterrupted as error:
        if not may_be_damage(error):
            raise
        logger.warning("step %d is loaded once more, with all bytes checked first: %s", step, describe(error))
    try:
        return load(step, verify="first", strict=strict)
    except AnyshardError as error:
        if not is_damage(error):
            error.add_note(_UNDEFINED)
            raise
        raise _TouchedError(describe(error)) from error


def is_damage(error: BaseException) -> bool:
    """Whether a load failed for the step itself, in a way that another step need not share; the same on all ranks."""
    if isinstance(error, LoadInterrupted):
        return False
    return isinstance(error, _DAMAGE) or (isinstance(error, OperationFailed) and _are_all_of(error, _DAMAGE_NAMES))


def may_be_damage(error: LoadInterrupted) -> bool:
    """Whether a load that has touched the app state may have failed so: ranks know no more of each other. The same on all."""
    if isinstance(error, OperationFailed):
        return _are_all_of(error, _DAMAGE_NAMES | {LoadInterrupted.__name__})
    return error.__cause__ is not None and is_damage(error.__cause__)


def _are_all_of(error: OperationFailed, kinds: Collection[str]) -> bool:
    """Whether the ranks that failed all did so with an error of these kinds: each says "phase: kind: message"."""
    found = [(*text.split(": ", 2), "", "")[1] for text in error.failures.values()]
    return bool(found) and all(kind in kinds for kind in found)


def describe(error: BaseException) -> str:
    """An error in a line, the same on all ranks."""
    lines = error.failures.items() if isinstance(error, OperationFailed) else ()
    text = "; ".join(f"rank {rank}: {text}" for rank, text in sorted(lines)) or f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:_MAX_REASON]


def _tell_skipped(report: LoadReport, skipped: Sequence[tuple[int, str]]) -> LoadReport:
    warnings = tuple(f"step {step} was skipped: {reason}" for step, reason in skipped)
    return replace(report, skipped=tuple(skipped), warnings=report.warnings + warnings)


def _note_skipped(error: BaseException, skipped: Sequence[tuple[int, str]], *, has_touched: bool) -> None:
    for step, reason in skipped:
        error.add_note(f"before that step {step} was skipped: {reason}")
    if has_touched:
        error.add_note(_UNDEFINED)


def _make_hopeless(url: str, skipped: Sequence[tuple[int, str]], *, has_touched: bool) -> AnyshardError:
    lines = "".join(f"\n  step {step}: {reason}" for step, reason in skipped)
    text = f"{url}: expected a whole step to load, found {len(skipped)} that are all damaged:{lines}\n"
    if has_touched:
        return LoadInterrupted(text + _UNDEFINED)
    return CheckpointDamaged(f"{text}Nothing has changed. Load another step by its number, or copy one from where it is whole")
