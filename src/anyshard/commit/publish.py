"""Publishing: create-if-absent of one generation's record, and finding out what became of it when the answer was lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from anyshard.commit.listing import StepListing, list_step
from anyshard.commit.resolve import Record, find_incomplete, read_record
from anyshard.errors import (
    BlobNotFound,
    CheckpointDamaged,
    CommitConflict,
    CommitOutcomeUnknown,
    LimitExceeded,
    StorageError,
    UnsupportedFormat,
)
from anyshard.monitor.events import SILENT, Emitter
from anyshard.records.manifest import Manifest, encode_manifest
from anyshard.records.names import manifest_name
from anyshard.storage.protocol import Store


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to ask for the record after an error of publishing, before its outcome is called unknown."""

    timeout_s: float = 60.0
    poll_s: float = 1.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


PATIENT = Patience()


def _decided() -> None:
    pass


def publish(
    store: Store,
    manifest: Manifest,
    *,
    decide: Callable[[], None] = _decided,
    patience: Patience = PATIENT,
    events: Emitter = SILENT,
) -> None:
    """Make the checkpoint of `manifest` exist; return only if it does and is the newest.

    `decide` is called once everything that can be checked is in order, right before the record is created; what it raises ends
    this with nothing published.

    Raises `BlobNotFound` (a file of it is not as it was written; nothing was published), `CommitConflict` (another writer took
    the generation), `CommitOutcomeUnknown` (may exist: delete nothing), or the store's error (does not exist).
    """
    listing = list_step(store)
    _check_first(store, manifest, listing)
    _check_durable(store, manifest, listing)
    decide()
    events.event("save.publish.begin", file=manifest_name(manifest.generation))
    create_record(store, manifest, patience=patience)
    _check_last(store, manifest)
    events.event("save.published", file=manifest_name(manifest.generation))


def create_record(store: Store, manifest: Manifest, *, patience: Patience = PATIENT) -> None:
    """Create the record of `manifest` if its generation is free, and be sure of the outcome whatever the store answers.

    After any error, "exists" included, the record is read back: ours is success (the answer was lost), another's is
    `CommitConflict`, none is the store's error, and one that stays unreadable is `CommitOutcomeUnknown`.
    """
    data = encode_manifest(manifest)
    try:
        store.create(manifest_name(manifest.generation), data, token=manifest.attempt)
    except StorageError:
        if not _is_there(store, manifest.generation, data, patience):
            raise
        _make_durable(store, manifest.generation)


def superseded(store: Store, generation: int, newest: int) -> CommitConflict:
    """The error of a save that aimed at `generation` while others came as far as `newest`."""
    return CommitConflict(
        f"{store.url}: expected to commit generation {generation}, found generation {newest} there already: another save, a "
        "delete or a clean came first while this one was writing. Its result stands; save again with overwrite=True"
    )


def _is_there(store: Store, generation: int, data: bytes, patience: Patience) -> bool:
    """Whether the record of `generation` is there and is `data`; another one is a `CommitConflict`."""
    deadline = patience.clock() + patience.timeout_s
    while True:
        try:
            found = read_record(store, generation)
            if found is not None and found.data != data:
                raise _conflict(store, found)
        # A record that cannot be decoded may still be on its way (a store without atomic rename): it is no answer yet.
        except (StorageError, CheckpointDamaged, LimitExceeded) as unreadable:
            if patience.clock() >= deadline:
                raise _unknown(store, generation, unreadable) from unreadable
        else:
            return found is not None
        patience.sleep(patience.poll_s)


def _make_durable(store: Store, generation: int) -> None:
    # The error may have been one of syncing the directory: then a record that can be read need not outlive a power loss.
    try:
        store.prepare([])
    except StorageError as error:
        raise _unknown(store, generation, error) from error


def _check_first(store: Store, manifest: Manifest, listing: StepListing) -> None:
    # Before its files are missed: the winner's cleaning may have removed them. And a writer that slept through whole generations
    # would else take one whose record was removed meanwhile.
    if listing.newest >= manifest.generation:
        raise superseded(store, manifest.generation, listing.newest)


def _check_last(store: Store, manifest: Manifest) -> None:
    # As above, for a writer that slept between the listing and the creation. No answer changes nothing: the record is there.
    with suppress(StorageError):
        if read_record(store, manifest.generation + 1) is not None:
            raise superseded(store, manifest.generation, manifest.generation + 1)


def _check_durable(store: Store, manifest: Manifest, listing: StepListing) -> None:
    wrong = find_incomplete(manifest, listing)
    if wrong:
        raise BlobNotFound(
            f"{store.url}: nothing was committed, for {len(wrong)} file(s) just written are not there as written: {wrong[0]}. "
            "Another program removed them, or the directory is not the same on all hosts; save again",
            file=wrong[0].split(":", 1)[0],
        )


def _conflict(store: Store, found: Record) -> CommitConflict:
    try:
        other = found.decode()
        winner = f"attempt {other.attempt} ({other.state}, written by {other.writer} on {other.time})"
    except UnsupportedFormat as newer:
        winner = f"a later release ({newer})"
    return CommitConflict(
        f"{store.url}: expected {manifest_name(found.generation)} to be free, found it taken by {winner}. That one stands and "
        "this save does not exist; save again with overwrite=True to replace it"
    )


def _unknown(store: Store, generation: int, error: Exception) -> CommitOutcomeUnknown:
    return CommitOutcomeUnknown(
        f"{store.url}: {manifest_name(generation)} could not be read back after an error of writing it, so the save may or may "
        f"not exist; nothing was deleted. Look again once the storage answers. Last error: {error}"
    )
