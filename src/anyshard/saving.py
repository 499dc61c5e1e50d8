"""The road of a save: adapters -> planning (agreed through coord) -> commit (begin) -> engine -> commit (publish).

    a rank        post structure -> hear begin (-> receive plan) -> write -> post durable -> hear question -> decide
    coordinator   (-> collect structures, plan, hand out) -> begin -> write -> collect durable, compare -> decide -> publish

At the first save of a structure whatever a rank can refuse alone is refused before the coordinator touches the storage. With the
plan of an earlier save it begins without having heard of anybody: then the refusal of another rank ends an attempt that has
begun. A failure on any rank is one on all of them, and each removes what it wrote once the decision to give up is known.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from anyshard.commit.attempt import Attempt, abandoning, begin, own_error
from anyshard.commit.deletion import remove_superseded
from anyshard.commit.guard import UNGUARDED, Guards
from anyshard.commit.stamp import writer_name
from anyshard.committing import Commit
from anyshard.comparison import Comparison, Reading, Strictness
from anyshard.coord.agreement import Agreement
from anyshard.coord.looks import Rarely
from anyshard.coord.verdict import Decision
from anyshard.engine.blocks import BlockPool
from anyshard.engine.crew import Patience
from anyshard.engine.write import WriteJob
from anyshard.errors import AnyshardError, KeyValueStoreLost, StorageStuck, StructureChanged
from anyshard.operation import Operation
from anyshard.plan_agreement import PlanAgreement
from anyshard.progress import Progress
from anyshard.records.addresses import show
from anyshard.records.manifest import BlobEntry
from anyshard.records.rank_messages import Begin, Durable, Published, list_entries, read_message
from anyshard.reports import SaveReport
from anyshard.save_intent import SaveIntent, check_space, estimate_nbytes
from anyshard.snapshot import Pieces, Snapshot, Taking

logger = logging.getLogger(__name__)

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """One call: the operation, what is asked for, how the app state is taken apart, the engine's blocks, what stores can do."""

    operation: Operation
    intent: SaveIntent
    taking: Taking
    pool: BlockPool
    guards: Guards


class SaveOperation:
    """One save of a group. `run` returns when the checkpoint is committed, or raises and leaves the storage as it was.

    With a progress, of a save in the background, the other ranks are told how far this one is, and that it has heard the end.
    """

    def __init__(self, request: SaveRequest, progress: Progress | None = None) -> None:
        self._operation = request.operation
        self._group = request.operation.group
        self._store = request.operation.store
        self._intent = request.intent
        self._pool = request.pool
        self._guards = request.guards
        self._plans = request.taking.plans
        self._progress = progress
        self._agreement: Agreement | None = None
        self._attempt: Attempt | None = None  # on the coordinator, once it has begun
        self._written: tuple[str, ...] = ()  # names of the blobs of this rank, once it may have begun to write them

    @property
    def subject(self) -> str:
        """What the save is called on all ranks."""
        verb = "save of" if self._progress is None else "asynchronous save of"
        return f"{self._operation.describe(verb)}, step {self._intent.step},"

    def run(self, snapshot: Snapshot) -> SaveReport:
        """Save the app state of a snapshot."""
        try:
            self._agreement = self._operation.agree(self.subject, timeout_s=self._intent.options.timeout_s, is_made_once=True)
            with self._agreement:
                return self._save(self._agreement, snapshot)
        except BaseException as error:
            self._give_up(self._agreement.decision if self._agreement else None, error)
            raise
        finally:
            if self._agreement is not None and self._progress is not None:
                self._agreement.acknowledge()

    def list_told(self) -> tuple[bytes | None, ...]:
        """The last words of all ranks on their progress; empty before the ranks agree. May be called from any thread."""
        with suppress(KeyValueStoreLost):
            return self._agreement.list_told() if self._agreement else ()
        return ()

    def find_unheard(self) -> tuple[int, ...]:
        """On the coordinator, after `run`: ranks that may not know yet how it ended. May be called from any thread."""
        with suppress(KeyValueStoreLost):
            return self._agreement.find_unheard() if self._agreement and self._group.is_coordinator else ()
        return ()

    def _save(self, agreement: Agreement, snapshot: Snapshot) -> SaveReport:
        with self._operation.phase(agreement, "adapt"):
            candidate = snapshot.adapt()
            planning = PlanAgreement(agreement, self._group, self._plans, candidate)
            planning.post(values_nbytes=snapshot.measure_values() if candidate.is_first and self._group.size > 1 else 0)
        start = self._begin if self._group.is_coordinator else self._follow
        pieces, begun = start(agreement, snapshot, planning)
        options = self._intent.options
        strictness = Strictness.of(begun.replica_check, options.on_differing_values, is_first=candidate.is_first)
        comparison = Comparison(agreement, pieces.plan, strictness=strictness)
        blobs = self._write(agreement, snapshot, pieces, begun)
        with self._operation.phase(agreement, "digest"):
            held = snapshot.hold(Reading(agreement.hear_id(), strictness, partial(self._look, agreement)))
            durable = Durable(list_entries(blobs), pieces.nbytes, *comparison.digest(held), socket.gethostname())
        agreement.post("durable", durable.encode())
        self._tell(agreement)  # that it is done, for now it waits for the others
        commit = Commit(self._operation, self._intent, begun, pieces, snapshot.facts, comparison, held)
        published = commit.lead(agreement) if self._group.is_coordinator else commit.follow(agreement)
        planning.keep(pieces.plan)
        return self._report(commit, published, blobs=blobs, plan_was_cached=not candidate.is_first)

    # ----------------------------------------------------------------------------------------------------------- the start

    def _begin(self, agreement: Agreement, snapshot: Snapshot, planning: PlanAgreement) -> tuple[Pieces, Begin]:
        """On the coordinator: the plan, then the attempt."""
        with self._operation.phase(agreement, "plan"):
            self._intent.check_user()
            plan = planning.lead()
            pieces = snapshot.take(plan, self._look_rarely(agreement))
        assert plan.common is not None
        with self._operation.phase(agreement, "begin"):
            self._settle_guard()
            check_space(self._store, estimate_nbytes(plan.common) + sum(map(len, pieces.values.values())))
            self._attempt = begin(
                self._store, sections=plan.common.sections, overwrite=self._intent.overwrite, events=self._operation.events
            )
        replica_check = self._intent.options.replica_check  # of all ranks, or those that compare less would seem to differ
        begun = Begin(
            plan.id, planning.is_first, self._attempt.generation, self._attempt.id, replica_check, self._intent.lineage.run_id
        )
        agreement.announce("begin", begun.encode())
        return pieces, begun

    def _settle_guard(self) -> None:
        """On the coordinator, which alone creates records: from here on the store says whether it is guarded."""
        required, events = self._intent.options.require_guarded, self._operation.events
        self._store = self._guards.settle(self._operation.store, required=required, events=events)
        self._operation = replace(self._operation, store=self._store)

    def _follow(self, agreement: Agreement, snapshot: Snapshot, planning: PlanAgreement) -> tuple[Pieces, Begin]:
        """On all other ranks: as the coordinator begins."""
        with self._operation.phase(agreement, "begin"):
            begun = read_message(agreement.hear("begin"), Begin)
            return snapshot.take(planning.follow(begun), self._look_rarely(agreement)), begun

    def _look_rarely(self, agreement: Agreement) -> Rarely:
        """What long work calls now and then: hear of failures elsewhere, and tell how far this rank is."""
        return Rarely(partial(self._look, agreement))

    def _look(self, agreement: Agreement) -> None:
        agreement.check()
        self._tell(agreement)

    def _tell(self, agreement: Agreement) -> None:
        if self._progress is not None:
            agreement.tell(self._progress.encode())

    # ----------------------------------------------------------------------------------------------------------- the bytes

    def _write(self, agreement: Agreement, snapshot: Snapshot, pieces: Pieces, begun: Begin) -> tuple[BlobEntry, ...]:
        with self._operation.phase(agreement, "write", nbytes=pieces.nbytes):
            blobs = pieces.plan.local.plan.blobs
            self._written = tuple(begun.name_blob(of.section, of.rank, of.k) for of in blobs)
            job = self._write_job(agreement, begun, pieces.values)
            return snapshot.write(self._store, pieces, job=job, pool=self._pool)

    def _write_job(self, agreement: Agreement, begun: Begin, values: Mapping[str, bytes]) -> WriteJob:
        options = self._intent.options
        return WriteJob(
            generation=begun.generation,
            attempt=begun.attempt,
            step=self._intent.step,
            run_id=begun.run_id,
            world_size=self._group.size,
            writer=writer_name(),
            values=values,
            threads=options.threads,
            events=self._operation.events,
            patience=Patience(options.timeout_s),
            check=self._look_rarely(agreement),
        )

    # ------------------------------------------------------------------------------------------------------------- the end

    def _give_up(self, decision: Decision | None, error: BaseException) -> None:
        """Remove what was written, if it is certain that nobody will publish it: only the coordinator does, and has ended."""
        if isinstance(error, StructureChanged):
            self._plans.drop()
        if self._attempt is not None:
            with abandoning(self._store, self._attempt, events=self._operation.events):
                raise error
        if decision is Decision.ABORT and not isinstance(own_error(error), StorageStuck):
            try:
                self._store.delete(self._written)
            except AnyshardError:
                logger.warning("%s: the blobs of this rank could not be removed", self._store.url, exc_info=True)

    def _report(self, commit: Commit, published: Published, *, blobs: tuple[BlobEntry, ...], plan_was_cached: bool) -> SaveReport:
        duration_s = self._operation.duration_s
        return SaveReport(
            url=self._store.url,
            step=self._intent.step,
            generation=commit.begun.generation,
            attempt=commit.begun.attempt,
            num_tensors=published.num_tensors,
            nbytes=published.nbytes,
            duration_s=duration_s,
            written_nbytes=sum(blob.nbytes for blob in blobs),
            plan_was_cached=plan_was_cached,
            differing_values=published.differing_values,
            num_differing_buffers=published.num_differing_buffers,
            warnings=(*commit.facts.warnings, *_describe_differences(published), *self._tidy_up()),
            stall_s=duration_s,
        )

    def _tidy_up(self) -> tuple[str, ...]:
        """On the coordinator: remove what was superseded; what there is to warn of."""
        # The checkpoint exists by now: what goes wrong in tidying up must not look like a failed save.
        if not self._group.is_coordinator:
            return ()
        if not self._store.capabilities.guarded:  # where nothing is ever replaced
            return (UNGUARDED,)
        try:
            remove_superseded(self._store, self._intent.options.overwrite_grace_s, events=self._operation.events)
        except AnyshardError as error:
            return (f"files of superseded generations could not be removed: {error}",)
        return ()


def _describe_differences(published: Published) -> tuple[str, ...]:
    lines = list(published.warnings)
    if shown := ", ".join(map(show, published.differing_values[:_SHOWN])):
        lines.append(f"values that differ between ranks are stored as the first rank has them: {shown}")
    if count := published.num_differing_buffers:
        lines.append(f"{count} buffers of modules differ between ranks and are stored as the first rank has them")
    return tuple(lines)
