"""From a place to the one manifest that counts there, or to the error that says why there is none."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from anyshard.commit.foreign import advise, show_names
from anyshard.commit.listing import StepListing, list_step
from anyshard.errors import (
    BlobNotFound,
    CheckpointDamaged,
    CheckpointNotFound,
    CheckpointReplaced,
    NotACheckpoint,
    StorageError,
)
from anyshard.records.digests import digest_bytes, is_digest
from anyshard.records.manifest import Manifest, StepState, decode_manifest
from anyshard.records.names import MAX_GENERATION, manifest_name
from anyshard.records.strict_json import MAX_NBYTES
from anyshard.storage.protocol import Store

SHOWN = 5
DIGEST_LINE_NBYTES = 64
# How long a record may take to be written where a store shows it before it is whole.
PENDING_S = 600.0
# How often a step is looked at anew while others replace its records.
LOOKS = 5
# How many generations a listing may lag behind.
MAX_UNLISTED = 64

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Resolved:
    """The manifest that counts, its bytes and their digest (a load plan is tied to it), and the listing it was found in."""

    manifest: Manifest
    data: bytes
    digest: str
    listing: StepListing


@dataclass(frozen=True, slots=True)
class Record:
    """A manifest as it was read: the generation in its name, and its bytes."""

    generation: int
    data: bytes

    @property
    def is_torn(self) -> bool:
        """Whether there is no digest line at its end: a store without atomic creation shows a record so while it is written.

        A record with a digest line that other bytes have is not torn but damaged.
        """
        *_, last, behind = (b"", b"", *self.data.rsplit(b"\n", 2))
        return behind != b"" or not is_digest(last.decode("ascii", "replace"))

    def decode(self) -> Manifest:
        """The manifest in the bytes; damage, or the record of another generation, is `CheckpointDamaged`."""
        return decode_manifest(self.data, file=manifest_name(self.generation))


def resolve(store: Store, *, pending_s: float = PENDING_S) -> Resolved:
    """The committed manifest of the highest generation; never an older one because the newest is damaged.

    A newest record that is torn and younger than `pending_s` is still being written: the one before it counts until it is whole.
    Raises `CheckpointNotFound` (nothing there, deleted, or only an unfinished save), `NotACheckpoint`, `CheckpointDamaged`,
    `CheckpointReplaced` (records went faster than they could be read).
    """
    listing, newest = look(store)
    if newest is None:
        raise _absence(store, listing)
    record = _find_whole(store, listing, newest, pending_s)
    manifest = record.decode()
    if manifest.state is StepState.DELETED:
        raise CheckpointNotFound(f"{store.url}: this checkpoint was deleted on {manifest.time}; load another step")
    return Resolved(manifest, record.data, digest_bytes(record.data), listing)


def look(store: Store) -> tuple[StepListing, Record | None]:
    """A listing of the step and the record of the highest generation, None if there is none.

    Where that record goes away between the two, it looks again, a few times. Raises `CheckpointReplaced`.
    """
    for _ in range(LOOKS):
        listing = list_step(store)
        newest = _read_newest(store, listing)
        if newest is not None or not listing.manifests:
            return listing, newest
    raise CheckpointReplaced(f"{store.url}: {manifest_name(listing.newest)} was removed while it was being read; try again")


def _read_newest(store: Store, listing: StepListing) -> Record | None:
    # A listing may lag behind reads, so the generations after the listed ones are asked for by name until one is absent.
    newest = None
    for generation in range(listing.newest + 1, listing.newest + 1 + MAX_UNLISTED):
        later = read_record(store, generation)
        if later is None:
            return newest if newest is not None or not listing.newest else read_record(store, listing.newest)
        newest = later
    raise StorageError(
        f"{store.url}: expected a store, found something that gives content for {MAX_UNLISTED} names that its listing does not "
        "have. Check the endpoint: a web server or a proxy that answers every request is none",
        file=manifest_name(listing.newest + 1),
    )


def _find_whole(store: Store, listing: StepListing, newest: Record, pending_s: float) -> Record:
    record = newest
    while record.is_torn:
        before = _read_before(store, listing, record.generation)
        if before is None or age_s(store, listing, record) >= pending_s:
            raise torn(store, listing, record)
        logger.warning("%s: generation %d is being committed; %d counts", store.url, record.generation, before.generation)
        record = before
    return record


def _read_before(store: Store, listing: StepListing, generation: int) -> Record | None:
    """The record of the highest generation below one; the listing may lag for that one too."""
    listed = max((g for g in listing.manifests if g < generation), default=0)
    records = (read_record(store, g) for g in (generation - 1, listed) if g > 0)
    return next((record for record in records if record is not None), None)


def age_s(store: Store, listing: StepListing, record: Record) -> float:
    """How long ago a record was written, by the store's clock; one that is not listed yet is new."""
    entry = listing.manifests.get(record.generation)
    return 0.0 if entry is None else store.now_s() - entry.modified_s


def torn(store: Store, listing: StepListing, record: Record) -> CheckpointDamaged:
    """The error for a torn record that nothing can stand in for."""
    name = manifest_name(record.generation)
    return CheckpointDamaged(
        f"{store.url}: {name}: expected a digest line at its end, found none: it was cut, or its writer died "
        f"{age_s(store, listing, record):.0f} s ago. If a save is running there, wait for it; else save again with "
        "overwrite=True to replace it, or load another step",
        file=name,
    )


def read_record(store: Store, generation: int) -> Record | None:
    """The record of one generation, or None if it is not there.

    Something else than a file under that name is the store's error, never "not there": it may be what a bad copy made of the
    newest record, and nobody can commit that generation or a later one until it is moved away.
    """
    if generation > MAX_GENERATION:
        return None
    try:
        return Record(generation, store.read(manifest_name(generation), max_nbytes=MAX_NBYTES + DIGEST_LINE_NBYTES))
    except BlobNotFound:
        return None


def check_complete(store: Store, manifest: Manifest, listing: StepListing) -> None:
    """Every file that `manifest` names is listed with its length; else `CheckpointDamaged` says what is missing."""
    wrong = find_incomplete(manifest, listing)
    if wrong:
        shown = "; ".join(wrong[:SHOWN]) + (f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else "")
        raise CheckpointDamaged(
            f"{store.url}: incomplete copy of a checkpoint, {len(wrong)} file(s) are not as its manifest says: {shown}. "
            "Copy it again from where it was whole",
            file=wrong[0].split(":", 1)[0],
        )


def find_incomplete(manifest: Manifest, listing: StepListing) -> list[str]:
    """One line (`name: expected, found`) for each named file that `listing` lacks or shows with another length."""
    found = {entry.key: entry.nbytes for _, entry in listing.entries()}
    return [
        f"{name}: expected {nbytes} bytes, found {found.get(name, 'nothing')}"
        for name, nbytes in named_files(manifest).items()
        if found.get(name) != nbytes
    ]


def named_files(manifest: Manifest) -> dict[str, int]:
    """Names and lengths of the files that a manifest names, the index first."""
    index = () if manifest.index is None else (manifest.index,)
    return {entry.name: entry.nbytes for entry in (*index, *manifest.blobs)}


def not_ours(store: Store, listing: StepListing) -> NotACheckpoint:
    """The error of a save to a directory that is somebody else's."""
    return NotACheckpoint(
        f"{store.url}: expected a new or empty directory or a checkpoint, found {show_names(listing.foreign)}; "
        f"{advise(listing.foreign)}. Nothing was written"
    )


def _absence(store: Store, listing: StepListing) -> CheckpointNotFound | NotACheckpoint:
    if listing.is_foreign:
        return NotACheckpoint(
            f"{store.url}: expected an anyshard checkpoint, found {show_names(listing.foreign)}; {advise(listing.foreign)}"
        )
    if listing.has_parts:
        return CheckpointNotFound(
            f"{store.url}: no checkpoint is there, only parts of a step that was never published, as not all of them came. Load "
            "one of them by its path, or another step"
        )
    if not listing.files:
        return CheckpointNotFound(f"{store.url}: no checkpoint is there, nor anything else; check the path")
    owner, entries = max(listing.files.items(), key=lambda item: max(entry.modified_s for entry in item[1]))
    age_s = store.now_s() - max(entry.modified_s for entry in entries)
    return CheckpointNotFound(
        f"{store.url}: no checkpoint is there, only an unfinished save (attempt {owner.attempt}, last written {age_s:.0f} s "
        "ago). Wait for it if it is still running, or load another step; anyshard.ops.clean removes it later"
    )
