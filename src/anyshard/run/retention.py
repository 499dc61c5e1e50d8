"""Retention: the pass over a run that deletes, thins and cleans as planned, by the rules of `commit` and no others.

What a pass never touches: files and directories that anyshard did not make, steps of other runs, damaged and incomplete ones,
pinned ones, those that saves are at, and the one that the job goes on from. The newest good step always stays whole; all that is
kept is looked at once more before anything goes, and what has changed since then is not what goes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, final

from anyshard.commit.cleaning import DAY_S, TOMBSTONE_S, CleanRules, clean_step
from anyshard.commit.guard import Guards
from anyshard.commit.thinning import thin_step
from anyshard.commit.tombstone import delete_step
from anyshard.errors import AnyshardError, StorageStuck, StorageUnavailable, StorageUnguarded
from anyshard.monitor.events import SILENT, Emitter
from anyshard.run.busy import BusySteps
from anyshard.run.catalog import Catalog
from anyshard.run.policies import KeepPolicy
from anyshard.run.retention_plan import RetentionPlan, find_left, plan_retention
from anyshard.run.step_info import Condition, StepInfo, find_latest, step_prefix
from anyshard.storage.protocol import Store

logger = logging.getLogger(__name__)

GRACE_S: Final = 3600.0  # that superseded files stay for their readers

_MARGIN_S = 1.0  # by which a save has to be older than the incarnation that takes it for dead


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What a pass did to the run at `url` (with `dry_run`: would do).

    `deleted`, `thinned` and `kept` are numbers of steps, `reasons` say why, by step; leftovers went from those in `cleaned`.
    `nbytes` are those that became free, leftovers not counted. `warnings` say what could not be done, and what is in the way; the
    next pass tries again.
    """

    url: str
    deleted: tuple[int, ...]
    thinned: tuple[int, ...]
    kept: tuple[int, ...]
    cleaned: tuple[int, ...]
    nbytes: int
    warnings: tuple[str, ...]
    dry_run: bool
    reasons: Mapping[int, str] = field(default_factory=dict)

    def __str__(self) -> str:
        done, was = ("would free", "would be") if self.dry_run else ("freed", "was")
        fates = [(step, "deleted") for step in self.deleted] + [(step, "thinned") for step in self.thinned]
        lines = [f"step {step} {was} {fate}: {self.reasons.get(step, '')}" for step, fate in sorted(fates)]
        lines += [f"step {step} is kept: {self.reasons.get(step, '')}" for step in self.kept]
        head = f"{self.url}: {done} {self.nbytes / 1e6:.1f} MB"
        return "\n  ".join([head, *(line.removesuffix(": ") for line in lines), *self.warnings])


def prune(  # noqa: PLR0913 - whose steps, by which rule, and the means
    catalog: Catalog,
    policy: KeepPolicy | None,
    *,
    run_id: str | None,
    busy: BusySteps | None = None,
    dead_before_s: float = -math.inf,
    dry_run: bool = False,
    settle: Callable[[Store], Store] | None = None,
    events: Emitter = SILENT,
) -> PruneReport:
    """Apply `policy` to the run `run_id` and clean what saves left behind; what was done, and in `warnings` what could not be.

    Steps go one after the other, each by its tombstone first, so a pass may die anywhere and the next one goes on. What a dead
    save has left goes when nothing of it was written for a day, or since `dead_before_s` by the store's clock: when this
    incarnation of the job took over. `settle` finds out whether the store is `guarded`.

    Raises the store's error if the run cannot be looked at; then nothing was changed.
    """
    steps = catalog.look(trust=True)
    now_s = catalog.store.now_s()
    busy = BusySteps() if busy is None else busy
    plan = plan_retention(steps, policy, run_id=run_id, now_s=now_s, busy=busy)
    if plan.delete or plan.thin:  # what is kept has to be there, and others may have deleted, too
        steps = catalog.look()
        plan = plan_retention(steps, policy, run_id=run_id, now_s=now_s, busy=busy)
    way = settle or partial(Guards().settle, required=False)
    work = _Pass(catalog, {one.step: one for one in steps}, run_id, busy, dry_run=dry_run, settle=way, events=events)
    work.warn(*_describe_strangers(steps, run_id))
    if plan.delete or plan.thin:
        work.delete_and_thin(plan, find_latest(steps, run_id))
    work.clean(dead_before_s)
    gone = {*work.deleted, *work.thinned}
    kept = tuple(one.step for one in steps if one.condition is Condition.COMMITTED and one.step not in gone)
    done = (tuple(work.deleted), tuple(work.thinned), kept, tuple(work.cleaned))
    return PruneReport(catalog.store.url, *done, work.nbytes, tuple(work.warnings), dry_run, plan.reasons)


def _describe_strangers(steps: Sequence[StepInfo], run_id: str | None) -> list[str]:
    """Lines on what is in the directory of the run and does not belong to it, or cannot be counted."""
    others = [str(one.step) for one in steps if one.condition is Condition.COMMITTED and one.run_id != run_id]
    lines = [f"step {one.step} is {one.condition} and stays: {one.note}" for one in steps if one.condition in _BROKEN]
    if others:
        lines.append(f"steps of another run are not counted and stay: {', '.join(others)}; use a directory for each run")
    return lines


_BROKEN: Final = frozenset({Condition.DAMAGED, Condition.INCOMPLETE})


@final
@dataclass(slots=True)
class _Pass:
    """One pass: what it has done so far. An error of one step is a warning; a store that does not answer ends the pass."""

    catalog: Catalog
    infos: Mapping[int, StepInfo]
    run_id: str | None
    busy: BusySteps
    dry_run: bool
    settle: Callable[[Store], Store]
    events: Emitter
    deleted: list[int] = field(default_factory=list)
    thinned: list[int] = field(default_factory=list)
    cleaned: list[int] = field(default_factory=list)
    nbytes: int = 0
    warnings: list[str] = field(default_factory=list)
    is_over: bool = False
    is_unguarded: bool = False

    def warn(self, *lines: str) -> None:
        """Note what whoever reads the report should know."""
        self.warnings += lines

    def delete_and_thin(self, plan: RetentionPlan, latest: StepInfo | None) -> None:
        """Do what is planned, if the newest good step is what it was taken for."""
        assert latest is not None  # or nothing would be planned
        if not self._try(latest.step, "look at", lambda: self._is_whole(latest)):
            return
        for step in plan.delete:
            info = self.infos[step]
            if self._change(info, "delete", partial(self._delete, info)):
                self.deleted.append(step)
                self.nbytes += info.nbytes
        for step, sections in plan.thin.items():
            if self.is_unguarded:  # and would refuse every one
                return
            info = self.infos[step]
            if self._change(info, "thin", partial(self._thin, info, sections)):
                self.thinned.append(step)
                left = set(find_left(info, sections))
                self.nbytes += sum(nbytes for section, nbytes in info.section_nbytes.items() if section not in left)

    def clean(self, dead_before_s: float) -> None:
        """Remove leftovers of saves, deletes and thinnings of this run, and tombstones whose time is over."""
        now_s = self.catalog.store.now_s()
        for info in self.infos.values():
            is_ours = info.run_id == self.run_id or (info.condition is Condition.PENDING and not info.generation)
            is_expired = info.condition is Condition.DELETED and now_s - info.written_s >= TOMBSTONE_S
            is_known = info.condition not in _BROKEN and info.step not in self.deleted
            if is_ours and is_known and (info.has_leftovers or is_expired):
                self._try(info.step, "clean", partial(self._clean, info, dead_before_s))

    def _is_whole(self, latest: StepInfo) -> bool:
        now = self.catalog.look_at(latest.step)
        is_whole = now is not None and now.condition is Condition.COMMITTED and now.attempt == latest.attempt
        if not is_whole:
            found = "nothing" if now is None else f"{now.condition} {now.note}".rstrip()
            self.warn(f"nothing was deleted: expected step {latest.step}, the newest good one, to be whole, found {found}")
        return is_whole

    def _change(self, info: StepInfo, verb: str, change: Callable[[], object]) -> bool:
        """Change a step that nobody is at, that is not pinned, and that is what it was taken for; whether it was done."""
        with self.busy.holding(info.step) as is_free:
            if not is_free or self.is_over:
                return False
            return self._try(info.step, verb, lambda: self._is_unchanged(info) and (self.dry_run or _done(change)))

    def _is_unchanged(self, info: StepInfo) -> bool:
        now = self.catalog.look_at(info.step)
        if now is None or now.is_pinned:
            return False
        is_same = (now.condition, now.generation, now.attempt) == (info.condition, info.generation, info.attempt)
        if not is_same:
            self.warn(f"step {info.step} was left alone: it has changed since this pass began ({now.condition} now)")
        return is_same

    def _delete(self, info: StepInfo) -> None:
        try:
            delete_step(self.catalog.store_of(info.step), generation=info.generation, settle=self.settle, events=self.events)
        finally:
            self.catalog.forget(info.step)

    def _thin(self, info: StepInfo, sections: frozenset[str]) -> None:
        try:
            thin_step(
                self.catalog.store_of(info.step),
                sections,
                generation=info.generation,
                settle=self.settle,
                events=self.events,
            )
        finally:
            self.catalog.forget(info.step)

    def _clean(self, info: StepInfo, dead_before_s: float) -> bool:
        with self.busy.holding(info.step) as is_free:
            if not is_free:
                return False
            # Of now, for the pass may have taken long. Parts are saved by jobs that take no lease from each other.
            age_s = DAY_S if info.parts else self.catalog.store.now_s() - dead_before_s + _MARGIN_S
            grace_s = 0.0 if info.condition is Condition.DELETED and not info.parts else GRACE_S  # a tombstone has told readers
            rules = CleanRules(max(0.0, min(DAY_S, age_s)), grace_s, dry_run=self.dry_run)
            done = clean_step(self.catalog.store_of(info.step), rules, settle=self.settle, events=self.events)
            self.catalog.forget(info.step)
            if done.removed:
                self.cleaned.append(info.step)
            self.warn(*(f"step {info.step}: {warning}" for warning in done.warnings))
            if not self.dry_run and self.catalog.look_at(info.step) is None:
                self.catalog.store.delete([step_prefix(info.step)])  # if it is an empty directory
        return bool(done.removed)

    def _try(self, step: int, verb: str, run: Callable[[], bool]) -> bool:
        """What `run` says; false with a warning if it fails, and once the store does not answer."""
        if self.is_over:
            return False
        try:
            return run()
        except AnyshardError as error:
            self.is_over = isinstance(error, (StorageStuck, StorageUnavailable))
            self.is_unguarded = isinstance(error, StorageUnguarded)
            self.warn(f"could not {verb} step {step}: {error}" + ("; the pass ends here" if self.is_over else ""))
            return False


def _done(change: Callable[[], object]) -> bool:
    change()
    return True
