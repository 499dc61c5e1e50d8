"""Which steps of a run stay, which are thinned and which go: a pure plan, with a reason for each."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from anyshard.run.policies import Choice, KeepPolicy
from anyshard.run.step_info import Condition, StepInfo, find_latest, to_unix_s


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """What is to become of the steps of a run: `thin` says which sections stay, `reasons` for every step why it is so."""

    keep: tuple[int, ...]
    thin: Mapping[int, frozenset[str]]
    delete: tuple[int, ...]
    reasons: Mapping[int, str]


def plan_retention(
    steps: Sequence[StepInfo], policy: KeepPolicy | None, *, run_id: str | None, now_s: float, busy: Collection[int] = ()
) -> RetentionPlan:
    """What `policy` (None: keep all) makes of the steps of the run `run_id`, as a catalog has found them.

    Only good steps of that run are counted, and only what is older than the newest of them is deleted or thinned, or what a
    rollback has left behind.
    """
    ours = [one for one in steps if one.condition is Condition.COMMITTED and one.run_id == run_id]
    latest = find_latest(steps, run_id)
    if policy is None or latest is None or run_id is None:
        return RetentionPlan(tuple(one.step for one in ours), {}, (), {one.step: "no policy for it" for one in steps})
    chosen = policy.choose([one for one in ours if not one.is_stale], now_s)
    fates = {one.step: _decide(one, chosen, policy, _Surroundings(steps, latest, run_id, busy)) for one in steps}
    thin = {step: fate.sections for step, fate in fates.items() if fate.sections}
    deleted = tuple(step for step, fate in fates.items() if fate.is_deleted)
    kept = tuple(one.step for one in ours if one.step not in thin and one.step not in deleted)
    return RetentionPlan(kept, thin, deleted, {step: fate.reason for step, fate in fates.items()})


@dataclass(frozen=True, slots=True)
class _Surroundings:
    steps: Sequence[StepInfo]
    latest: StepInfo
    run_id: str
    busy: Collection[int]


@dataclass(frozen=True, slots=True)
class _Fate:
    """What becomes of a step and why; `sections` are those that stay, if it is thinned."""

    reason: str
    sections: frozenset[str] = frozenset()
    is_deleted: bool = False


def _decide(one: StepInfo, chosen: Choice, policy: KeepPolicy, around: _Surroundings) -> _Fate:
    reason = next(_find_obstacles(one, policy, around), None)
    if reason is not None:
        return _Fate(reason)
    if one.is_stale:
        return _Fate(f"of before a rollback: step {around.latest.step} counts", is_deleted=True)
    if one.step not in chosen:
        return _Fate(f"not kept by {policy!r}", is_deleted=True)
    sections = chosen[one.step]
    left = one.sections if sections is None else find_left(one, sections)
    if sections is None or set(left) == set(one.sections):
        return _Fate(f"kept by {policy!r}")
    if not left:
        return _Fate("kept whole: it has none of the sections that are to stay")
    return _Fate(f"thinned by {policy!r}", frozenset(sections))


def _find_obstacles(one: StepInfo, policy: KeepPolicy, around: _Surroundings) -> Iterator[str]:
    """Why a step is left as it is whatever is chosen."""
    if one.condition is not Condition.COMMITTED:
        yield f"not counted and not deleted: {one.condition}"
    if one.run_id != around.run_id:
        yield f"of another run ({one.run_id or 'saved without a run'})"
    if one.step in around.busy:
        yield "a save is at it, or the job goes on from it"
    if one.is_pinned:
        yield "pinned"
    if one.step == around.latest.step:
        yield "the newest good step"
    if one.is_stale and policy.protects(one.step):
        yield "protected"
    if one.is_stale and not _is_left_behind(one, around):
        yield "of before a rollback by the clocks of the hosts, but not by that of the storage"


def _is_left_behind(one: StepInfo, around: _Surroundings) -> bool:
    # The times in records are those of hosts, whose clocks may differ: a job that goes on elsewhere may seem to save in the past.
    # The store's clock is one for all, but counts from the last thinning.
    return any(
        one.written_s <= other.written_s and (_is_earlier(other, one) or _is_of_job_back_before(other, one))
        for other in around.steps
        if other.run_id == around.run_id and other.condition is Condition.COMMITTED
    )


def _is_earlier(other: StepInfo, one: StepInfo) -> bool:
    """Whether another step has a lower number, and was saved later."""
    return other.step < one.step and not other.dropped and one.time_s < other.time_s


def _is_of_job_back_before(other: StepInfo, one: StepInfo) -> bool:
    """Whether the job that saved another step had gone back before this one, when this one was there."""
    back = other.resumed
    return back is not None and back.step < one.step and one.time_s <= to_unix_s(back.time)


def find_left(one: StepInfo, sections: Collection[str]) -> tuple[str, ...]:
    """The sections that a thinning to `sections` leaves of a step; a part that has none of them stays whole, unless none has."""
    if not one.parts:
        return tuple(section for section in one.sections if section in sections)
    names = [section.partition("/") for section in one.sections]
    thinned = {part for part, _, section in names if section in sections}
    left = [f"{part}/{section}" for part, _, section in names if part not in thinned or section in sections]
    return tuple(left) if thinned else ()
