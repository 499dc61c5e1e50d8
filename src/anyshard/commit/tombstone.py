"""Fences and tombstones: records that end what is unfinished, or the step itself, before any file goes.

Whoever wants to delete takes the next generation first. A writer that was only asleep then loses the race for that generation,
so that no published checkpoint can ever name a deleted file.

A store that is not `guarded` cannot decide that race, so nothing is fenced there. A tombstone needs no decision: the generation
after a committed record is nobody's aim but that of other deletes, since to replace a checkpoint is refused there, and whichever
of their tombstones stays says the same. Writers of the deleted generation itself see that there is a later one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from anyshard.commit.deletion import remove_licensed
from anyshard.commit.guard import as_it_is
from anyshard.commit.listing import StepListing
from anyshard.commit.parts import Part, find_parts, part_prefix, part_store
from anyshard.commit.publish import PATIENT, Patience, create_record
from anyshard.commit.resolve import Record, look
from anyshard.commit.stamp import utc_now, writer_name
from anyshard.errors import CheckpointDamaged, CheckpointNotFound, CommitConflict
from anyshard.monitor.events import SILENT, Emitter
from anyshard.records.manifest import Manifest, StepState
from anyshard.records.names import make_attempt
from anyshard.storage.protocol import Store


def delete_step(
    store: Store,
    *,
    generation: int | None = None,
    settle: Callable[[Store], Store] = as_it_is,
    patience: Patience = PATIENT,
    events: Emitter = SILENT,
) -> tuple[str, ...]:
    """Delete a checkpoint: it is gone for readers when this returns or dies half-way; return the keys of the deleted files.

    A tombstone becomes the next generation, then data goes, then old records; the tombstone stays. Where another writer takes
    that generation first, what it made is deleted too, unless it is the checkpoint of this `generation` alone that is to go: then
    another one is left alone (`CommitConflict`). Parts of the step are deleted in the same way once it is. Deleting again
    finishes what was interrupted. `settle` finds out whether the store is `guarded`, once there is something to delete. Raises
    `CheckpointNotFound` if no record was ever there, unpublished parts or not.
    """
    while True:
        listing, newest = look(store)
        parts = find_parts(store, listing)  # before the tombstone: a part that comes later is not of what it ends
        tombstone = _next_tombstone(store, newest, parts)
        if tombstone is None:
            parts = find_outdated(parts, listing, newest)
            break
        if generation is not None and tombstone.generation != generation + 1:
            raise CommitConflict(
                f"{store.url}: expected to delete the checkpoint of generation {generation}, found generation "
                f"{tombstone.generation - 1}: it was saved over meanwhile. Nothing was deleted"
            )
        store = settle(store)
        with suppress(CommitConflict):  # another writer took that generation: look again
            create_record(store, _as_committed(store, tombstone), patience=patience)
            events.event("delete.tombstone.created", detail=f"generation {tombstone.generation}")
            break
    ended = end_parts(store, parts, patience=patience, events=events)
    return (*ended, *remove_licensed(store, grace_s=0, event="delete.files.removed", events=events))


def end_parts(store: Store, parts: Iterable[Part], *, patience: Patience = PATIENT, events: Emitter = SILENT) -> tuple[str, ...]:
    """Delete these parts of a step whose tombstone is there, each as it was found; return the keys of the deleted files.

    One that was saved anew meanwhile, or is being saved, stays.
    """
    return tuple(key for part in parts for key in _end_part(store, part, patience, events))


def find_outdated(parts: Iterable[Part], listing: StepListing, newest: Record | None) -> tuple[Part, ...]:
    """Those parts of a deleted step that whoever deleted it may have left; a younger one than the tombstone is of a new save.

    `newest` is the tombstone, as a look with `listing` has found it.
    """
    entry = None if newest is None else listing.manifests.get(newest.generation)
    if entry is None:
        return ()
    return tuple(part for part in parts if not part.is_living or part.modified_s < entry.modified_s)


def _end_part(store: Store, part: Part, patience: Patience, events: Emitter) -> tuple[str, ...]:
    own = part_store(store, part.name)
    if part.record is None:
        return ()
    if part.is_living:
        tombstone = make_tombstone(part.record.generation + 1, _decode_or_none(part.record))
        try:
            create_record(own, _as_committed(store, tombstone), patience=patience)
        except CommitConflict:
            return ()
        events.event("delete.part.tombstone.created", detail=f"{part.name}, generation {tombstone.generation}")
    keys = remove_licensed(own, grace_s=0, event="delete.files.removed", events=events)
    return tuple(part_prefix(part.name) + key for key in keys)


def make_tombstone(generation: int, previous: Manifest | None) -> Manifest:
    """The record that says that a step is deleted; it keeps the identity of `previous`, the checkpoint that was there."""
    return Manifest(
        generation=generation,
        attempt=make_attempt(),
        state=StepState.DELETED,
        step=None if previous is None else previous.step,
        run_id=None if previous is None else previous.run_id,
        sections=(),
        time=utc_now(),
        writer=writer_name(),
        world_size=1 if previous is None else previous.world_size,
        num_rows=0,
        num_slots=0,
        index=None,
        blobs=(),
    )


def make_fence(generation: int, newest: Manifest | None) -> Manifest:
    """The record that takes `generation` away from unfinished attempts and changes nothing for readers.

    A committed checkpoint is committed once more, with the same attempt and files; without one it is a tombstone.
    """
    if newest is None or newest.state is StepState.DELETED:
        return make_tombstone(generation, newest)
    return replace(newest, generation=generation)


def _as_committed(store: Store, record: Manifest) -> Manifest:
    return replace(record, commit="guarded" if store.capabilities.guarded else "unguarded")


def _next_tombstone(store: Store, newest: Record | None, parts: Sequence[Part]) -> Manifest | None:
    """The tombstone to create; None if the step is deleted already."""
    if newest is None:
        raise CheckpointNotFound(
            f"{store.url}: no checkpoint is there to delete; anyshard.ops.clean removes unfinished saves"
            + (f", and with unpublished=True also parts of a step: {', '.join(part.name for part in parts)}" if parts else "")
        )
    manifest = _decode_or_none(newest)
    is_deleted = manifest is not None and manifest.state is StepState.DELETED
    return None if is_deleted else make_tombstone(newest.generation + 1, manifest)


def _decode_or_none(record: Record) -> Manifest | None:
    try:
        return record.decode()
    except CheckpointDamaged:
        return None
