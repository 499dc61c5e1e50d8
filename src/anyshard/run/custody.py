"""The custody of a run: what its coordinator alone does. It holds the lease, knows the steps, says what may be saved, prunes.

The other ranks hear of it only what `Run` tells them; a process that merely looks uses it as well. Knows no app state.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, final

from anyshard.commit.guard import Guards
from anyshard.commit.saved_parts import Incarnation
from anyshard.commit.stamp import stamp_after, utc_now
from anyshard.errors import AnyshardError, BlobExists, CheckpointNotFound, InvalidOption, RunInUse, StillPending
from anyshard.monitor.events import Emitter
from anyshard.options import SaveOptions
from anyshard.pending import PendingSave
from anyshard.records.manifest import Resumed
from anyshard.records.names import make_attempt
from anyshard.records.strict_json import encode_object
from anyshard.run.aim import THERE, Aim, HeldStore, RefusedStore, describe_replaced, find_replaceable
from anyshard.run.busy import BusySteps
from anyshard.run.catalog import Catalog
from anyshard.run.keeper import Keeper
from anyshard.run.lease import Lease, describe_self
from anyshard.run.metrics import check_metrics
from anyshard.run.policies import KeepPolicy
from anyshard.run.resume import Candidates, list_candidates
from anyshard.run.retention import PruneReport, prune
from anyshard.run.step_info import PINS_PREFIX, Condition, StepInfo, find_current, pin_key, step_prefix, to_unix_s
from anyshard.storage.protocol import Store
from anyshard.storage.wrappers.below import StoreBelow
from anyshard.storage.wrappers.timed import TimedStore

logger = logging.getLogger(__name__)

_SHOWN: Final = 8


@final
class Custody:
    """The run in `store`, as one process has it. Its methods may be called from several threads, but those that save from one."""

    def __init__(
        self, store: Store, keep: KeepPolicy | None, options: SaveOptions, *, lease_ttl_s: float, events: Emitter
    ) -> None:
        self.run_id: str | None = None  # once this process goes on with a run or has begun one
        self.resumed: int | None = None  # the step that was loaded last
        self.looked_s: float | None = None  # when that or the first save was, by the store's clock
        self._store = store
        self._timed = TimedStore(store, options.timeout_s)
        self._keep = keep
        self._timeout_s = options.timeout_s
        self._events = events
        self._catalog = Catalog(self._timed)
        self._lease = Lease(TimedStore(store, options.timeout_s), describe_self(lease_ttl_s))
        self._keeper = Keeper(self._prune_aside)
        self._busy = BusySteps()
        self.guards = Guards()
        self._there: dict[int, StepInfo] = {}  # of before the last load
        self._own: dict[int, PendingSave | None] = {}  # saved since
        self._loaded_id: str | None = None  # the run of the step that was loaded last
        self._since = ""  # when it was, as records have it, if it is a step of the run
        self._after = ""  # the latest time of any step that was seen here, or saved
        self._claimed: list[int] = []  # the step that was loaded last, until there is one that was saved since
        self._may_prune = False  # whether the run is one that this process has begun or gone on with
        self._saving: list[tuple[int, PendingSave]] = []
        self._taken_s = -math.inf
        self._logged: set[str] = set()

    # ------------------------------------------------------------------------------------------------------------ to look

    def look(self) -> tuple[StepInfo, ...]:
        """All steps as they are now, but deleted ones; what is odd about them is logged once."""
        return self._drop_deleted(self._catalog.look())

    def find_run_id(self, steps: Sequence[StepInfo]) -> str | None:
        """The run that this process is at, or else the one that saved here last."""
        return self.run_id if self.run_id is not None else find_current(steps)

    def find_candidates(self, role: str = "") -> Candidates:
        """Which steps may be loaded; noted, too, for saves that come after the load."""
        self.looked_s = self._timed.now_s()
        found = self._catalog.look()
        self._there = {one.step: one for one in found}
        self._note_times(found)
        steps = self._drop_deleted(found)
        return list_candidates(steps, self.find_run_id(steps), role=role)

    def find_latest(self, role: str = "") -> StepInfo | None:
        """The step that a load would load, as far as records and listings tell; None if there is none."""
        steps = self.look()
        candidates = list_candidates(steps, self.find_run_id(steps), role=role)
        number = next((one.step for one in candidates.found if not one.fault), None)
        return next((one for one in steps if one.step == number), None)

    def note_loaded(self, step: int) -> None:
        """Go on from this step: with its run, if it is of one; steps above it that were there may be saved over.

        Retention leaves it alone until a step is committed that was saved after this.
        """
        found = self._there.get(step)
        self.resumed = step
        self._own.clear()
        self._loaded_id, self._since = (None if found is None else found.run_id), ""
        self._release_resumed()
        with suppress(StillPending):  # retention is at it: then it is to go
            self._busy.claim(step, 0)
            self._claimed.append(step)
        if self._loaded_id is not None:
            self.go_on_with(self._loaded_id)
            self._may_prune = True
            self._after = self._since = stamp_after(utc_now(), [self._after])

    def go_on_with(self, run_id: str) -> None:
        """Make this the run that steps are saved to from now on."""
        self.run_id = run_id
        self._lease.update(run_id)

    # ------------------------------------------------------------------------------------------------------------ to save

    @property
    def incarnation(self) -> Incarnation:
        """What steps in parts have to know of this process."""
        run_id = self.run_id
        if run_id is None:  # that of the steps which are there, for all worlds have to agree on one
            steps = self.look()
            self._note_times(steps)
            run_id = self.find_run_id(steps)
        since_s = None if self.resumed is None else self.looked_s
        pinned = frozenset(one.step for one in self._there.values() if one.is_pinned)
        return Incarnation(run_id, self.resumed, since_s, since=self._since, after=self._take_time(), pinned=pinned)

    def take_lease(self) -> None:
        """Return holding the lease of the run. Raises `RunInUse`."""
        if not self._lease.is_held:
            self._lease.take(self.run_id or "")
            self._taken_s = self._timed.now_s()

    def begin_saving(self) -> None:
        """As `take_lease`, and know which run it is about: a new one, if nothing was loaded."""
        self.take_lease()
        if self.looked_s is None:
            there = self.find_candidates()
            if there.found:
                logger.warning(
                    "%s: steps are here and none was loaded: a new run begins beside them, which leaves them alone and passes "
                    "over them from now on; Run.restore_or_init goes on with what is there",
                    self._store.url,
                )
        if self.run_id is None:
            self.go_on_with(make_attempt())
            self._may_prune = True
            self._lease.refresh()

    def aim(self, step: int, *, overwrite: bool, metrics: Mapping[str, float]) -> Aim:
        """How to save a step. It is claimed until `note_ended`, or until the save that `note_saving` was told of has ended.

        What stands against it is raised by the first call of the store, so that it ends the save on all ranks.
        """
        self.reap()
        below = StoreBelow(self._store, step_prefix(step))
        try:
            checked = check_metrics(metrics)
            self._refuse_lower(step)
            self._busy.claim(step, self._timeout_s)
            left = None if overwrite else self._find_left_behind(step)
        except AnyshardError as error:
            return Aim(RefusedStore(below, error))
        return Aim(
            HeldStore(below, self._lease.check),
            overwrite or left is not None,
            self.run_id,
            warnings=() if left is None else (describe_replaced(left, self.resumed),),
            after=self._take_time(),
            resumed=Resumed(self.resumed, self._since) if self.resumed is not None and self._since else None,
            metrics=checked,
        )

    def _refuse_lower(self, step: int) -> None:
        """Raise `InvalidOption` below the step that this process goes on from, which would count as of before a rollback."""
        saved = [own for own, pending in self._own.items() if not _has_failed(pending)]
        highest = max((*saved, -1 if self.resumed is None else self.resumed), default=-1)
        if step < highest:
            verb = "saved" if highest in saved else "loaded"
            raise InvalidOption(
                f"{self._store.url}: step: expected {highest} or more, since that one was {verb}, found {step}: the numbers of a "
                "run rise. To go back, load an earlier step first (Run.load(step=...)); to begin anew, use another directory"
            )

    def _find_left_behind(self, step: int) -> StepInfo | None:
        """What is replaced without being asked for, if anything: what this run itself has left there before its rollback.

        Nothing that came since, that this process has saved, or that is of another run. Raises `CheckpointExists` where that is
        the reason, or that the step is pinned.
        """
        before = self._there.get(step)
        is_own = step in self._own and not _has_failed(self._own[step])
        if before is None or is_own or self.resumed is None or step <= self.resumed:
            return None
        found = self._catalog.look_at(step)
        if found is None or (found.run_id, found.time) != (before.run_id, before.time):
            return None
        return find_replaceable(found, run_ids=(self.run_id, self._loaded_id), resumed=self.resumed)

    def _take_time(self) -> str:
        """The time after which the next step is to be stamped; the one after that still later, however late this clock is."""
        after, self._after = self._after, stamp_after(utc_now(), [self._after])
        return after

    def note_saving(self, step: int, pending: PendingSave) -> None:
        """An asynchronous save of a step has begun."""
        self._own[step] = pending
        self._saving.append((step, pending))
        self.request_prune(pending)

    def note_ended(self, step: int, *, is_committed: bool) -> None:
        """A save of a step that was waited for has ended, or one that did not begin."""
        self._busy.release(step)
        self._catalog.forget(step)
        if is_committed:
            self._own[step] = None
            self._release_resumed()
            self.request_prune()

    def note_published(self, step: int, run_id: str) -> None:
        """A step in parts exists."""
        if self.run_id is None:
            self.go_on_with(run_id)
        self._own[step] = None
        self._release_resumed()
        self._catalog.forget(step)
        try:
            self._note_home(step)
        except AnyshardError as error:
            logger.warning("%s: could not look at step %d once it was published: %s", self._store.url, step, error)
        self.request_prune()

    def _note_home(self, step: int) -> None:
        """Note when a step that was just published was, and whether its run is ours to prune.

        It is if nothing else of it is there, or if a world that has saved a part has gone on from a step of it. Else a new job
        drives the run of an earlier one, whose steps it does not know.
        """
        found = self._catalog.look_at(step)
        self._note_times([] if found is None else [found])
        if self._may_prune or self._keep is None:
            return
        ours = [one for one in self._catalog.look(trust=True) if one.run_id == self.run_id]
        is_first = all(one.step == step for one in ours if one.condition is not Condition.DELETED)
        self._may_prune = is_first or (found is not None and found.resumed is not None)
        if not self._may_prune:
            self._warn_once(
                "steps of an earlier job of this run are here and nothing of it was loaded: retention leaves all as it is; "
                "Run.prune() applies the policy all the same"
            )

    def reap(self) -> None:
        """Give back the claims of asynchronous saves that have ended."""
        for one in [one for one in tuple(self._saving) if one[1].is_done]:
            with suppress(ValueError):  # another thread was quicker
                self._saving.remove(one)
                self._busy.release(one[0])
                self._catalog.forget(one[0])
                if one[1].is_committed and self._own.get(one[0]) is one[1]:
                    self._release_resumed()

    # ------------------------------------------------------------------------------------------------------- to keep order

    def pin(self, step: int) -> None:
        """Keep a step from retention until `unpin`. Raises `CheckpointNotFound`."""
        found = self._catalog.look_at(step)
        if found is None or found.condition not in THERE:
            raise CheckpointNotFound(f"{self._store.url}: expected a step {step} to pin, found none; see Run.steps()")
        self._timed.prepare([PINS_PREFIX])
        with suppress(BlobExists):
            self._timed.create(pin_key(step), encode_object({"step": step}) + b"\n", token=make_attempt())

    def unpin(self, step: int) -> None:
        """Let retention have a step again; one that is not pinned stays as it is."""
        self._timed.delete([pin_key(step)])

    def prune(self, *, dry_run: bool) -> PruneReport:
        """Delete and thin what the policy does not keep, and clean what saves that died have left."""
        self.reap()
        run_id = self.find_run_id(self._catalog.look()) if self.run_id is None else self.run_id
        settle = partial(self.guards.settle, required=False, events=self._events)
        return prune(
            self._catalog,
            self._keep,
            run_id=run_id,
            busy=self._busy,
            dead_before_s=self._taken_s,
            dry_run=dry_run,
            settle=settle,
            events=self._events,
        )

    def request_prune(self, pending: PendingSave | None = None) -> None:
        """Have the background prune, once this save is committed; nothing without a policy, or in a run of others."""
        if self._keep is not None and self._may_prune:
            self._keeper.request(pending)

    def close(self, timeout_s: float) -> None:
        """End what goes on in the background, as far as it ends in time, and give the lease back."""
        self._keeper.close(timeout_s)
        self._lease.release()

    def abandon(self) -> None:
        """Hold the lease no longer than its time; see `Lease.abandon`."""
        self._lease.abandon()

    def check_lease(self) -> None:
        """For a step in parts, right before it is published: take the lease, or see that it is still held."""
        self._lease.take(self.run_id or "")  # not noting when: other worlds may have saved their parts before
        self._lease.check()

    def _prune_aside(self) -> None:
        try:
            self._lease.check()
        except RunInUse as error:
            logger.warning("retention is left to the writer that has the lease: %s", error)
            return
        for warning in self.prune(dry_run=False).warnings:
            self._warn_once(warning)

    def _release_resumed(self) -> None:
        with suppress(IndexError):  # another thread was quicker, or there is none
            self._busy.release(self._claimed.pop())

    def _note_times(self, steps: Sequence[StepInfo]) -> None:
        """Know of the latest of the times in the records of these steps."""
        latest = max((one for one in steps if one.time), key=lambda one: one.time_s, default=None)
        if latest is not None and (not self._after or latest.time_s > to_unix_s(self._after)):
            self._after = latest.time

    def _drop_deleted(self, found: Sequence[StepInfo]) -> tuple[StepInfo, ...]:
        steps = tuple(one for one in found if one.condition is not Condition.DELETED)
        self._warn_of_others(steps)
        return steps

    def _warn_of_others(self, steps: Sequence[StepInfo]) -> None:
        current = self.find_run_id(steps)
        others = [one.step for one in steps if one.condition is Condition.COMMITTED and one.run_id != current]
        if others:
            more = ", ..." if len(others) > _SHOWN else ""
            shown = ", ".join(map(str, others[:_SHOWN])) + more
            self._warn_once(f"steps of another run are here ({shown}): they are passed over, and never deleted by this one")

    def _warn_once(self, warning: str) -> None:
        if warning not in self._logged:
            self._logged.add(warning)
            logger.warning("%s: %s", self._store.url, warning)


def _has_failed(pending: PendingSave | None) -> bool:
    return pending is not None and pending.is_done and not pending.is_committed


def not_found(url: str, candidates: Candidates) -> CheckpointNotFound:
    """The error where no step of the run can be loaded."""
    advice = candidates.advice or "Run.restore_or_init begins a new run; Run.steps() lists all that is there"
    return CheckpointNotFound(f"{url}: expected a step of this run to load, found none; {advice}")
