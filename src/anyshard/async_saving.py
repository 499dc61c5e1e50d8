"""The call of an asynchronous save: what happens on the caller's thread, and the task that it leaves to the group's saver.

Every call is one operation of the group, whatever happens, so that the ranks stay in step: a call that fails leaves a task that
makes its error the failure of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import final

from anyshard.background import Job, Saver
from anyshard.commit.listing import PARTS_PREFIX
from anyshard.coord.agreement import Agreement
from anyshard.coord.group import Group
from anyshard.coord.turn import Turn
from anyshard.coord.verdict import ANY
from anyshard.engine.arena import ArenaPool
from anyshard.engine.stage import register_pages
from anyshard.errors import EarlierSaveFailed, KeyValueStoreLost, LimitExceeded, OperationFailed
from anyshard.operation import Operation, patience_with_ranks
from anyshard.pending import Course, PendingSave, Stall
from anyshard.progress import Progress, RankStatus, decode_status
from anyshard.reports import SaveReport
from anyshard.saving import SaveOperation, SaveRequest
from anyshard.staged_snapshot import Call, LayoutCache, StagedSnapshot, StagingMeans

TakeTurn = Callable[[float], AbstractContextManager[object]]  # within so many seconds

_REFUSED_S = 30.0  # how long the end of the process waits to tell other ranks of a call that could not begin


@final
class Background:
    """What one group of ranks keeps for its asynchronous saves. `take_turn` gives the saver's thread the turn of the group.

    `tell` hears the reports of saves that are committed, on that thread.
    """

    def __init__(self, group: Group, take_turn: TakeTurn, tell: Callable[[SaveReport], None]) -> None:
        self.saver = Saver(is_loud=group.is_coordinator, hang_up=group.hang_up, tell=tell)
        self.means = StagingMeans(ArenaPool(register=register_pages), LayoutCache())
        self.calls = Turn()  # the part of each call that is on the thread of its caller
        self._group = group
        self._take_turn = take_turn

    def save(self, app_state: Mapping[str, object], request: SaveRequest, progress: Progress) -> PendingSave:
        """Take the snapshot and leave the rest to the saver."""
        url, options = request.operation.store.url, request.intent.options
        timeout_s, run_path, saving = options.timeout_s, _run_of(url), SaveOperation(request, progress)
        num_before: int | None = None
        with ExitStack() as stack:
            try:
                stack.enter_context(self.calls.take(f"the call of async_save to {url}", timeout_s))
                num_before = self.saver.num_submitted
                last = self.saver.await_room(run_path, limit=options.max_in_flight, timeout_s=timeout_s)
                self.raise_earlier(timeout_s, run_path=run_path, last=last, subject=saving.subject)
                return self._begin(app_state, request, saving, progress)
            except BaseException as error:
                if num_before in (None, self.saver.num_submitted):  # whatever happens, the call is one operation
                    self.refuse(_make_plain(error), timeout_s, run_path=run_path, subject=saving.subject)
                raise

    @property
    def is_idle(self) -> bool:
        """Whether no call and no save is under way, and all failures were told."""
        return self.calls.is_free and self.saver.is_idle

    def raise_earlier(self, timeout_s: float, *, run_path: str = "", last: int | None = None, subject: str = ANY) -> None:
        """Raise the failure of an earlier save that nobody was told of. The call that it ends saves nothing, on any rank.

        With `last`, only of saves that are over on all ranks at this call (see `Saver.await_room`): so all raise it at the same.
        A rank alone raises what it knows.
        """
        failure = self.saver.pop_failure(None if self._group.size == 1 else last)
        if failure is not None:
            text = f"a save was not begun, for its call raised the failure of an earlier one: {failure}"
            self.refuse(EarlierSaveFailed(text, {}), timeout_s, run_path=run_path, subject=subject)
            raise failure

    def refuse(self, error: Exception, timeout_s: float, *, run_path: str = "", subject: str = ANY) -> None:
        """Make the error of a call that cannot begin, which the caller raises, the failure of that call on all ranks."""
        if self._group.size > 1:
            pending, course = PendingSave("a save that was not begun", None), Course()
            take_turn = partial(self._take_turn, timeout_s)
            task = _Refusal(error, subject, group=self._group, timeout_s=timeout_s, take_turn=take_turn)
            limit_s = min(timeout_s, _REFUSED_S)
            self.saver.submit(Job(pending, course, run_path, task, exit_timeout_s=limit_s, is_silent=True))

    def _begin(
        self, app_state: Mapping[str, object], request: SaveRequest, saving: SaveOperation, progress: Progress
    ) -> PendingSave:
        course, stall = Course(), Stall(request.operation.started_s)
        call = Call(app_state, request.taking, request.intent.options, saving.subject, course, stall)
        snapshot = StagedSnapshot(call, self.means)
        ask = partial(_list_statuses, saving, progress, request.operation.group.size)
        pending = PendingSave(request.operation.store.url, request.intent.step, _course=course, _stall=stall, _ask=ask)
        take_turn = partial(self._take_turn, request.intent.options.timeout_s)
        task = _BackgroundSave(request.operation, saving, snapshot, take_turn=take_turn)
        job = Job(
            pending, course, _run_of(request.operation.store.url), task, exit_timeout_s=request.intent.options.exit_timeout_s
        )
        self._stage(snapshot, job, request)
        pending.staging = snapshot.report
        stall.end_call()
        return pending

    def _stage(self, snapshot: StagedSnapshot, job: Job, request: SaveRequest) -> None:
        """Have the snapshot staged and the job submitted, in the order in which they need each other."""
        try:
            snapshot.capture()
            if snapshot.needs_plan:  # a save that is under way may leave it
                self.saver.await_idle(request.intent.options.timeout_s)
                snapshot.look_again()
            if snapshot.needs_plan:
                self.saver.submit(job)
            snapshot.stage()
            self.saver.submit(job)
        except BaseException as error:
            try:  # each of these, even if a second interrupt comes
                job.is_silent = job.pending.take_failure()
            finally:
                try:
                    snapshot.fail(error)
                finally:
                    self._submit_failed(job, error)
            raise

    def _submit_failed(self, job: Job, error: BaseException) -> None:
        """Have the saver tell the other ranks; without a thread for that, give back at least what was borrowed here."""
        try:
            self.saver.submit(job)
        except LimitExceeded:
            job.task.close(error)


def _make_plain(error: BaseException) -> Exception:
    """What the other ranks are told of an error, which may be an interrupt."""
    return error if isinstance(error, Exception) else OperationFailed(f"the call ended with {type(error).__name__}", {})


def _run_of(url: str) -> str:
    """The run that a checkpoint belongs to: the directory above it, or above the step that it is a part of."""
    above, parts = url.rstrip("/").rpartition("/")[0], f"/{PARTS_PREFIX}".rstrip("/")
    return _run_of(above.removesuffix(parts)) if above.endswith(parts) else above


def _list_statuses(saving: SaveOperation, progress: Progress, num_ranks: int) -> tuple[RankStatus, ...]:
    own = progress.read()
    told = saving.list_told() or (None,) * num_ranks
    return tuple(own if rank == own.rank else decode_status(rank, word) for rank, word in enumerate(told))


@final
class _BackgroundSave:
    """The task of one save."""

    def __init__(
        self,
        operation: Operation,
        saving: SaveOperation,
        snapshot: StagedSnapshot,
        *,
        take_turn: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._operation = operation
        self._saving = saving
        self._snapshot: StagedSnapshot | None = snapshot
        self._take_turn = take_turn

    def run(self) -> SaveReport:
        """Make the save."""
        with self._operation.events.span("save", file=self._operation.store.url), self._take_turn():
            assert self._snapshot is not None
            report = self._saving.run(self._snapshot)
            return replace(report, stall_s=self._snapshot.stall_s, staging=self._snapshot.report)

    def close(self, failure: BaseException | None) -> None:
        """Give back the arena, and let go of all but what `find_unheard` needs."""
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            snapshot.close(failure)

    def find_unheard(self) -> tuple[int, ...]:
        """As the operation says."""
        return self._saving.find_unheard()


@final
class _Refusal:
    """The task of a call that could not begin."""

    def __init__(
        self,
        error: Exception,
        subject: str,
        *,
        group: Group,
        timeout_s: float,
        take_turn: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._error: Exception | None = error
        self._subject = subject
        self._group = group
        self._timeout_s = timeout_s
        self._take_turn = take_turn
        self._agreement: Agreement | None = None

    def run(self) -> SaveReport:
        """Raise what all ranks raise."""
        assert self._error is not None
        patience = patience_with_ranks(self._timeout_s)
        with self._take_turn():
            try:
                self._group.refuse(self._error, subject=self._subject, patience=patience, begun=self._note)
            finally:
                if self._agreement is not None:
                    self._agreement.acknowledge()

    def close(self, failure: BaseException | None) -> None:
        """Let go of the error, which holds frames."""
        self._error = None

    def find_unheard(self) -> tuple[int, ...]:
        """As the operation says."""
        with suppress(KeyValueStoreLost):
            return self._agreement.find_unheard() if self._agreement and self._group.is_coordinator else ()
        return ()

    def _note(self, agreement: Agreement) -> None:
        self._agreement = agreement
