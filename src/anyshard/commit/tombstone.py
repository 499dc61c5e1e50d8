"""Fences and tombstones: records that end what is unfinished, or the step itself, before any file goes.

Whoever wants to delete takes the next generation first. A writer that was only asleep then loses the race for that generation,
so that no published checkpoint can ever name a deleted file.

A store that is not `guarded` cannot decide that race, so nothing is fenced there. A tombstone needs no decision: the generation
after a committed record is nobody's aim but that of other deletes, since to replace a checkpoint is refused there, and whichever
of their tombstones stays says the same. Writers of the deleted generation itself see that there is a later one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from anyshard.commit.deletion import deletable, empty_directories, read_generations
from anyshard.commit.publish import PATIENT, Patience, create_record
from anyshard.commit.resolve import Record, look
from anyshard.commit.stamp import utc_now, writer_name
from anyshard.errors import CheckpointDamaged, CheckpointNotFound, CommitConflict
from anyshard.monitor.events import SILENT, Emitter
from anyshard.records.manifest import Manifest, StepState
from anyshard.records.names import make_attempt
from anyshard.storage.protocol import Store


def _as_it_is(store: Store) -> Store:
    return store


def delete_step(
    store: Store,
    *,
    settle: Callable[[Store], Store] = _as_it_is,
    patience: Patience = PATIENT,
    events: Emitter = SILENT,
) -> tuple[str, ...]:
    """Delete a checkpoint: it is gone for readers when this returns or dies half-way; return the keys of the deleted files.

    A tombstone becomes the next generation, then data goes, then old records; the tombstone stays. Where another writer takes
    that generation first, what it made is deleted too. Deleting again finishes what was interrupted. `settle` finds out whether
    the store is `guarded`, once there is something to delete. Raises `CheckpointNotFound` if no record was ever there.
    """
    while (tombstone := _next_tombstone(store)) is not None:
        store = settle(store)
        with suppress(CommitConflict):  # another writer took that generation: look again, and end that one's
            commit = "guarded" if store.capabilities.guarded else "unguarded"
            create_record(store, replace(tombstone, commit=commit), patience=patience)
            events.event("delete.tombstone.created", detail=f"generation {tombstone.generation}")
            break
    return _remove_licensed(store, events)


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


def _next_tombstone(store: Store) -> Manifest | None:
    """The tombstone to create; None if the step is deleted already."""
    _, newest = look(store)
    if newest is None:
        raise CheckpointNotFound(f"{store.url}: no checkpoint is there to delete; anyshard.ops.clean removes unfinished saves")
    manifest = _decode_or_none(newest)
    is_deleted = manifest is not None and manifest.state is StepState.DELETED
    return None if is_deleted else make_tombstone(newest.generation + 1, manifest)


def _remove_licensed(store: Store, events: Emitter) -> tuple[str, ...]:
    # Readers were told by the tombstone, so there is no grace.
    listing, generations = read_generations(store)
    keys = deletable(listing, generations, now_s=math.inf, grace_s=0)
    store.delete(keys)
    store.delete(empty_directories(listing, generations.newest, removed=keys))
    events.event("delete.files.removed", detail=f"{len(keys)} files")
    return keys


def _decode_or_none(record: Record) -> Manifest | None:
    try:
        return record.decode()
    except CheckpointDamaged:
        return None
