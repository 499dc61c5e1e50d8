"""The snapshot of an asynchronous save: taken on the training thread, written by the thread of the group's saver.

    training thread     capture -> (without a plan: submitted, await the plan) -> stage -> (with one: submitted)
    copier's thread     after a lazy stage: copies what the training thread has not, compares samples
    saver's thread      adapt -> take (hands a new plan over, awaits the stage) -> write (awaits the copy) -> hold -> close

After `stage` nothing here depends on the app state but what the copier still has to copy, and steps of the optimizers that own
it wait for that. What is compared between ranks is digested at the call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import final

import numpy as np
from numpy.typing import NDArray

from anyshard.adapters.eligibility_cache import EligibilityCache
from anyshard.adapters.stability import Eligibility
from anyshard.adapters.step_hooks import StepGuard
from anyshard.agreed_plan import AgreedPlan
from anyshard.comparison import Held, Reading, Strictness, hold, hold_rest
from anyshard.engine.arena import ArenaPool
from anyshard.engine.blocks import BlockPool
from anyshard.engine.guarded import GuardedReader, GuardedSource
from anyshard.engine.images import ImageLayout, Images, lay_out_images
from anyshard.engine.stage import Staging, refuse_capture
from anyshard.engine.write import WriteJob, write_images
from anyshard.errors import InvalidOption
from anyshard.handover import Handover
from anyshard.operation import patience_with_ranks
from anyshard.options import SaveOptions
from anyshard.pending import Course, Moment, Stall
from anyshard.plan_agreement import Candidate
from anyshard.planning.replicas import NO_SET
from anyshard.records.captured import Captured
from anyshard.records.manifest import BlobEntry
from anyshard.reports import StagingReport
from anyshard.snapshot import Check, Facts, Pieces, Taking, encode_values, measure_own_values
from anyshard.storage.protocol import Store
from anyshard.threads import start_thread

_KEPT_LAYOUTS = 4  # as many as plans
_WAITS, _MIN_WAIT_S = 4, 60.0  # threads wait for each other as long as for other ranks so often, but not less than this
_FIRST = "the first save of a structure is compared in full"


@final
class LayoutCache:
    """The layouts of the images of the last plans, and the addresses of their rows."""

    def __init__(self) -> None:
        self.num_hits = 0
        self._kept: dict[str, tuple[ImageLayout, tuple[str, ...]]] = {}

    def find(self, plan: AgreedPlan) -> tuple[ImageLayout, tuple[str, ...]]:
        """Those of a plan; made when first asked for."""
        if plan.id in self._kept:
            self.num_hits += 1
            return self._kept[plan.id]
        shards = plan.local.plan.shards
        addresses = tuple(shards.tensors.addresses[tensor] for tensor in shards.tensor.tolist())
        made = lay_out_images(plan.local.plan), addresses
        self._kept = dict([*self._kept.items(), (plan.id, made)][-_KEPT_LAYOUTS:])
        return made


@dataclass(frozen=True, slots=True)
class StagingMeans:
    """What staging needs and keeps from save to save."""

    arenas: ArenaPool
    layouts: LayoutCache
    eligibilities: EligibilityCache = field(default_factory=EligibilityCache)


@dataclass(frozen=True, slots=True)
class Call:
    """One call of `async_save`: the state that it is about, how it is taken apart, what it is called, and what it sets."""

    app_state: Mapping[str, object]
    taking: Taking
    options: SaveOptions
    subject: str
    course: Course
    stall: Stall


@final
class StagedSnapshot:
    """See the module's docstring. On the training thread: `capture`, `look_again`, `stage`, `fail`; the rest on the saver's."""

    def __init__(self, call: Call, means: StagingMeans) -> None:
        self._call: Call | None = call
        self._means = means
        self._options = call.options
        self._course = call.course
        self._stall = call.stall
        self._captured: Captured | None = None
        self._candidate: Candidate | None = None
        self._facts: Facts | None = None
        self._error: BaseException | None = None  # of the training thread
        self._end: BaseException | None = None  # of the save
        self._strictness: Strictness | None = None
        self._images: Images | None = None
        self._plan: Handover[AgreedPlan] = Handover()
        self._taken: Handover[Pieces] = Handover()
        self._copied: Handover[Held] = Handover()
        self._hold_rest: Callable[[], Held] | None = None
        self._has_copier = False
        self._wait_s = max(_MIN_WAIT_S, _WAITS * patience_with_ranks(call.options.timeout_s).timeout_s)
        self._caller = threading.get_ident()
        self.report = StagingReport(0, 0, 0)

    @property
    def stall_s(self) -> float:
        """How long the save has held its caller."""
        return self._stall.seconds

    # ------------------------------------------------------------------------------------------------- the training thread

    def capture(self) -> None:
        """Take the app state apart, as it is now."""
        refuse_capture()
        call = self._of_call()
        self._captured = call.taking.capture(call.app_state)
        self._facts = Facts.of(self._captured)
        self._look()

    def look_again(self) -> None:
        """Look for a plan, which an earlier save may have left by now."""
        assert self._captured is not None
        self._captured = replace(self._captured, memory=None)  # who knows where it lies after so long a time
        self._look()

    def _look(self) -> None:
        assert self._captured is not None
        self._candidate = self._of_call().taking.find_candidate(self._captured)

    @property
    def needs_plan(self) -> bool:
        """Whether the ranks have to agree on a plan before this can be staged."""
        return self._candidate is None or self._candidate.is_first

    def stage(self) -> None:
        """Copy what has to be copied now; returns when the caller may go on. Without a plan the save must be under way.

        Nothing is left to do if the saver had no thread of its own (see background.py): the save is over then.
        """
        if self._course.is_over:
            if self._course.failure is not None and not self._course.has_reached(Moment.STAGED):
                raise self._course.failure
            return
        assert self._candidate is not None
        plan = self._candidate.plan or self._plan.receive("the plan", self._wait_s)
        pieces = self._stage(plan, is_first=self._candidate.is_first)
        self._call = self._captured = None
        self._taken.give(pieces)

    def fail(self, error: BaseException) -> None:
        """Give up: the error of the training thread becomes that of the save."""
        self._error = error
        self._call = self._captured = None
        if not self._has_copier:
            self._hold_rest = None
        self._taken.fail(error)
        if not self._has_copier:
            self._copied.fail(error)

    def _stage(self, plan: AgreedPlan, *, is_first: bool) -> Pieces:
        call, captured = self._of_call(), self._captured
        assert captured is not None
        pieces = Pieces(plan, encode_values(captured, plan, call.taking.registry))
        eligibility = self._find_eligible(captured, is_first=is_first)
        layout, addresses = self._means.layouts.find(plan)
        self._images = Images(layout, self._means.arenas.take(layout.total_nbytes))
        own_rows, memory = plan.local.local_row, captured.memory
        is_lazy, known = eligibility.is_lazy[own_rows], None if memory is None or is_first else memory.pick(own_rows)
        sources = plan.local.pick_sources(captured.sources)
        staging = Staging(self._images, sources, is_lazy=is_lazy, addresses=addresses, known=known)
        try:
            staging.begin()
            self._stage_rest(staging, eligibility, plan, is_first=is_first)
        except BaseException:
            if not self._has_copier:  # else it is the copier's now, whose end `close` awaits
                staging.drop()
            raise
        return pieces

    def _stage_rest(self, staging: Staging, eligibility: Eligibility, plan: AgreedPlan, *, is_first: bool) -> None:
        """What follows the copy: digests of what others hold too, and the thread that copies what is lazy."""
        captured = self._captured
        assert captured is not None
        assert self._images is not None
        nbytes, arena = int(plan.local.nbytes.sum()), self._images.arena
        self.report = StagingReport(nbytes, staging.lazy_nbytes, arena.nbytes, eligibility.reasons)
        reading = self._make_reading(is_first=is_first, later=eligibility.is_lazy if staging.lazy_nbytes else None)
        held = self._hold(plan, captured, reading=reading)
        self._hold_rest = partial(_read_rest, held, captured, plan, reading)
        if staging.lazy_nbytes:
            self._start_copier(staging, StepGuard(eligibility, self._hold_step))
        else:
            self._finish(staging)

    def _find_eligible(self, captured: Captured, *, is_first: bool) -> Eligibility:
        call = self._of_call()
        if self._options.staging == "lazy" and not is_first:
            return self._means.eligibilities.find(call.app_state, captured, call.taking.registry)
        reasons = {_FIRST: ("**",)} if self._options.staging == "lazy" else {}
        return Eligibility(np.zeros(len(captured.shards), dtype=np.bool_), reasons, ())

    def _make_reading(self, *, is_first: bool, later: NDArray[np.bool_] | None) -> Reading:
        self._strictness = Strictness.of(self._options.replica_check, self._options.on_differing_values, is_first=is_first)
        return Reading(self._of_call().subject, self._strictness, self._check, later)

    def _hold(self, plan: AgreedPlan, captured: Captured, *, reading: Reading) -> Held:
        """What others may hold too, without anything that changes or holds tensors."""
        call, candidate = self._of_call(), self._candidate
        assert candidate is not None
        held = hold(captured, plan, structure=candidate.structure, registry=call.taking.registry, reading=reading)
        # At the first save, where most faults of users show, differing values are told one by one, later by their containers.
        is_told = candidate.is_first and call.taking.group.size > 1
        leaves = held.leaves() if is_told else candidate.structure.parts
        return replace(held, leaves=lambda: leaves)

    def _check(self) -> None:
        """End long work here if the save has failed meanwhile."""
        if self._end is not None:
            raise self._end

    def _start_copier(self, staging: Staging, guard: StepGuard) -> None:
        ticket = [None]  # who draws it decides, for an interrupt of the start does not tell whether the thread has begun
        copier = partial(self._copy, staging, guard, ticket)
        try:
            self._has_copier = True
            guard.open()
            try:
                is_started = start_thread(threading.Thread(target=copier, name="anyshard-copy", daemon=True))
            except RuntimeError:  # the system has no thread to give
                is_started = False
            if not is_started:
                copier()
        except BaseException:
            if _draw(ticket):
                self._has_copier = False
                guard.close()
            raise

    def _copy(self, staging: Staging, guard: StepGuard, ticket: list[None]) -> None:
        if not _draw(ticket):
            return  # the call was interrupted before this began
        try:
            self._finish(staging)
        except BaseException as error:  # noqa: BLE001 - the border of the thread: raised again by the saver's
            self._hold_rest = None
            self._copied.fail(error)
        finally:
            guard.close()

    def _finish(self, staging: Staging) -> None:
        """Copy what is lazy, and read what of it others hold too; from then on nothing holds or needs the app state."""
        staging.finish(self._check)
        assert self._hold_rest is not None
        held = self._hold_rest()
        self._hold_rest = None
        self._course.reach(Moment.STAGED)
        self._copied.give(held)

    def _hold_step(self) -> None:
        """What a step of an optimizer does before it changes anything."""
        self._stall.hold_step(self._copied.settle)

    def _of_call(self) -> Call:
        assert self._call is not None, "the call is over"
        return self._call

    # -------------------------------------------------------------------------------------------------- the saver's thread

    def adapt(self) -> Candidate:
        """As `Snapshot`; raises what the training thread has met."""
        if self._error is not None:
            raise self._error
        assert self._candidate is not None
        return self._candidate

    @property
    def facts(self) -> Facts:
        """As `Snapshot`."""
        assert self._facts is not None
        return self._facts

    def measure_values(self) -> int:
        """As `Snapshot`. Asked for only while the training thread awaits the plan."""
        assert self._captured is not None
        return measure_own_values(self._captured, self._of_call().taking.registry)

    def take(self, plan: AgreedPlan, check: Check) -> Pieces:
        """As `Snapshot`: what the training thread has taken, under a plan that it knew or that it gets by this."""
        self._plan.give(plan)
        if threading.get_ident() == self._caller and not self._taken.is_there:
            self.stage()
        return self._taken.receive("the snapshot", self._wait_s, check=check)

    def write(self, store: Store, pieces: Pieces, *, job: WriteJob, pool: BlockPool) -> tuple[BlobEntry, ...]:
        """As `Snapshot`, once all is copied."""
        self._copied.receive("the copy of the snapshot", self._wait_s, check=job.check)
        assert self._images is not None
        blobs = write_images(store, pieces.plan.local.plan, images=self._images, job=job, pool=pool)
        self._give_back()
        self._course.reach(Moment.DURABLE)
        return blobs

    def hold(self, reading: Reading) -> Held:
        """As `Snapshot`; what was read at the call, which must have been read as the coordinator asks for."""
        if reading.strictness != self._strictness:
            raise InvalidOption(
                f"replica_check: expected the same on all ranks, found {self._options.replica_check!r} here, unlike on the "
                "coordinator; an asynchronous save compares what it read at the call"
            )
        return self._copied.receive("the copy of the snapshot", self._wait_s)

    def close(self, failure: BaseException | None) -> None:
        """Give back what is lent, once nobody uses it any more; a training thread that waits for a plan gets the failure.

        If a thread does not let go of it in time, the arena is left to it for good.
        """
        if failure is not None:
            self._end = failure
            self._plan.fail(failure)
            if threading.get_ident() == self._caller or self._error is not None:  # it will take nothing any more
                self._taken.fail(failure)
        is_free = self._taken.settle(self._wait_s)
        if self._has_copier:
            is_free = self._copied.settle(self._wait_s) and is_free
        if not is_free and self._images is not None:
            self._images.arena.abandon()
        if failure is not None:
            self._copied.fail(failure)  # steps of optimizers may still wait for it
        self._give_back()
        self._error = self._end = None
        for handover in (self._plan, self._taken, self._copied):
            handover.drop()

    def _give_back(self) -> None:
        if self._images is not None:
            self._means.arenas.give_back(self._images.arena)
            self._images = None


def _draw(ticket: list[None]) -> bool:
    """Whether this thread is the first one to draw."""
    try:
        ticket.pop()
    except IndexError:
        return False
    return True


def _read_rest(held: Held, captured: Captured, plan: AgreedPlan, reading: Reading) -> Held:
    """What is left for the copier's thread, which may meet memory that training has freed."""
    if reading.later is None or not (reading.later & (plan.local.replica_set != NO_SET)).any():
        return held
    rows = captured.shards.tensor.tolist(), captured.sources, reading.later.tolist()
    with GuardedReader() as reader:
        sources = tuple(
            GuardedSource(source, captured.shards.tensors.addresses[tensor], reader) if is_later else source
            for tensor, source, is_later in zip(*rows, strict=True)
        )
        return hold_rest(held, replace(captured, sources=sources), plan, reading=reading)
