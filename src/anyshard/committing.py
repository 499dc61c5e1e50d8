"""The last half of a save on one rank, once its blobs are durable: compare, decide, publish."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import final

from anyshard.agreed_plan import GlobalPlan
from anyshard.commit.publish import Patience, publish
from anyshard.commit.resolve import read_record
from anyshard.commit.stamp import stamp_after, utc_now, writer_name
from anyshard.comparison import Comparison, Held
from anyshard.coord.agreement import Agreement
from anyshard.coord.verdict import Decision
from anyshard.errors import AnyshardError, KeyValueStoreLost, OperationFailed
from anyshard.operation import Operation
from anyshard.plan_agreement import order_blobs
from anyshard.records.digests import digest_bytes
from anyshard.records.manifest import BlobEntry, IndexEntry, Manifest, StepState, decode_manifest, encode_manifest
from anyshard.records.names import index_name
from anyshard.records.rank_messages import Begin, Durable, Published, Question, read_message
from anyshard.save_intent import SaveIntent
from anyshard.snapshot import Facts, Pieces

_PUBLISHING_S = 10.0  # how long a coordinator that cannot be heard may take to publish
_POLL_S = 0.2


@final
@dataclass(frozen=True, slots=True)
class Commit:
    """How one attempt ends on this rank: what it is about, what the rank wrote, and what it holds that others may hold too."""

    operation: Operation
    intent: SaveIntent
    begun: Begin
    pieces: Pieces
    facts: Facts
    comparison: Comparison
    held: Held

    def lead(self, agreement: Agreement) -> Published:
        """On the coordinator: once all blobs are durable and what ranks hold alike is alike, decide and publish."""
        common = self.pieces.plan.common
        assert common is not None
        differing: tuple[str, ...] = ()
        with self.operation.phase(agreement, "compare"):
            posts = [read_message(post, Durable) for post in agreement.collect("durable")]
            question, num_buffers = self.comparison.find_question(posts, common)
            agreement.announce("question", question.encode())
            if question.is_asked:
                self.comparison.answer(question, self.held)
                differing = self.comparison.judge(question)
        with self.operation.phase(agreement, "commit"):
            manifest = self._make_manifest(common, order_blobs(common, posts, self.begun))
            patience = Patience(self.intent.options.timeout_s)
            hosts, events = [post.host for post in posts], self.operation.events
            publish(self.operation.store, manifest, decide=agreement.decide, hosts=hosts, patience=patience, events=events)
        published = Published(common.num_tensors, sum(post.nbytes for post in posts), differing, num_buffers)
        agreement.announce("published", published.encode())
        return published

    def follow(self, agreement: Agreement) -> Published:
        """On all other ranks: as the coordinator decides, or as the storage shows if it is not heard of any more."""
        try:
            with self.operation.phase(agreement, "compare"):
                question = read_message(agreement.hear("question"), Question)
                if question.is_asked:
                    self.comparison.answer(question, self.held)
            with self.operation.phase(agreement, "commit"):
                agreement.decide()
                return read_message(agreement.hear("published"), Published)
        except OperationFailed as failure:
            if agreement.decision is Decision.ABORT or not self._is_published(failure):
                raise
            warning = f"the coordinator was lost after it had published the checkpoint: {failure.headline}"
            return Published(self.facts.num_tensors, self.pieces.nbytes, warnings=(warning,))

    def _is_published(self, failure: OperationFailed) -> bool:
        """Whether our record is there. A coordinator that nobody can hear may be about to make it: then for some time."""
        patience = _PUBLISHING_S if isinstance(failure, KeyValueStoreLost) else 0.0
        deadline = time.monotonic() + min(patience, self.intent.options.timeout_s)
        while True:
            try:
                record = read_record(self.operation.store, self.begun.generation)
                if record is not None and not record.is_torn:
                    return record.decode().attempt == self.begun.attempt
            except AnyshardError as error:
                failure.add_note(f"the storage could not say whether the checkpoint exists: {error}")
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)

    def _make_manifest(self, common: GlobalPlan, blobs: tuple[BlobEntry, ...]) -> Manifest:
        lineage = self.intent.lineage
        manifest = Manifest(
            generation=self.begun.generation,
            attempt=self.begun.attempt,
            state=StepState.COMMITTED,
            step=self.intent.step,
            run_id=self.begun.run_id,
            sections=common.sections,
            time=stamp_after(utc_now(), (lineage.after, "" if lineage.resumed is None else lineage.resumed.time)),
            writer=writer_name(),
            world_size=self.operation.group.size,
            mesh=dict(self.facts.mesh),
            num_rows=common.num_rows,
            num_slots=common.num_slots,
            index=self._write_index(common.index),
            blobs=blobs,
            parent=self.intent.parent,
            commit="guarded" if self.operation.store.capabilities.guarded else "unguarded",
            user=dict(self.intent.options.user),
            resumed=lineage.resumed,
        )
        decode_manifest(encode_manifest(manifest), file="manifest")  # what a reader would refuse must not be committed
        return manifest

    def _write_index(self, data: bytes) -> IndexEntry:
        entry = IndexEntry(index_name(self.begun.generation, self.begun.attempt), len(data), digest_bytes(data))
        self.operation.store.create(entry.name, data, token=self.begun.attempt)
        return entry
