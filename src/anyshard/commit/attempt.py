"""An attempt: one try at the next generation of a step, from the right to write there to giving up."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from anyshard.commit.deletion import empty_directories
from anyshard.commit.listing import DATA_PREFIX, Owner, list_step
from anyshard.commit.probe import is_probe_id
from anyshard.commit.publish import refuse_rivals, superseded
from anyshard.commit.resolve import LOOKS, Record, look, not_ours, read_record
from anyshard.errors import (
    AnyshardError,
    BlobNotFound,
    CheckpointDamaged,
    CheckpointExists,
    CommitConflict,
    CommitOutcomeUnknown,
    LimitExceeded,
    OperationFailed,
    StorageError,
    StorageStuck,
    StorageUnguarded,
)
from anyshard.monitor.events import SILENT, Emitter
from anyshard.records.addresses import section_directory
from anyshard.records.manifest import Manifest, StepState
from anyshard.records.names import MAX_GENERATION, make_attempt
from anyshard.storage.protocol import Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Attempt:
    """The right to try: aim at `generation` with files that carry `id`.

    `previous` is the checkpoint to be replaced, if any. `directories` are those that were made for this attempt.
    """

    generation: int
    id: str
    previous: Manifest | None
    directories: tuple[str, ...] = ()


def begin(store: Store, *, sections: Sequence[str], overwrite: bool, events: Emitter = SILENT) -> Attempt:
    """Take the next generation of the step as the aim of a new attempt and make its directories, durably.

    Raises `NotACheckpoint` (the directory is somebody else's) or `CheckpointExists`; then nothing was changed. So too on a store
    that is not `guarded`: `StorageUnguarded` rather than replace a checkpoint, `CommitConflict` beside another save that is all
    but published.
    """
    listing, newest = look(store)
    if newest is None and listing.is_foreign:
        raise not_ours(store, listing)
    directories = (DATA_PREFIX, *(f"{DATA_PREFIX}{section_directory(section)}/" for section in sections))
    aim = _aim(store, newest, overwrite=overwrite)
    refuse_rivals(store, listing, aim.id, newest=aim.generation - 1)
    made = tuple(directory for directory in directories if directory not in listing.directories)
    attempt = replace(aim, directories=made)
    with abandoning(store, attempt, events=events):
        _prepare(store, directories)
    events.event("save.attempt.begun", detail=f"generation {attempt.generation}, attempt {attempt.id}")
    return attempt


@contextmanager
def abandoning(store: Store, attempt: Attempt, *, events: Emitter = SILENT) -> Iterator[None]:
    """Give the attempt up if the body fails: its files go, unless the save may exist, or the storage hangs here.

    The body's error is the one raised; only where storage failed because somebody took the generation and cleaned, that is said.
    """
    try:
        yield
    except BaseException as error:
        own = own_error(error)
        if isinstance(own, CommitOutcomeUnknown):
            raise
        if isinstance(own, StorageStuck):  # nothing more is asked of it, and what is still out may yet write there
            error.add_note(f"files of attempt {attempt.id} may be left at {store.url}: a later clean removes them")
            raise
        conflict = None
        try:
            abandon(store, attempt, events=events)
            conflict = _find_conflict(store, attempt) if isinstance(error, StorageError) else None
        except AnyshardError:
            logger.warning("%s: the files of attempt %s could not be removed", store.url, attempt.id, exc_info=True)
        if conflict is not None and isinstance(error, OperationFailed):  # which all ranks raise, so it stays what it is
            error.add_note(f"Probably the reason: {conflict}")
        elif conflict is not None:
            raise conflict from error
        raise


def own_error(error: BaseException) -> BaseException | None:
    """What went wrong in this process: of a failure that all ranks of a group raise its cause here, which is None elsewhere."""
    return error.__cause__ if isinstance(error, OperationFailed) else error


def abandon(store: Store, attempt: Attempt, *, events: Emitter = SILENT) -> tuple[str, ...]:
    """Delete the files of exactly this attempt if it is certain that it was not published; return their keys.

    The directories that were made for it go too, as far as they are empty and no other attempt is about to write there.
    Only for the process that began it and would publish it, when that will not happen any more; so never after
    `CommitOutcomeUnknown`. Other ranks may still be writing blobs of it: these belong to no checkpoint, each rank deletes its own
    when it hears of the end, and a clean what is left by one that cannot.
    """
    owner = Owner(attempt.generation, attempt.id)
    if _may_be_ours(store, owner):
        return ()
    listing = list_step(store)
    keys = tuple(entry.key for entry in listing.files.get(owner, ()))
    store.delete(keys)
    empty = empty_directories(listing, attempt.generation - 1, removed=keys)
    store.delete([directory for directory in empty if directory in attempt.directories])
    events.event("save.abandoned", detail=f"{len(keys)} files of attempt {attempt.id}")
    return keys


def _prepare(store: Store, directories: Sequence[str]) -> None:
    for _ in range(LOOKS - 1):
        with suppress(BlobNotFound):  # a delete or a clean removed a directory while it was empty
            return store.prepare(directories)
    return store.prepare(directories)


def _aim(store: Store, newest: Record | None, *, overwrite: bool) -> Attempt:
    if newest is None:
        return Attempt(1, make_attempt_id(), None)
    if newest.generation >= MAX_GENERATION:
        raise LimitExceeded(f"{store.url}: generation {newest.generation} is the last one; save to another directory")
    return Attempt(newest.generation + 1, make_attempt_id(), _replaceable(store, newest, overwrite=overwrite))


def make_attempt_id() -> str:
    """A new id that nobody can take for that of a probe."""
    while is_probe_id(attempt := make_attempt()):
        pass
    return attempt


def _replaceable(store: Store, newest: Record, *, overwrite: bool) -> Manifest | None:
    try:
        manifest = newest.decode()
    except CheckpointDamaged as damage:
        if overwrite:
            _refuse_unguarded(store)
            return None
        raise CheckpointExists(
            f"{store.url}: a damaged checkpoint is there ({damage}); pass overwrite=True to replace it, or another path"
        ) from damage
    if manifest.state is StepState.DELETED:
        return None
    if not overwrite:
        raise CheckpointExists(
            f"{store.url}: a checkpoint (step {manifest.step}, saved on {manifest.time}) is there; "
            "pass overwrite=True to replace it, or another path"
        )
    _refuse_unguarded(store)
    return manifest


def _refuse_unguarded(store: Store) -> None:
    # Deletion relies on it that nothing but tombstones follows a committed record there (see commit/tombstone.py).
    if not store.capabilities.guarded:
        raise StorageUnguarded(
            f"{store.url}: a checkpoint is there, and this store has no create-if-absent that can be relied upon, so to replace "
            "it is not safe: another save at the same time could be lost without a word. Save to another path, or delete it "
            "first (anyshard.ops.delete). Nothing was written",
            file=store.url,
        )


def _find_conflict(store: Store, attempt: Attempt) -> CommitConflict | None:
    newest = list_step(store).newest
    is_lost = newest >= attempt.generation and not _may_be_ours(store, Owner(attempt.generation, attempt.id))
    return superseded(store, attempt.generation, newest) if is_lost else None


def _may_be_ours(store: Store, owner: Owner) -> bool:
    try:
        record = read_record(store, owner.generation)
        return record is not None and record.decode().attempt == owner.attempt
    except (StorageError, CheckpointDamaged):
        return True
