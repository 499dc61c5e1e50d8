"""The road of a save: adapters -> planning -> commit (begin) -> engine -> commit (publish).

Whatever can be refused is refused before `begin` touches the storage; from there on a failure removes what this attempt wrote.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from anyshard.adapters.capture import capture
from anyshard.commit.attempt import Attempt, abandoning, begin
from anyshard.commit.deletion import remove_superseded
from anyshard.commit.publish import Patience as PublishPatience
from anyshard.commit.publish import publish
from anyshard.commit.stamp import utc_now, writer_name
from anyshard.engine.blocks import BlockPool
from anyshard.engine.crew import Patience
from anyshard.engine.write import WriteJob, write_blobs
from anyshard.errors import AnyshardError, InvalidAppState, InvalidOption, StorageFull
from anyshard.operation import Operation
from anyshard.options import SaveOptions
from anyshard.planning.cover import check_cover
from anyshard.planning.pack import make_index, plan_save
from anyshard.records.addresses import check_directories
from anyshard.records.captured import Captured
from anyshard.records.digests import digest_bytes
from anyshard.records.index import decode_index, encode_index
from anyshard.records.manifest import BlobEntry, IndexEntry, Manifest, Parent, StepState, decode_manifest, encode_manifest
from anyshard.records.names import index_name
from anyshard.records.section_values import encode_section
from anyshard.records.strict_json import MAX_INT, check_value, encode_object
from anyshard.records.tables import Index, SavePlan
from anyshard.records.values import ValueRegistry
from anyshard.reports import SaveReport
from anyshard.storage.protocol import Store

_RECORDS_NBYTES = 1 << 20  # what directories and records may take besides the blobs
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
class SavePieces:
    """What is known of a save before storage is touched."""

    captured: Captured
    values: Mapping[str, bytes]
    plan: SavePlan
    index: bytes
    num_rows: int
    nbytes: int


class SaveOperation:
    """One save. `run` returns when the checkpoint is committed, or raises and leaves the storage as it was."""

    def __init__(self, operation: Operation, intent: SaveIntent, *, pool: BlockPool, registry: ValueRegistry) -> None:
        self._operation = operation
        self._intent = intent
        self._pool = pool
        self._registry = registry

    def run(self, app_state: Mapping[str, object]) -> SaveReport:
        """Save the app state of this moment."""
        store, events, intent = self._operation.store, self._operation.events, self._intent
        pieces = self._prepare(app_state)
        _check_space(store, pieces.nbytes)
        attempt = begin(store, sections=tuple(pieces.values), overwrite=intent.overwrite, events=events)
        with abandoning(store, attempt, events=events):
            with events.span("save.write", nbytes=pieces.nbytes):
                job = self._write_job(attempt, pieces.values)
                blobs = write_blobs(store, pieces.plan, sources=pieces.captured.sources, job=job, pool=self._pool)
            with events.span("save.commit"):
                manifest = self._make_manifest(attempt, pieces, blobs=blobs, index=self._write_index(attempt, pieces.index))
                decode_manifest(encode_manifest(manifest), file="manifest")  # as for the index
                publish(store, manifest, patience=PublishPatience(intent.options.timeout_s), events=events)
        return self._report(attempt, pieces, warnings=self._remove_superseded())

    def _prepare(self, app_state: Mapping[str, object]) -> SavePieces:
        events, options = self._operation.events, self._intent.options
        user = dict(options.user)
        check_value(user, address="user", depth=2)  # it lies within the manifest's object
        encode_object(user)
        with events.span("save.adapt"):
            captured = capture(app_state, registry=self._registry)
        check_directories(captured.trees)
        with events.span("save.plan"):
            values = {
                section: encode_section(tree, section=section, registry=self._registry)
                for section, tree in captured.trees.items()
            }
            plan = plan_save(captured.shards, tuple(values), rank=0, max_blob_nbytes=options.max_blob_nbytes)
            index = make_index([plan], captured.shards.tensors)
            _check_cover(index)
            encoded = encode_index(index)
            decode_index(encoded, max_rows=index.num_rows, file="index")  # what a reader would refuse must not be committed
        nbytes = sum(map(len, values.values())) + sum(source.nbytes for source in captured.sources)
        return SavePieces(captured, values, plan, encoded, index.num_rows, nbytes)

    def _write_job(self, attempt: Attempt, values: Mapping[str, bytes]) -> WriteJob:
        options = self._intent.options
        return WriteJob(
            generation=attempt.generation,
            attempt=attempt.id,
            step=self._intent.step,
            run_id=None,
            world_size=1,
            writer=writer_name(),
            values=values,
            threads=options.threads,
            events=self._operation.events,
            patience=Patience(options.timeout_s),
        )

    def _write_index(self, attempt: Attempt, data: bytes) -> IndexEntry:
        entry = IndexEntry(index_name(attempt.generation, attempt.id), len(data), digest_bytes(data))
        self._operation.store.create(entry.name, data, token=attempt.id)
        return entry

    def _make_manifest(
        self, attempt: Attempt, pieces: SavePieces, *, blobs: tuple[BlobEntry, ...], index: IndexEntry
    ) -> Manifest:
        return Manifest(
            generation=attempt.generation,
            attempt=attempt.id,
            state=StepState.COMMITTED,
            step=self._intent.step,
            run_id=None,
            sections=tuple(pieces.values),
            time=utc_now(),
            writer=writer_name(),
            world_size=1,
            num_rows=pieces.num_rows,
            num_slots=max((len(blob.rows) + (blob.k == 0) for blob in pieces.plan.blobs), default=0),
            index=index,
            blobs=blobs,
            parent=self._intent.parent,
            commit="guarded" if self._operation.store.capabilities.guarded else "unguarded",
            user=dict(self._intent.options.user),
        )

    def _remove_superseded(self) -> tuple[str, ...]:
        # The checkpoint exists by now: what goes wrong in tidying up must not look like a failed save.
        try:
            remove_superseded(self._operation.store, self._intent.options.overwrite_grace_s, events=self._operation.events)
        except AnyshardError as error:
            return (f"files of superseded generations could not be removed: {error}",)
        return ()

    def _report(self, attempt: Attempt, pieces: SavePieces, *, warnings: tuple[str, ...]) -> SaveReport:
        return SaveReport(
            url=self._operation.store.url,
            step=self._intent.step,
            generation=attempt.generation,
            attempt=attempt.id,
            num_tensors=len(pieces.captured.shards.tensors),
            nbytes=pieces.nbytes,
            duration_s=self._operation.duration_s,
            warnings=pieces.captured.warnings + warnings,
        )


def find_step(store: Store, step: int | None) -> int | None:
    """The step as given, else the number at the end of the last path component, else none."""
    if step is None:
        found = _TRAILING_NUMBER.search(store.url.rstrip("/").rsplit("/", 1)[-1])
        return int(found[1]) if found else None
    if isinstance(step, bool) or not hasattr(step, "__index__") or not 0 <= step.__index__() < MAX_INT:
        raise InvalidOption(f"step: expected a whole number, 0 or more and below 2^62, found {step!r}")
    return step.__index__()


def _check_cover(index: Index) -> None:
    if flaws := check_cover(index.shards):
        shown = "; ".join(map(str, flaws))
        raise InvalidAppState(f"expected shards that hold every tensor exactly once, found {shown}. Nothing was written")


def _check_space(store: Store, nbytes: int) -> None:
    free = store.free_nbytes()
    if free is not None and free < (expected := nbytes + _RECORDS_NBYTES):
        raise StorageFull(
            f"{store.url}: expected room for {expected} bytes ({nbytes} of data, the rest for records), found {free} free; "
            "nothing was written. Free some space, delete old steps, or save elsewhere",
            file=store.url,
        )
