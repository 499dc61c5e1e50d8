"""Fences and tombstones: records that end what is unfinished, or the step itself, before any file goes.

Whoever wants to delete takes the next generation first. A writer that was only asleep then loses the race for that generation,
so that no published checkpoint can ever name a deleted file.
"""

from __future__ import annotations

import math
from dataclasses import replace

from anyshard.commit.deletion import deletable, read_generations
from anyshard.commit.listing import list_step
from anyshard.commit.publish import PATIENT, Patience, create_record
from anyshard.commit.resolve import Record, read_newest
from anyshard.commit.stamp import utc_now, writer_name
from anyshard.errors import CheckpointDamaged, CheckpointNotFound
from anyshard.monitor.events import SILENT, Emitter
from anyshard.records.manifest import Manifest, StepState
from anyshard.records.names import make_attempt
from anyshard.storage.protocol import Store


def delete_step(store: Store, *, patience: Patience = PATIENT, events: Emitter = SILENT) -> tuple[str, ...]:
    """Delete a checkpoint: it is gone for readers when this returns or dies half-way; return the keys of the deleted files.

    A tombstone becomes the next generation, then data goes, then old records; the tombstone stays. Deleting again finishes
    what was interrupted. Raises `CheckpointNotFound` if no record was ever there.
    """
    listing = list_step(store)
    newest = read_newest(store, listing)
    if newest is None:
        raise CheckpointNotFound(f"{store.url}: no checkpoint is there to delete; anyshard.ops.clean removes unfinished saves")
    manifest = _decode_or_none(newest)
    if manifest is None or manifest.state is not StepState.DELETED:
        create_record(store, make_tombstone(newest.generation + 1, manifest), patience=patience)
        events.event("delete.tombstone.created", detail=f"generation {newest.generation + 1}")
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


def _remove_licensed(store: Store, events: Emitter) -> tuple[str, ...]:
    # Readers were told by the tombstone, so there is no grace.
    listing = list_step(store)
    keys = deletable(listing, read_generations(store, listing), now_s=math.inf, grace_s=0)
    store.delete(keys)
    events.event("delete.files.removed", detail=f"{len(keys)} files")
    return keys


def _decode_or_none(record: Record) -> Manifest | None:
    try:
        return record.decode()
    except CheckpointDamaged:
        return None
