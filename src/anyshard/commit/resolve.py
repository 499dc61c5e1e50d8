"""From a place to the one manifest that counts there, or to the error that says why there is none."""

from __future__ import annotations

from dataclasses import dataclass

from anyshard.commit.foreign import advise, show_names
from anyshard.commit.listing import StepListing, list_step
from anyshard.errors import (
    BlobNotFound,
    CheckpointDamaged,
    CheckpointNotFound,
    CheckpointReplaced,
    NotACheckpoint,
)
from anyshard.records.digests import digest_bytes
from anyshard.records.manifest import Manifest, StepState, decode_manifest
from anyshard.records.names import MAX_GENERATION, manifest_name
from anyshard.records.strict_json import MAX_NBYTES
from anyshard.storage.protocol import Store

SHOWN = 5
DIGEST_LINE_NBYTES = 64


@dataclass(frozen=True, slots=True)
class Resolved:
    """The manifest that counts, the digest of its bytes (a load plan is tied to it), and the listing it was found in."""

    manifest: Manifest
    digest: str
    listing: StepListing


@dataclass(frozen=True, slots=True)
class Record:
    """A manifest as it was read: the generation in its name, and its bytes."""

    generation: int
    data: bytes

    def decode(self) -> Manifest:
        """The manifest in the bytes; damage, or the record of another generation, is `CheckpointDamaged`."""
        return decode_manifest(self.data, file=manifest_name(self.generation))


def resolve(store: Store) -> Resolved:
    """The committed manifest of the highest generation; never an older one because the newest is damaged.

    Raises `CheckpointNotFound` (nothing there, deleted, or only an unfinished save), `NotACheckpoint`, `CheckpointDamaged`.
    """
    listing = list_step(store)
    newest = read_newest(store, listing)
    if newest is None:
        raise _absence(store, listing)
    manifest = newest.decode()
    if manifest.state is StepState.DELETED:
        raise CheckpointNotFound(f"{store.url}: this checkpoint was deleted on {manifest.time}; load another step")
    return Resolved(manifest, digest_bytes(newest.data), listing)


def read_newest(store: Store, listing: StepListing) -> Record | None:
    """The record of the highest generation, or None if there is none.

    A listing may lag behind reads, so the generations after the listed ones are asked for by name until one is absent.
    """
    newest, generation = None, listing.newest
    while (later := read_record(store, generation + 1)) is not None:
        newest, generation = later, generation + 1
    if newest is None and generation > 0:
        newest = read_record(store, generation)
        if newest is None:
            raise CheckpointReplaced(f"{store.url}: {manifest_name(generation)} was removed while it was being read; try again")
    return newest


def read_record(store: Store, generation: int) -> Record | None:
    """The record of one generation, or None if it is not there."""
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


def _absence(store: Store, listing: StepListing) -> CheckpointNotFound | NotACheckpoint:
    if listing.is_foreign:
        return NotACheckpoint(
            f"{store.url}: expected an anyshard checkpoint, found {show_names(listing.foreign)}; {advise(listing.foreign)}"
        )
    if not listing.files:
        return CheckpointNotFound(f"{store.url}: no checkpoint is there, nor anything else; check the path")
    owner, entries = max(listing.files.items(), key=lambda item: max(entry.modified_s for entry in item[1]))
    age_s = store.now_s() - max(entry.modified_s for entry in entries)
    return CheckpointNotFound(
        f"{store.url}: no checkpoint is there, only an unfinished save (attempt {owner.attempt}, last written {age_s:.0f} s "
        "ago). Wait for it if it is still running, or load another step; anyshard.ops.clean removes it later"
    )
