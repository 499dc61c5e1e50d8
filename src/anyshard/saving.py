"""The road of a save: adapters -> planning (agreed through coord) -> commit (begin) -> engine -> commit (publish).

    a rank        post structure -> hear begin (-> receive plan) -> write -> post durable -> hear question -> decide
    coordinator   (-> collect structures, plan, hand out) -> begin -> write -> collect durable, compare -> decide -> publish

At the first save of a structure whatever a rank can refuse alone is refused before the coordinator touches the storage. With the
plan of an earlier save it begins without having heard of anybody: then the refusal of another rank ends an attempt that has
begun. A failure on any rank is one on all of them, and each removes what it wrote once the decision to give up is known.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from anyshard.adapters.capture import capture
from anyshard.agreed_plan import AgreedPlan, GlobalPlan, PlanCache, describe_structure
from anyshard.commit.attempt import Attempt, abandoning, begin, own_error
from anyshard.commit.deletion import remove_superseded
from anyshard.commit.publish import Patience as PublishPatience
from anyshard.commit.publish import publish
from anyshard.commit.resolve import read_record
from anyshard.commit.stamp import utc_now, writer_name
from anyshard.comparison import Comparison, Held, Strictness
from anyshard.coord.agreement import Agreement
from anyshard.coord.looks import Rarely
from anyshard.coord.verdict import Decision
from anyshard.engine.blocks import BlockPool
from anyshard.engine.crew import Patience
from anyshard.engine.write import WriteJob, write_blobs
from anyshard.errors import (
    AnyshardError,
    InvalidOption,
    KeyValueStoreLost,
    OperationFailed,
    StorageFull,
    StorageStuck,
    StructureChanged,
)
from anyshard.operation import Operation
from anyshard.options import SaveOptions
from anyshard.plan_agreement import PlanAgreement, order_blobs
from anyshard.records.addresses import section_of, show
from anyshard.records.captured import Captured
from anyshard.records.digests import digest_bytes
from anyshard.records.manifest import BlobEntry, IndexEntry, Manifest, Parent, StepState, decode_manifest, encode_manifest
from anyshard.records.names import index_name
from anyshard.records.rank_messages import Begin, Durable, Published, Question, list_entries, read_message
from anyshard.records.section_values import ABSENT, SectionValues, encode_section
from anyshard.records.strict_json import MAX_INT, check_value, encode_object
from anyshard.records.value_parts import pick_parts
from anyshard.records.values import ValueRegistry
from anyshard.reports import SaveReport
from anyshard.storage.protocol import Store

logger = logging.getLogger(__name__)

_SHOWN = 5
_PUBLISHING_S = 10.0  # how long a coordinator that cannot be heard may take to publish
_POLL_S = 0.2
_RECORDS_NBYTES = 1 << 20  # what directories and records may take besides the blobs
_BLOB_NBYTES, _ROW_NBYTES = 3 * 4096, 64  # of a blob the head, the tail and a block of the file system; of a row padding and slot
# The last word of a name, if it is a number or letters and a number: step_100, run2-step100, epoch=3, but not v1.5 or 1e5.
_TRAILING_NUMBER = re.compile(r"(?:^|[_=-])[A-Za-z]*0*([0-9]{1,18})$")


@dataclass(frozen=True, slots=True)
class SaveIntent:
    """What the caller asked for, and the checkpoint that the job had loaded before."""

    step: int | None
    overwrite: bool
    options: SaveOptions
    parent: Parent | None


@dataclass(frozen=True, slots=True)
class SavingMeans:
    """What saving needs besides a store and a group: the engine's blocks, the types that values may have, the group's plans."""

    pool: BlockPool
    registry: ValueRegistry
    plans: PlanCache


@dataclass(frozen=True, slots=True)
class _Pieces:
    """What a rank knows of its save before storage is touched. `values` are the payloads of its sections."""

    captured: Captured
    plan: AgreedPlan
    values: Mapping[str, bytes]

    @property
    def nbytes(self) -> int:
        return int(self.plan.local.nbytes.sum()) + sum(map(len, self.values.values()))

    def list_blobs(self, begun: Begin) -> tuple[str, ...]:
        """The names of all blobs that this rank writes."""
        return tuple(begun.name_blob(of.section, of.rank, of.k) for of in self.plan.local.plan.blobs)


class SaveOperation:
    """One save of a group. `run` returns when the checkpoint is committed, or raises and leaves the storage as it was."""

    def __init__(self, operation: Operation, intent: SaveIntent, means: SavingMeans) -> None:
        self._operation = operation
        self._group = operation.group
        self._store = operation.store
        self._intent = intent
        self._means = means
        self._attempt: Attempt | None = None  # on the coordinator, once it has begun
        self._written: tuple[str, ...] = ()  # names of the blobs of this rank, once it may have begun to write them

    def run(self, app_state: Mapping[str, object]) -> SaveReport:
        """Save the app state of this moment."""
        subject, agreement = f"{self._operation.describe('save of')}, step {self._intent.step},", None
        try:
            agreement = self._operation.agree(subject, timeout_s=self._intent.options.timeout_s)
            with agreement:
                return self._save(agreement, app_state)
        except BaseException as error:
            self._give_up(agreement.decision if agreement else None, error)
            raise

    def _save(self, agreement: Agreement, app_state: Mapping[str, object]) -> SaveReport:
        with self._phase(agreement, "adapt"):
            captured = capture(app_state, registry=self._means.registry, rank=self._group.rank, world_size=self._group.size)
            structure = describe_structure(captured, self._means.registry, world_size=self._group.size)
            options = self._intent.options
            planning = PlanAgreement(
                agreement,
                self._group,
                self._means.plans,
                structure=structure,
                max_blob_nbytes=options.max_blob_nbytes,
            )
            planning.post(values_nbytes=self._measure_values(captured) if planning.is_first and self._group.size > 1 else 0)
        start, end = (self._begin, self._commit) if self._group.is_coordinator else (self._follow, self._hear_commit)
        pieces, begun = start(agreement, captured, planning)
        strictness = Strictness.of(begun.replica_check, options.on_differing_values, is_first=planning.is_first)
        held = Held(captured, structure.parts, self._means.registry)
        comparison = Comparison(agreement, pieces.plan, held, strictness=strictness)
        blobs = self._write(agreement, pieces, begun)
        with self._phase(agreement, "digest"):
            durable = Durable(list_entries(blobs), pieces.nbytes, *comparison.digest())
        agreement.post("durable", durable.encode())
        published = end(agreement, pieces, begun, comparison)
        planning.keep(pieces.plan)
        return self._report(pieces, begun, published, blobs=blobs, plan_was_cached=not planning.is_first)

    @contextmanager
    def _phase(self, agreement: Agreement, name: str, *, nbytes: int | None = None) -> Iterator[None]:
        with agreement.phase(name), self._operation.events.span(f"save.{name}", nbytes=nbytes):
            yield

    # ----------------------------------------------------------------------------------------------------------- the start

    def _begin(self, agreement: Agreement, captured: Captured, planning: PlanAgreement) -> tuple[_Pieces, Begin]:
        """On the coordinator: the plan, then the attempt."""
        with self._phase(agreement, "plan"):
            self._check_user()
            plan = planning.lead()
            pieces = self._make_pieces(captured, plan)
        assert plan.common is not None
        with self._phase(agreement, "begin"):
            _check_space(self._store, _estimate_nbytes(plan.common) + sum(map(len, pieces.values.values())))
            self._attempt = begin(
                self._store, sections=plan.common.sections, overwrite=self._intent.overwrite, events=self._operation.events
            )
        replica_check = self._intent.options.replica_check  # of all ranks, or those that compare less would seem to differ
        begun = Begin(plan.id, planning.is_first, self._attempt.generation, self._attempt.id, replica_check)
        agreement.announce("begin", begun.encode())
        return pieces, begun

    def _follow(self, agreement: Agreement, captured: Captured, planning: PlanAgreement) -> tuple[_Pieces, Begin]:
        """On all other ranks: as the coordinator begins."""
        with self._phase(agreement, "begin"):
            begun = read_message(agreement.hear("begin"), Begin)
            return self._make_pieces(captured, planning.follow(begun)), begun

    def _check_user(self) -> None:
        user = dict(self._intent.options.user)
        check_value(user, address="user", depth=2)  # it lies within the manifest's object
        encode_object(user)

    def _measure_values(self, captured: Captured) -> int:
        """How many bytes this rank's per-rank values take; raises if one cannot be stored. All other values are listed by now."""
        values = {address: SectionValues(per_rank={address: part.tree}) for address, part in captured.per_rank.items()}
        encoded = (encode_section(of, section=section_of(at), registry=self._means.registry) for at, of in values.items())
        return sum(map(len, encoded))

    def _make_pieces(self, captured: Captured, plan: AgreedPlan) -> _Pieces:
        sections = [of.section for of in plan.local.plan.blobs if of.k == 0]
        values = {
            section: encode_section(_take_values(captured, plan, section), section=section, registry=self._means.registry)
            for section in sections
        }
        return _Pieces(captured, plan, values)

    # ----------------------------------------------------------------------------------------------------------- the bytes

    def _write(self, agreement: Agreement, pieces: _Pieces, begun: Begin) -> tuple[BlobEntry, ...]:
        local = pieces.plan.local
        with self._phase(agreement, "write", nbytes=pieces.nbytes):
            self._written = pieces.list_blobs(begun)
            sources, job = local.pick_sources(pieces.captured.sources), self._write_job(agreement, begun, pieces.values)
            return write_blobs(self._store, local.plan, sources=sources, job=job, pool=self._means.pool)

    def _write_job(self, agreement: Agreement, begun: Begin, values: Mapping[str, bytes]) -> WriteJob:
        options = self._intent.options
        return WriteJob(
            generation=begun.generation,
            attempt=begun.attempt,
            step=self._intent.step,
            run_id=None,
            world_size=self._group.size,
            writer=writer_name(),
            values=values,
            threads=options.threads,
            events=self._operation.events,
            patience=Patience(options.timeout_s),
            check=Rarely(agreement.check),
        )

    # ---------------------------------------------------------------------------------------------------------- the commit

    def _commit(self, agreement: Agreement, pieces: _Pieces, begun: Begin, comparison: Comparison) -> Published:
        """On the coordinator: once all blobs are durable and what ranks hold alike is alike, decide and publish."""
        common = pieces.plan.common
        assert common is not None
        differing: tuple[str, ...] = ()
        with self._phase(agreement, "compare"):
            posts = [read_message(post, Durable) for post in agreement.collect("durable")]
            question, num_buffers = comparison.find_question(posts, common)
            agreement.announce("question", question.encode())
            if question.is_asked:
                comparison.answer(question)
                differing = comparison.judge(question)
        with self._phase(agreement, "commit"):
            manifest = self._make_manifest(begun, pieces, common, order_blobs(common, posts, begun))
            patience = PublishPatience(self._intent.options.timeout_s)
            publish(self._store, manifest, decide=agreement.decide, patience=patience, events=self._operation.events)
        published = Published(common.num_tensors, sum(post.nbytes for post in posts), differing, num_buffers)
        agreement.announce("published", published.encode())
        return published

    def _hear_commit(self, agreement: Agreement, pieces: _Pieces, begun: Begin, comparison: Comparison) -> Published:
        """On all other ranks: as the coordinator decides, or as the storage shows if it is not heard of any more."""
        try:
            with self._phase(agreement, "compare"):
                question = read_message(agreement.hear("question"), Question)
                if question.is_asked:
                    comparison.answer(question)
            with self._phase(agreement, "commit"):
                agreement.decide()
                return read_message(agreement.hear("published"), Published)
        except OperationFailed as failure:
            if agreement.decision is Decision.ABORT or not self._is_published(begun, failure):
                raise
            warning = f"the coordinator was lost after it had published the checkpoint: {failure.headline}"
            return Published(len(pieces.captured.shards.tensors), pieces.nbytes, warnings=(warning,))

    def _is_published(self, begun: Begin, failure: OperationFailed) -> bool:
        """Whether our record is there. A coordinator that nobody can hear may be about to make it: then for some time."""
        patience = _PUBLISHING_S if isinstance(failure, KeyValueStoreLost) else 0.0
        deadline = time.monotonic() + min(patience, self._intent.options.timeout_s)
        while True:
            try:
                record = read_record(self._store, begun.generation)
                if record is not None and not record.is_torn:
                    return record.decode().attempt == begun.attempt
            except AnyshardError as error:
                failure.add_note(f"the storage could not say whether the checkpoint exists: {error}")
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)

    def _make_manifest(self, begun: Begin, pieces: _Pieces, common: GlobalPlan, blobs: tuple[BlobEntry, ...]) -> Manifest:
        manifest = Manifest(
            generation=begun.generation,
            attempt=begun.attempt,
            state=StepState.COMMITTED,
            step=self._intent.step,
            run_id=None,
            sections=common.sections,
            time=utc_now(),
            writer=writer_name(),
            world_size=self._group.size,
            mesh=dict(pieces.captured.mesh),
            num_rows=common.num_rows,
            num_slots=common.num_slots,
            index=self._write_index(begun, common.index),
            blobs=blobs,
            parent=self._intent.parent,
            commit="guarded" if self._store.capabilities.guarded else "unguarded",
            user=dict(self._intent.options.user),
        )
        decode_manifest(encode_manifest(manifest), file="manifest")  # what a reader would refuse must not be committed
        return manifest

    def _write_index(self, begun: Begin, data: bytes) -> IndexEntry:
        entry = IndexEntry(index_name(begun.generation, begun.attempt), len(data), digest_bytes(data))
        self._store.create(entry.name, data, token=begun.attempt)
        return entry

    # ------------------------------------------------------------------------------------------------------------- the end

    def _give_up(self, decision: Decision | None, error: BaseException) -> None:
        """Remove what was written, if it is certain that nobody will publish it: only the coordinator does, and has ended."""
        if isinstance(error, StructureChanged):
            self._means.plans.drop()
        if self._attempt is not None:
            with abandoning(self._store, self._attempt, events=self._operation.events):
                raise error
        if decision is Decision.ABORT and not isinstance(own_error(error), StorageStuck):
            try:
                self._store.delete(self._written)
            except AnyshardError:
                logger.warning("%s: the blobs of this rank could not be removed", self._store.url, exc_info=True)

    def _report(
        self, pieces: _Pieces, begun: Begin, published: Published, *, blobs: tuple[BlobEntry, ...], plan_was_cached: bool
    ) -> SaveReport:
        return SaveReport(
            url=self._store.url,
            step=self._intent.step,
            generation=begun.generation,
            attempt=begun.attempt,
            num_tensors=published.num_tensors,
            nbytes=published.nbytes,
            duration_s=self._operation.duration_s,
            written_nbytes=sum(blob.nbytes for blob in blobs),
            plan_was_cached=plan_was_cached,
            differing_values=published.differing_values,
            num_differing_buffers=published.num_differing_buffers,
            warnings=(*pieces.captured.warnings, *_describe_differences(published), *self._remove_superseded()),
        )

    def _remove_superseded(self) -> tuple[str, ...]:
        # The checkpoint exists by now: what goes wrong in tidying up must not look like a failed save.
        if not self._group.is_coordinator:
            return ()
        try:
            remove_superseded(self._store, self._intent.options.overwrite_grace_s, events=self._operation.events)
        except AnyshardError as error:
            return (f"files of superseded generations could not be removed: {error}",)
        return ()


def _take_values(captured: Captured, plan: AgreedPlan, section: str) -> SectionValues:
    """What goes into this rank's payload of a section: the coordinator's whole tree, of others what nobody before them has."""
    tree = captured.trees.get(section, ABSENT)
    per_rank = {address: part.tree for address, part in captured.per_rank.items() if section_of(address) == section}
    if plan.common is not None:
        return SectionValues(tree, per_rank, plan.common.also.get(section, ()), plan.common.keys_in(section))
    owned = plan.owned.get(section, ())
    return SectionValues(pick_parts(tree, owned) if owned else ABSENT, per_rank)


def _describe_differences(published: Published) -> tuple[str, ...]:
    lines = list(published.warnings)
    if shown := ", ".join(map(show, published.differing_values[:_SHOWN])):
        lines.append(f"values that differ between ranks are stored as the first rank has them: {shown}")
    if count := published.num_differing_buffers:
        lines.append(f"{count} buffers of modules differ between ranks and are stored as the first rank has them")
    return tuple(lines)


def find_step(store: Store, step: int | None) -> int | None:
    """The step as given, else the number at the end of the last path component, else none."""
    if step is None:
        found = _TRAILING_NUMBER.search(store.url.rstrip("/").rsplit("/", 1)[-1])
        return int(found[1]) if found else None
    if isinstance(step, bool) or not hasattr(step, "__index__") or not 0 <= step.__index__() < MAX_INT:
        raise InvalidOption(f"step: expected a whole number, 0 or more and below 2^62, found {step!r}")
    return step.__index__()


def _estimate_nbytes(common: GlobalPlan) -> int:
    """Roughly what all ranks write without this one's values: tensors, per-rank values, what each blob and each row add."""
    return common.nbytes + _BLOB_NBYTES * len(common.blobs) + _ROW_NBYTES * common.num_rows


def _check_space(store: Store, nbytes: int) -> None:
    free = store.free_nbytes()
    if free is not None and free < (expected := nbytes + _RECORDS_NBYTES):
        raise StorageFull(
            f"{store.url}: expected room for {expected} bytes ({nbytes} of data, the rest for records), found {free} free; "
            "nothing was written. Free some space, delete old steps, or save elsewhere",
            file=store.url,
        )
