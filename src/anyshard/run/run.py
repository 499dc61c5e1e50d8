"""`Run`: the steps of one training run in one directory, from the first save to the last.

What only the coordinator does is in `custody`; here is what all ranks do together, and what they tell each other for it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Self, final

from anyshard import _api
from anyshard.checkpoint import Checkpoint
from anyshard.coord.summons import Kind
from anyshard.errors import AnyshardError, KeyValueStoreLost, RankMissing
from anyshard.monitor.events import Sink
from anyshard.options import LoadOptions, SaveOptions
from anyshard.pending import PendingSave
from anyshard.reports import LoadReport, SaveReport
from anyshard.run.aim import Aim
from anyshard.run.custody import Custody, not_found
from anyshard.run.in_flight import InFlight
from anyshard.run.lease import TTL_S
from anyshard.run.means import RunMeans, RunSettings, check_kind
from anyshard.run.metrics import with_metrics
from anyshard.run.pace import Pace
from anyshard.run.parts import SplitStep, open_parts
from anyshard.run.policies import KeepPolicy
from anyshard.run.preemption import Preemption
from anyshard.run.resume import Candidate, Candidates, decode_candidates, load_newest
from anyshard.run.retention import PruneReport
from anyshard.run.step_info import StepInfo, check_step
from anyshard.run.when import SavePolicy
from anyshard.storage.protocol import Store

if TYPE_CHECKING:
    from anyshard.coord.torch_dist import GroupLike

logger = logging.getLogger(__name__)

_CLOSE_S: Final = 30.0  # how long retention may go on at the end, and saves after an error of the training
_LEAST_S: Final = 1.0  # what a last save is given in any case


@final
class Run:
    """One training run in the directory `url`, whose steps are checkpoints `step_<n>` there. A context.

        with anyshard.Run("runs/a", keep=anyshard.KeepLast(3), every=anyshard.EverySteps(100)) as run:
            report = run.restore_or_init(app_state)
            for step in range(0 if report is None else report.next_step, 10_000):
                train(step)
                run.end_step(step, app_state)
                if run.should_stop:
                    break

    In a job of several ranks all of them (or all of `group`) make a Run alike and call `save`, `async_save`, `load`,
    `restore_or_init`, `end_step` and `close` together, each on one thread. What only looks or tidies up (`steps`, `latest`,
    `open`, `pin`, `unpin`, `prune`) is for one process, with or without the others. For roles see `begin`.

    Retention deletes steps of this run only. A save replaces only what this run left behind at a rollback, damage included,
    unless `overwrite` asks for more. Steps of other runs stay, as do all foreign files. Of two jobs that write one run the second
    is told so (`RunInUse`). Nothing is opened or written before the first verb.
    """

    def __init__(  # noqa: PLR0913 - what the user may choose; all but the first are keywords
        self,
        url: str | os.PathLike[str] | Store,
        *,
        keep: KeepPolicy | None = None,
        every: SavePolicy | None = None,
        preemption: Preemption | None = None,
        group: GroupLike = None,
        options: SaveOptions | None = None,
        load_options: LoadOptions | None = None,
        sinks: Sequence[Sink] = (),
        lease_ttl_s: float = TTL_S,
    ) -> None:
        """Keep the settings.

        Args:
            url: the directory of the run: a path, a URL, or a `Store`.
            keep: which steps stay; None: all. Applied in the background after each save.
            every: when `end_step` saves; None: never by itself.
            preemption: how to take a signal to stop; None: not at all.
            group: the ranks that train together, as for `anyshard.save`.
            options, load_options: of all saves and loads.
            sinks: further places for the events of all operations.
            lease_ttl_s: how long a writer that shows no sign of life is waited for.
        """
        check_kind("every", every, SavePolicy)
        check_kind("preemption", preemption, Preemption)
        self._settings = RunSettings(
            place=url,
            keep=keep,
            group=group,
            options=SaveOptions() if options is None else options,
            load_options=LoadOptions() if load_options is None else load_options,
            sinks=tuple(sinks),
            lease_ttl_s=lease_ttl_s,
        )
        self._means = RunMeans(self._settings)
        self._pace = Pace(every, preemption)
        self._may_save = False  # once all ranks have seen the lease taken
        self._saves = InFlight()
        self._should_stop = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is None:
            self.close()
            return
        left_s = self._pace.deadline_left_s
        self._pace.close(is_failing=True)  # first: the others must not agree with this rank on a call that it does not come to
        is_hopeless = isinstance(error, (RankMissing, KeyValueStoreLost))  # no save ends without the other ranks
        try:
            self.close(min(_LEAST_S if is_hopeless else _CLOSE_S, self._settings.options.exit_timeout_s, left_s))
        except AnyshardError as other:  # that of the body is the one to raise
            logger.error("a save of the run failed, too: %s", other)  # noqa: TRY400 - its traceback is not what is of interest

    @property
    def url(self) -> str:
        """Where the run is."""
        return self._means.store.url

    @property
    def should_stop(self) -> bool:
        """Whether the job is to be stopped, on all ranks alike, and the last save is made: leave the loop."""
        return self._should_stop

    # ------------------------------------------------------------------------------------------------------------- saving

    def save(
        self, step: int, app_state: Mapping[str, object], *, overwrite: bool = False, metrics: Mapping[str, float] | None = None
    ) -> SaveReport:
        """Save a step and return when it is committed; see `anyshard.save`.

        After a rollback a step of this run above the one that was loaded is replaced, unless it is pinned, and the report says
        so. Any other step that is there already is `CheckpointExists`, unless `overwrite`. `metrics` are stored with the step.

        Raises:
            What `anyshard.save` raises. RunInUse: another writer is at work on this run.
        """
        return self._save(check_step(step), app_state, overwrite=overwrite, metrics=metrics)

    def async_save(
        self, step: int, app_state: Mapping[str, object], *, overwrite: bool = False, metrics: Mapping[str, float] | None = None
    ) -> PendingSave:
        """Begin to save a step as it is now, and return as soon as training may go on; see `anyshard.async_save` and `save`."""
        number, custody = check_step(step), self._begin_saving()
        aim = self._means.aim(custody, number, overwrite=overwrite, metrics=metrics)
        try:
            pending = _api.async_save_step(aim.store, app_state, **self._arguments(number, aim))
        except BaseException:
            self._saves.forget_failed()  # this call may have raised that
            if custody is not None:
                custody.note_ended(number, is_committed=False)
            raise
        if custody is not None:
            custody.note_saving(number, pending)
        self._note_save(number, pending, aim)
        return pending

    def end_step(
        self, step: int, app_state: Mapping[str, object], *, metrics: Mapping[str, float] | None = None
    ) -> PendingSave | None:
        """Say that a training step is over: if it is due it is saved (`async_save`, whose handle is returned), else nothing.

        Call it once after every step, on every rank. When the job is to be stopped this makes the last save, of this step, waits
        for it, and sets `should_stop`. A step that was just saved is not saved again.

        Raises:
            What `async_save` and `save` raise. RankMissing: the job is to be stopped, and a rank does not answer: no last save.
        """
        self._open_pace()
        kinds = self._pace.count_call()
        if Kind.STOP in kinds:
            self._save_last(check_step(step), app_state, metrics)
            return None
        is_due = Kind.SAVE in kinds or self._pace.is_due(step) or self._pace.is_time(is_saving=self._saves.is_any)
        if not is_due or step == self._saves.last_step:
            return None
        return self.async_save(step, app_state, metrics=metrics)

    # ------------------------------------------------------------------------------------------------------------ loading

    def restore_or_init(
        self, app_state: Mapping[str, object], init: Callable[[], object] | None = None, *, role: str = ""
    ) -> LoadReport | None:
        """Load the newest good step, if there is any, and go on with its run; else call `init` and return None.

        With steps of which none is whole this raises, and never begins anew by itself. Takes the lease of the run; in a world of
        one `role` among several it does not.

        Raises:
            What `load` raises. RunInUse: another writer is at work on this run.
        """
        candidates = self._hear_candidates(None, role, takes_lease=not role)
        self._open_pace()
        if candidates.found:
            return self._load(app_state, candidates, role=role, options=None, is_named=False)
        if candidates.advice:
            raise not_found(self.url, candidates)
        if init is not None:
            init()
        return None

    def load(
        self, app_state: Mapping[str, object], *, step: int | None = None, role: str = "", options: LoadOptions | None = None
    ) -> LoadReport:
        """Load the newest good step, or this one, in place; steps are then saved as continuations of it.

        Damage of the newest step is told (a warning, and `skipped` in the report), and the one before it is loaded instead, on
        all ranks alike. With `step` it is that one or an error. `role` is whose part to load of a step in parts.

        Raises:
            What `anyshard.load` raises. CheckpointNotFound: there is no step. CheckpointDamaged: none of them is whole.
        """
        check_kind("options", options, LoadOptions)
        number = None if step is None else check_step(step)
        candidates = self._hear_candidates(number, role)
        if not candidates.found:
            raise not_found(self.url, candidates)
        return self._load(app_state, candidates, role=role, options=options, is_named=number is not None)

    def open(self, step: int | None = None, *, role: str = "") -> Checkpoint:
        """Open the newest good step, or this one, for reading without torch and without a job; see `anyshard.open`."""
        if step is not None:
            number = check_step(step)
        elif (found := self._means.custody.find_latest(role)) is not None:
            number = found.step
        else:
            raise not_found(self.url, Candidates(()))
        return _api.open(
            self._means.place_of(number, role, is_named=step is not None),
            options=self._settings.load_options,
            sinks=self._settings.sinks,
        )

    # ---------------------------------------------------------------------------------------------------- the run's keeping

    def steps(self) -> tuple[StepInfo, ...]:
        """All steps that are there, in rising order, and how each of them is."""
        return self._means.custody.look()

    def latest(self) -> StepInfo | None:
        """The step that `load` would load, as far as a look can tell; None if there is none."""
        return self._means.custody.find_latest()

    def pin(self, step: int) -> None:
        """Keep a step whatever the policy says, until `unpin`. Raises `CheckpointNotFound`."""
        self._means.custody.pin(check_step(step))

    def unpin(self, step: int) -> None:
        """Let the policy decide on a step again."""
        self._means.custody.unpin(check_step(step))

    def prune(self, *, dry_run: bool = False) -> PruneReport:
        """Apply the policy now, and clean up after saves that died; with `dry_run` only say what would be done."""
        return self._means.custody.prune(dry_run=dry_run)

    def begin(self, step: int) -> SplitStep:
        """A step in parts, one for each role: each is saved by its own world, and whoever drives publishes them together.

        Takes no lease (the one who publishes does) and waits for nobody; see `SplitStep` and docs/roles.md.
        """
        number = check_step(step)
        store, custody = self._means.store_of(number), self._means.lead()
        settings = self._settings
        given: dict[str, Any] = {"group": settings.group, "options": settings.options, "sinks": settings.sinks}
        if custody is not None:
            given |= {"incarnation": custody.incarnation, "guards": custody.guards, "before_commit": custody.check_lease}
            given["tell"] = lambda published: custody.note_published(number, published.run_id)
        return open_parts(store, number, **given)

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for all saves of the run (up to `exit_timeout_s`), end what goes on in the background, and give the lease back.

        Raises the first failure of a save that nobody was told of. Closing again is nothing.
        """
        if not self._means.is_usable:
            return
        self._means.is_closed = True
        limit_s = self._settings.options.exit_timeout_s if timeout_s is None else timeout_s
        try:
            self._saves.finish(limit_s)
        finally:
            self._means.close(min(_CLOSE_S, limit_s, self._pace.deadline_left_s))
            self._pace.close()

    # --------------------------------------------------------------------------------------------------------------- saves

    def _save(
        self,
        step: int,
        app_state: Mapping[str, object],
        *,
        overwrite: bool = False,
        metrics: Mapping[str, float] | None,
        timeout_s: float | None = None,
    ) -> SaveReport:
        custody = self._begin_saving()
        aim, is_committed = self._means.aim(custody, step, overwrite=overwrite, metrics=metrics), False
        try:
            report = _api.save_step(aim.store, app_state, **self._arguments(step, aim, timeout_s=timeout_s))
            is_committed = True
        finally:
            if custody is not None:
                custody.note_ended(step, is_committed=is_committed)
        self._note_save(step, None, aim)
        return replace(report, warnings=report.warnings + aim.warnings)

    def _save_last(self, step: int, app_state: Mapping[str, object], metrics: Mapping[str, float] | None) -> None:
        """The last save before the job is stopped; what failed before it is no reason to lose this one too."""
        self._should_stop = True
        is_same = step == self._saves.last_step
        is_settled = self._saves.settle(self._last_timeout_s / (1 if is_same else 2))  # time is left for a save that follows
        if not self._saves.has_saved(step):
            # It waits for what goes on as long as for anything else, twice, and then goes on beside it.
            timeout_s = max(_LEAST_S, self._last_timeout_s / (1 if is_settled else 4))
            self._save(step, app_state, metrics=metrics, timeout_s=timeout_s)
        logger.info("%s: step %d is the last one that is saved: the job is to be stopped", self.url, step)

    @property
    def _last_timeout_s(self) -> float:
        """How long the last save may take, from now on."""
        return max(_LEAST_S, min(self._pace.deadline_left_s, self._settings.options.timeout_s))

    def _begin_saving(self) -> Custody | None:
        """What the coordinator keeps, on the coordinator, once the lease is taken."""
        self._means.check_usable()
        if not self._may_save:
            self._means.hear("begin to save to", self._prepare_to_save, takes_lease=True)
            self._may_save = True
        return self._means.lead()

    def _prepare_to_save(self) -> bytes:
        self._means.custody.begin_saving()
        return b""

    def _arguments(self, step: int, aim: Aim, *, timeout_s: float | None = None) -> dict[str, Any]:
        own = self._settings.options
        options = with_metrics(own if timeout_s is None else replace(own, timeout_s=timeout_s), aim.metrics)
        given = {"step": step, "overwrite": aim.overwrite, "run_id": aim.run_id, "after": aim.after, "resumed": aim.resumed}
        return {**given, "group": self._settings.group, "options": options, "sinks": self._settings.sinks}

    def _note_save(self, step: int, pending: PendingSave | None, aim: Aim) -> None:
        for warning in aim.warnings:
            logger.warning("%s: %s", self.url, warning)
        self._saves.add(step, pending)
        self._pace.note_save()

    def _open_pace(self) -> None:
        if not self._pace.is_open:
            self._means.check_usable()
            self._pace.open(self._means.find_group(), lambda find: self._means.hear("agree on when to save to", find))

    # --------------------------------------------------------------------------------------------------------------- loads

    def _hear_candidates(self, step: int | None, role: str, *, takes_lease: bool = False) -> Candidates:
        def find() -> bytes:
            if takes_lease:
                self._means.custody.take_lease()
            found = self._means.custody.find_candidates(role)
            return (found if step is None else Candidates((Candidate(step),))).encode()

        asked = "the newest step" if step is None else f"step {step}"  # ranks that ask for different ones are told so
        return decode_candidates(self._means.hear(f"find {asked} to load of", find, takes_lease=takes_lease))

    def _load(
        self, app_state: Mapping[str, object], candidates: Candidates, *, role: str, options: LoadOptions | None, is_named: bool
    ) -> LoadReport:
        """Load the first of the candidates that is whole, or the only one, which was named; saves go on from it."""

        def load(step: int, *, verify: Literal["first"] | None, strict: bool | None) -> LoadReport:
            place = self._means.hear_place_of(step, role, is_named=is_named)
            settings = self._settings
            chosen = settings.load_options if options is None else options
            return _api.load(
                place, app_state, verify=verify, strict=strict, group=settings.group, options=chosen, sinks=settings.sinks
            )

        if is_named:
            step = candidates.found[0].step
            report = load(step, verify=None, strict=None)
        else:
            step, report = load_newest(candidates.found, load, url=self.url)
        if (custody := self._means.lead()) is not None:
            custody.note_loaded(step)
        self._saves.forget_last()
        return report
