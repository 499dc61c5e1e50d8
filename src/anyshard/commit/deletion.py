"""The one rule by which files of a step may be deleted, as a pure function, and the removal of superseded files by it.

A file of (generation, attempt) may go only if the manifest of that generation belongs to another attempt or a later generation
exists, if the newest manifest does not name it, and if the grace for readers has passed. Nothing else is ever deleted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter

from anyshard.commit.listing import Owner, StepListing
from anyshard.commit.resolve import look, named_files, read_record, torn
from anyshard.errors import CheckpointDamaged, UnsupportedFormat
from anyshard.monitor.events import SILENT, Emitter
from anyshard.records.manifest import Manifest
from anyshard.storage.protocol import Store


@dataclass(frozen=True, slots=True)
class Generations:
    """The records of a step that are there, by generation; None stands for one whose bytes are damaged.

    `created_s` says when each was made by the store's clock. The highest one counts.
    """

    manifests: Mapping[int, Manifest | None]
    created_s: Mapping[int, float]

    @property
    def newest(self) -> int:
        """The highest generation, 0 if there is none."""
        return max(self.manifests, default=0)

    def last_naming(self) -> dict[str, int]:
        """For each file that a record names, the last generation that names it."""
        return {
            key: generation
            for generation, manifest in sorted(self.manifests.items(), key=itemgetter(0))
            for key in (named_files(manifest) if manifest is not None else ())
        }

    def useless_from(self, owner: Owner) -> int:
        """The first generation whose record would make a file of `owner` useless, if no record names the file.

        A damaged record may name any file that is not younger than itself.
        """
        holders = (
            generation
            for generation, manifest in self.manifests.items()
            if (generation >= owner.generation if manifest is None else owner == (generation, manifest.attempt))
        )
        return max(holders, default=owner.generation - 1) + 1

    def appeared_s(self, first: int) -> float | None:
        """When the earliest record of a generation >= `first` appeared; None if there is none."""
        return min((time_s for generation, time_s in self.created_s.items() if generation >= first), default=None)


def deletable(listing: StepListing, generations: Generations, *, now_s: float, grace_s: float) -> tuple[str, ...]:
    """The keys that may be deleted now, in the order to delete them: files first, then old records, oldest first."""
    last_naming = generations.last_naming()
    useless_from = [
        (entry.key, max(generations.useless_from(owner), last_naming.get(entry.key, 0) + 1)) for owner, entry in listing.entries()
    ]
    useless_from += [(listing.manifests[g].key, g + 1) for g in sorted(listing.manifests)]
    return tuple(
        key
        for key, first in useless_from
        if (since_s := generations.appeared_s(first)) is not None and now_s - since_s >= grace_s
    )


def empty_directories(listing: StepListing, newest: int, *, removed: tuple[str, ...]) -> tuple[str, ...]:
    """Our directories that hold nothing once `removed` is gone, the deepest first, as keys to delete.

    None while files of attempts above generation `newest` are left: their save may be about to write into an empty directory.
    """
    gone = set(removed)
    left = [(owner, entry.key) for owner, entry in listing.entries() if entry.key not in gone]
    if any(owner.generation > newest for owner, _ in left):
        return ()
    keys = (*(key for _, key in left), *listing.foreign)
    used = {key[: end + 1] for key in keys for end, letter in enumerate(key) if letter == "/"}
    return tuple(sorted(set(listing.directories) - used, reverse=True))


def read_generations(store: Store) -> tuple[StepListing, Generations]:
    """List the step and read every record. Raises `CheckpointDamaged` if the newest one is: then nothing may be decided."""
    listing, newest = look(store)
    if newest is None:
        return listing, Generations({}, {})
    if newest.is_torn:
        raise torn(store, listing, newest)
    manifests: dict[int, Manifest | None] = {newest.generation: newest.decode()}
    for generation in sorted(listing.manifests):
        if generation < newest.generation:
            manifests[generation] = _decode_old(store, generation)
    now_s = store.now_s()
    created_s = {g: listing.manifests[g].modified_s if g in listing.manifests else now_s for g in manifests}
    return listing, Generations(manifests, created_s)


def remove_superseded(store: Store, grace_s: float, *, events: Emitter = SILENT) -> tuple[str, ...]:
    """Delete the files of superseded generations and of lost attempts whose grace has passed; return their keys.

    May raise any `AnyshardError`; after a commit that is no failure of the save, for the next save or clean removes the rest.
    """
    listing, generations = read_generations(store)
    keys = deletable(listing, generations, now_s=store.now_s(), grace_s=grace_s)
    if keys:
        store.delete(keys)
        events.event("save.superseded.removed", detail=f"{len(keys)} files")
    return keys


def _is_any(_: Manifest) -> bool:
    return True


def remove_licensed(
    store: Store, *, grace_s: float, event: str, may_go: Callable[[Manifest], bool] = _is_any, events: Emitter = SILENT
) -> tuple[str, ...]:
    """Delete all that the rule lets go after this grace, and directories that are empty then; return the keys of the files.

    Nothing goes if `may_go` says no to the newest record. Without any grace the store's clock does not matter.
    """
    listing, generations = read_generations(store)
    newest = generations.manifests.get(generations.newest)
    if newest is not None and not may_go(newest):
        return ()
    keys = deletable(listing, generations, now_s=store.now_s() if grace_s else math.inf, grace_s=grace_s)
    store.delete(keys)
    store.delete(empty_directories(listing, generations.newest, removed=keys))
    events.event(event, detail=f"{len(keys)} files")
    return keys


def _decode_old(store: Store, generation: int) -> Manifest | None:
    record = read_record(store, generation)
    try:
        return None if record is None else record.decode()
    except (CheckpointDamaged, UnsupportedFormat):
        return None
