"""The road of a rehearsal: all that a save does but the bytes, so that what can go wrong at the first save goes wrong now.

    a rank        adapt, post structure -> hear begin (-> receive plan) -> compare -> try the storage -> measure -> hear the sum
    coordinator   (-> collect structures, plan, hand out) -> look ahead -> begin -> judge -> try -> measure -> sum up -> decide

A failure on any rank is one on all of them. Nothing stays on the storage. The plan and the arena stay if no rank has found a
fault, so that the next save of the structure is one with a plan.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import numpy as np

from anyshard.adapters.ownership import find_obstacle, find_optimizers
from anyshard.adapters.stability import Eligibility, find_eligible
from anyshard.agreed_plan import AgreedPlan
from anyshard.commit.guard import Guards
from anyshard.commit.probe import survey_ground
from anyshard.comparison import Comparison, Held, Reading, Strictness, hold
from anyshard.coord.agreement import Agreement
from anyshard.engine.arena import Arena
from anyshard.engine.blocks import BlockPool
from anyshard.errors import StructureChanged
from anyshard.operation import Operation
from anyshard.plan_agreement import Candidate, PlanAgreement
from anyshard.records.captured import Captured
from anyshard.records.rank_messages import Begin, Durable, Message, Question, read_message
from anyshard.rehearsal import Outline, Outlook, Rehearsal, look_ahead
from anyshard.reports import LoadForecast, PrepareReport, StagingReport
from anyshard.save_intent import SaveIntent, find_step
from anyshard.snapshot import Pieces, Taking, encode_values, measure_own_values
from anyshard.staged_snapshot import StagingMeans
from anyshard.trial import Trial

_NUM_RECORDS = 2  # the index and the manifest
_MAX_COPIED_NBYTES = 256 << 20
_NUM_COPIES = 3
_TODAY = "today"
_UNSTABLE = (
    "asked twice for its state, the app state gave two structures (names, shapes or paths of values): saves of new structures "
    "are slow, for all ranks plan them together, and must all have a new one"
)


@dataclass(frozen=True, slots=True)
class PreparingMeans:
    """What a rehearsal needs besides a store and a group: blocks, the rank's way to take app states apart, arenas, guards."""

    pool: BlockPool
    taking: Taking
    staging: StagingMeans
    guards: Guards


class _Values(Message, frozen=True):
    """How many bytes the payloads of a rank take, by section."""

    nbytes: Mapping[str, int]


class _Measured(Message, frozen=True):
    """What a rank has found out for itself: how much it writes and how fast, how long saves will take, what a load reads."""

    nbytes: int
    write_rate: float
    stall_s: float
    duration_s: float
    wanted_nbytes: int
    read_nbytes: int
    num_blobs: int


class _Summary(Message, frozen=True):
    """What all ranks report alike; `loads` are the fields of `LoadForecast`."""

    num_tensors: int
    nbytes: int
    smallest_rank_nbytes: int
    largest_rank_nbytes: int
    num_files: int
    needed_nbytes: int
    free_nbytes: int | None
    write_rate: float
    stall_s: float
    duration_s: float
    loads: tuple[tuple[str, int, int, int, int], ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Scene:
    """One rank's app state, taken apart, what of it can be lazy, and what to warn of."""

    captured: Captured
    candidate: Candidate
    eligibility: Eligibility
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Costs:
    """What an asynchronous save will cost this rank: its arena, the rate of copies into it, how long the call will take."""

    staging: StagingReport
    copy_rate: float
    stall_s: float
    warnings: tuple[str, ...]


@final
class PrepareOperation:
    """One rehearsal of a group. `run` returns if no rank has found a fault, or raises; nothing stays on the storage."""

    def __init__(self, operation: Operation, rehearsal: Rehearsal, means: PreparingMeans) -> None:
        self._operation = operation
        self._group = operation.group
        self._store = operation.store
        self._rehearsal = rehearsal
        self._options = rehearsal.options
        self._means = means
        self._taking = means.taking
        self._outlook: Outlook | None = None  # on the coordinator
        # What later saves compare; its cost is the same whatever the other ranks are asked for.
        self._sampling = Strictness.of(self._options.replica_check, "warn", is_first=False)

    @property
    def subject(self) -> str:
        """What the rehearsal is called on all ranks."""
        return self._operation.describe("rehearsal of saves to")

    def run(self, app_state: Mapping[str, object]) -> PrepareReport:
        """Rehearse the save of an app state, which stays as it is."""
        try:
            with self._operation.agree(self.subject, timeout_s=self._options.timeout_s) as agreement:
                return self._rehearse(agreement, app_state)
        except StructureChanged:
            self._taking.plans.drop()
            raise

    def _rehearse(self, agreement: Agreement, app_state: Mapping[str, object]) -> PrepareReport:
        with self._phase(agreement, "adapt"):
            scene = self._take_apart(app_state)
            planning = PlanAgreement(agreement, self._group, self._taking.plans, scene.candidate)
            planning.post(values_nbytes=measure_own_values(scene.captured, self._taking.registry))
        with Trial(self._operation, agreement, self._options, self._means.pool) as trial:
            start = self._begin if self._group.is_coordinator else self._follow
            pieces, begun = start(agreement, scene, planning, trial)
            self._compare(agreement, scene, pieces, begun)
            with self._phase(agreement, "storage"):
                trial.run(pieces.nbytes)
                trial.end()
        with self._phase(agreement, "measure"):
            costs = self._measure(agreement, app_state, pieces, scene)
            summary = self._sum_up(agreement, pieces, costs, trial.write_rate)
        agreement.decide()
        planning.keep(pieces.plan)
        return self._report(costs, summary)

    @contextmanager
    def _phase(self, agreement: Agreement, name: str) -> Iterator[None]:
        with agreement.phase(name), self._operation.events.span(f"prepare.{name}"):
            yield

    # ----------------------------------------------------------------------------------------------------------- the start

    def _take_apart(self, app_state: Mapping[str, object]) -> _Scene:
        captured = self._taking.capture(app_state)
        candidate = self._taking.find_candidate(captured)
        warnings, eligibility = captured.warnings, Eligibility(np.zeros(len(captured.shards), dtype=np.bool_), {}, ())
        if self._options.staging == "lazy":
            eligibility = find_eligible(app_state, captured, self._taking.registry)
            obstacles = dict.fromkeys(map(find_obstacle, find_optimizers(app_state, self._taking.registry)))
            warnings += tuple(f"staging='lazy': copied at the call is all {obstacle}" for obstacle in obstacles if obstacle)
        return _Scene(captured, candidate, eligibility, warnings)

    def _begin(self, agreement: Agreement, scene: _Scene, planning: PlanAgreement, trial: Trial) -> tuple[Pieces, Begin]:
        """On the coordinator: the plan, and whether the place and its room will do."""
        with self._phase(agreement, "plan"):
            SaveIntent(None, overwrite=False, options=self._options, parent=None).check_user()
            plan = planning.lead()
            pieces = Pieces(plan, encode_values(scene.captured, plan, self._taking.registry))
        assert plan.common is not None
        with self._phase(agreement, "begin"):
            is_step = find_step(self._store, None) is not None
            ground = survey_ground(self._store, sections=plan.common.sections, is_step=is_step)
            required, events = self._options.require_guarded, self._operation.events
            store = self._means.guards.settle(self._store, required=required, is_step=is_step, events=events)
            values_nbytes = sum(map(len, pieces.values.values()))
            self._outlook = look_ahead(store, ground, plan.common, values_nbytes=values_nbytes, rehearsal=self._rehearsal)
            replica_check = self._options.replica_check  # of all ranks, as for a save
            begun = Begin(plan.id, scene.candidate.is_first, ground.generation, "", replica_check)
            trial.begin(ground)
            agreement.announce("begin", begun.encode())
        return pieces, begun

    def _follow(self, agreement: Agreement, scene: _Scene, planning: PlanAgreement, trial: Trial) -> tuple[Pieces, Begin]:
        """On all other ranks: as the coordinator has planned."""
        with self._phase(agreement, "begin"):
            begun = read_message(agreement.hear("begin"), Begin)
            plan = planning.follow(begun)
            return Pieces(plan, encode_values(scene.captured, plan, self._taking.registry)), begun

    def _compare(self, agreement: Agreement, scene: _Scene, pieces: Pieces, begun: Begin) -> None:
        """Compare what several ranks hold as at the first save of a structure: in full, and strictly."""
        strictness = Strictness.of(begun.replica_check, "error", is_first=True)
        comparison = Comparison(agreement, pieces.plan, strictness=strictness)
        with self._phase(agreement, "compare"):
            held = self._hold(agreement, scene, pieces.plan, strictness)
            agreement.post("held", Durable((), pieces.nbytes, *comparison.digest(held)).encode())
            if self._outlook is not None:
                posts = [read_message(post, Durable) for post in agreement.collect("held")]
                question, _ = comparison.find_question(posts, self._outlook.plan)
                agreement.announce("question", question.encode())
            question = read_message(agreement.hear("question"), Question)
            if question.is_asked:
                comparison.answer(question, held)
                if self._group.is_coordinator:
                    comparison.judge(question)

    def _hold(self, agreement: Agreement, scene: _Scene, plan: AgreedPlan, strictness: Strictness) -> Held:
        reading = Reading(self.subject, strictness, agreement.check)
        structure, registry = scene.candidate.structure, self._taking.registry
        return hold(scene.captured, plan, structure=structure, registry=registry, reading=reading)

    # ---------------------------------------------------------------------------------------------------------- the measures

    def _measure(self, agreement: Agreement, app_state: Mapping[str, object], pieces: Pieces, first: _Scene) -> _Costs:
        """Have the arenas that saves will use, and find out how long a call will take."""
        local, began_s = pieces.plan.local, time.perf_counter()
        scene = self._take_apart(app_state)  # once more: the first time everything is new to it
        is_stable = scene.candidate.fingerprint == first.candidate.fingerprint
        if is_stable:
            encode_values(scene.captured, pieces.plan, self._taking.registry)
            self._hold(agreement, scene, pieces.plan, self._sampling)
        seconds = time.perf_counter() - began_s
        arena_nbytes, copy_rate = self._fill_arenas(pieces.plan)
        lazy_nbytes = int(local.nbytes[first.eligibility.is_lazy[local.local_row]].sum())
        staging = StagingReport(int(local.nbytes.sum()), lazy_nbytes, arena_nbytes, first.eligibility.reasons)
        warnings = first.warnings if is_stable else (*first.warnings, _UNSTABLE)
        return _Costs(staging, copy_rate, seconds + (staging.nbytes - lazy_nbytes) / copy_rate, warnings)

    def _fill_arenas(self, plan: AgreedPlan) -> tuple[int, float]:
        """Length of each arena, all faulted in now, and how many bytes a second this rank copies into one."""
        layout, _ = self._means.staging.layouts.find(plan)
        pool, taken = self._means.staging.arenas, list[Arena]()
        try:
            taken += (pool.take(layout.total_nbytes) for _ in range(self._options.max_in_flight))
            taken[0].views = None  # its gaps will not be zeros any more
            return taken[0].nbytes, _time_copy(taken[0].memory)
        finally:
            for arena in taken:
                pool.give_back(arena)

    def _sum_up(self, agreement: Agreement, pieces: Pieces, costs: _Costs, write_rate: float) -> _Summary:
        """What the ranks have found out, together."""
        agreement.post("values", _Values({section: len(data) for section, data in pieces.values.items()}).encode())
        if self._outlook is not None:
            posts = [read_message(post, _Values).nbytes for post in agreement.collect("values")]
            agreement.announce("outline", self._outlook.outline(posts).encode())
        outline = read_message(agreement.hear("outline"), Outline)
        found = outline.forecast(pieces.plan.local.held.shards, block_nbytes=self._means.pool.block_nbytes)
        lazy_s = costs.staging.lazy_nbytes / costs.copy_rate
        duration_s = costs.stall_s + lazy_s + pieces.nbytes / write_rate
        own = (found.wanted_nbytes, found.read_nbytes, found.num_blobs)
        measured = _Measured(pieces.nbytes, write_rate, costs.stall_s, duration_s, *own)
        agreement.post("measured", measured.encode())
        if self._outlook is not None:
            ranks = [read_message(post, _Measured) for post in agreement.collect("measured")]
            loads = self._outlook.forecast_loads(outline, block_nbytes=self._means.pool.block_nbytes)
            agreement.announce("summary", _join(self._outlook, ranks, loads).encode())
        return read_message(agreement.hear("summary"), _Summary)

    def _report(self, costs: _Costs, summary: _Summary) -> PrepareReport:
        step_s, loads = self._rehearsal.step_s, tuple(LoadForecast(*load) for load in summary.loads)
        fields = {name: getattr(summary, name) for name in _Summary.__struct_fields__}
        fields |= {"loads": loads, "warnings": (*summary.warnings, *costs.warnings)}
        return PrepareReport(
            url=self._store.url,
            num_ranks=self._group.size,
            num_steps=self._rehearsal.num_steps,
            staging=costs.staging,
            copy_rate=costs.copy_rate,
            num_steps_between=None if step_s is None else max(1, math.ceil((summary.duration_s - summary.stall_s) / step_s)),
            **fields,
        )


def _join(outlook: Outlook, ranks: Sequence[_Measured], loads: Sequence[LoadForecast]) -> _Summary:
    """What the coordinator makes of the figures of all ranks; the load of today is that of the rank that reads most."""
    plan, nbytes = outlook.plan, [rank.nbytes for rank in ranks]
    most = max(ranks, key=lambda rank: rank.read_nbytes)
    today = (_TODAY, len(ranks), most.wanted_nbytes, most.read_nbytes, most.num_blobs)
    others = [(load.layout, load.num_ranks, load.wanted_nbytes, load.read_nbytes, load.num_blobs) for load in loads]
    return _Summary(
        num_tensors=plan.num_tensors,
        nbytes=sum(nbytes),
        smallest_rank_nbytes=min(nbytes),
        largest_rank_nbytes=max(nbytes),
        num_files=len(plan.blobs) + _NUM_RECORDS,
        needed_nbytes=outlook.needed_nbytes,
        free_nbytes=outlook.free_nbytes,
        write_rate=sum(rank.write_rate for rank in ranks),
        stall_s=max(rank.stall_s for rank in ranks),
        duration_s=max(rank.duration_s for rank in ranks),
        loads=(today, *others),
        warnings=outlook.warnings,
    )


def _time_copy(memory: memoryview) -> float:
    """Bytes a second that are copied from one half of an arena, or a part of it, into the other; the best of a few copies."""
    bits, seconds = np.frombuffer(memory, dtype=np.uint8), list[float]()
    nbytes = min(len(bits) // 2, _MAX_COPIED_NBYTES)
    for _ in range(_NUM_COPIES):
        began_s = time.perf_counter()
        np.copyto(bits[:nbytes], bits[nbytes : 2 * nbytes])
        seconds.append(time.perf_counter() - began_s)
    return nbytes / max(min(seconds), 1e-9)
