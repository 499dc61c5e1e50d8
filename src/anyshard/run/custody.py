"""The custody of a run: what its coordinator alone does. It holds the lease, knows the steps, says what may be saved, prunes.

The other ranks hear of it only what `Run` tells them; a process that merely looks uses it as well. Knows no app state.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeVar, final

from anyshard.commit.guard import Guards
from anyshard.commit.saved_parts import Incarnation
from anyshard.errors import AnyshardError, BlobExists, CheckpointNotFound, RunInUse
from anyshard.monitor.events import Emitter
from anyshard.options import SaveOptions
from anyshard.pending import PendingSave
from anyshard.records.names import MANIFEST, make_attempt
from anyshard.records.strict_json import encode_object
from anyshard.run.busy import BusySteps
from anyshard.run.catalog import Catalog
from anyshard.run.keeper import Keeper
from anyshard.run.lease import Lease, describe_self
from anyshard.run.policies import KeepPolicy
from anyshard.run.resume import Candidates, list_candidates
from anyshard.run.retention import PruneReport, prune
from anyshard.run.step_info import PINS_PREFIX, Condition, StepInfo, find_current, pin_key, step_prefix
from anyshard.storage.protocol import Store
from anyshard.storage.wrappers import Call, Verb, WrapperStore
from anyshard.storage.wrappers.below import StoreBelow
from anyshard.storage.wrappers.timed import TimedStore

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SHOWN: Final = 8
_THERE = (Condition.COMMITTED, Condition.DAMAGED, Condition.INCOMPLETE)


@dataclass(frozen=True, slots=True)
class Aim:
    """How a step is to be saved: where, whether over what is there, as a step of which run; what there is to warn of."""

    store: Store
    overwrite: bool = False
    run_id: str | None = None
    warnings: tuple[str, ...] = ()


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
        self._saving: list[tuple[int, PendingSave]] = []
        self._taken_s = -math.inf
        self._logged: set[str] = set()

    # ------------------------------------------------------------------------------------------------------------ to look

    def look(self) -> tuple[StepInfo, ...]:
        """All steps as they are now, but deleted ones; what is odd about them is logged once."""
        steps = tuple(one for one in self._catalog.look() if one.condition is not Condition.DELETED)
        self._warn_of_others(steps)
        return steps

    def find_run_id(self, steps: Sequence[StepInfo]) -> str | None:
        """The run that this process is at, or else the one that saved here last."""
        return self.run_id if self.run_id is not None else find_current(steps)

    def find_candidates(self, role: str = "") -> Candidates:
        """Which steps may be loaded; noted, too, for saves that come after the load."""
        self.looked_s = self._timed.now_s()
        steps = self.look()
        self._there = {one.step: one for one in steps}
        return list_candidates(steps, self.find_run_id(steps), role=role)

    def find_latest(self, role: str = "") -> StepInfo | None:
        """The step that a load would load, as far as records and listings tell; None if there is none."""
        steps = self.look()
        candidates = list_candidates(steps, self.find_run_id(steps), role=role)
        number = next((one.step for one in candidates.found if not one.fault), None)
        return next((one for one in steps if one.step == number), None)

    def note_loaded(self, step: int) -> None:
        """Go on from this step: with its run, if it is of one; steps above it may be saved over."""
        found = self._there.get(step)
        self.resumed = step
        self._own.clear()
        if found is not None and found.run_id is not None:
            self.go_on_with(found.run_id)

    def go_on_with(self, run_id: str) -> None:
        """Make this the run that steps are saved to from now on."""
        self.run_id = run_id
        self._lease.update(run_id)

    # ------------------------------------------------------------------------------------------------------------ to save

    @property
    def incarnation(self) -> Incarnation:
        """What steps in parts have to know of this process."""
        run_id = self.find_run_id(self.look()) if self.run_id is None else self.run_id
        return Incarnation(run_id, self.resumed, None if self.resumed is None else self.looked_s)

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
            self._lease.refresh()

    def aim(self, step: int, *, overwrite: bool) -> Aim:
        """How to save a step. It is claimed until `note_ended`, or until the save that `note_saving` was told of has ended.

        What stands against it is raised by the first call of the store, so that it ends the save on all ranks.
        """
        self.reap()
        below = StoreBelow(self._store, step_prefix(step))
        try:
            self._busy.claim(step, self._timeout_s)
        except AnyshardError as error:
            return Aim(_RefusedStore(below, error))
        store, there = _HeldStore(below, self._lease.check), self._there.get(step)
        is_own = step in self._own and not _has_failed(self._own[step])
        if is_own or self.resumed is None or step <= self.resumed:
            return Aim(store, overwrite, self.run_id)
        if there is None or (there.condition not in _THERE and not there.note):
            return Aim(store, overwrite=True, run_id=self.run_id)
        when = f"saved on {there.time}" if there.time else there.note or str(there.condition)
        text = f"step {step} ({when}) was there, of before the run was resumed from step {self.resumed}; it is replaced"
        return Aim(store, overwrite=True, run_id=self.run_id, warnings=(text,))

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
            self.request_prune()

    def note_published(self, step: int, run_id: str) -> None:
        """A step in parts exists."""
        if self.run_id is None:
            self.go_on_with(run_id)
        self._catalog.forget(step)
        self.request_prune()

    def reap(self) -> None:
        """Give back the claims of asynchronous saves that have ended."""
        for one in [one for one in tuple(self._saving) if one[1].is_done]:
            with suppress(ValueError):  # another thread was quicker
                self._saving.remove(one)
                self._busy.release(one[0])
                self._catalog.forget(one[0])

    # ------------------------------------------------------------------------------------------------------- to keep order

    def pin(self, step: int) -> None:
        """Keep a step from retention until `unpin`. Raises `CheckpointNotFound`."""
        found = self._catalog.look_at(step)
        if found is None or found.condition not in _THERE:
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
        """Have the background prune, once this save has ended; nothing without a policy."""
        if self._keep is not None:
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


@final
class _HeldStore(WrapperStore):
    """The store of a step, which a save gets only as long as `check` raises nothing: asked as it begins and as it commits."""

    def __init__(self, inner: Store, check: Callable[[], None]) -> None:
        super().__init__(inner)
        self._check = check

    def around(self, call: Call, run: Callable[[], T]) -> T:
        """Check before directories are made and before a record is."""
        if call.verb is Verb.PREPARE or (call.verb in (Verb.CREATE, Verb.PUT) and MANIFEST.fullmatch(call.key)):
            self._check()
        return run()

    def delete(self, keys: Sequence[str]) -> None:
        """Forward all keys at once, as many stores delete them."""
        self.inner.delete(keys)


@final
class _RefusedStore(WrapperStore):
    """The store of a step that cannot be saved now: every call says why."""

    def __init__(self, inner: Store, error: AnyshardError) -> None:
        super().__init__(inner)
        self._error = error

    def around(self, call: Call, run: Callable[[], T]) -> T:
        """Refuse."""
        raise self._error


def _has_failed(pending: PendingSave | None) -> bool:
    return pending is not None and pending.is_done and not pending.is_committed


def not_found(url: str, candidates: Candidates) -> CheckpointNotFound:
    """The error where no step of the run can be loaded."""
    advice = candidates.advice or "Run.restore_or_init begins a new run; Run.steps() lists all that is there"
    return CheckpointNotFound(f"{url}: expected a step of this run to load, found none; {advice}")


def with_metrics(options: SaveOptions, metrics: Mapping[str, float]) -> SaveOptions:
    """The options of a save that stores these metrics with the step, for `KeepBest` and for people."""
    if not metrics:
        return options
    return replace(options, user={**options.user, "metrics": {name: _store_number(value) for name, value in metrics.items()}})


def _store_number(value: object) -> int | float | str:
    """A metric as a record can hold it: JSON has no NaN and no infinity, and a loss of such must not end the training."""
    if type(value) is int:
        return value
    number = float(value)  # type: ignore[arg-type]  # whatever has a number: a tensor of one element, a NumPy scalar
    return number if math.isfinite(number) else str(number)
