"""The parts of a step: whole checkpoints below `parts/<name>/`, each with records of its own, one record above all of them.

A step in parts exists once the record above names its parts. Parts that no record names are unpublished.
"""

from __future__ import annotations

from dataclasses import dataclass

from anyshard.commit.listing import PARTS_PREFIX, StepListing
from anyshard.commit.resolve import Record, look
from anyshard.errors import CheckpointDamaged
from anyshard.records.manifest import Manifest, PartEntry, StepState
from anyshard.records.names import SECTION_DIRECTORY
from anyshard.storage.protocol import Entry, Store
from anyshard.storage.wrappers.below import StoreBelow


@dataclass(frozen=True, slots=True)
class Part:
    """A part as one look found it: its newest record, if it has any, and when that was made by the store's clock."""

    name: str
    listing: StepListing
    record: Record | None
    modified_s: float

    @property
    def is_living(self) -> bool:
        """Whether there is a record, and it is no tombstone; a damaged one is as good as any."""
        if self.record is None:
            return False
        try:
            return self.record.decode().state is not StepState.DELETED
        except CheckpointDamaged:
            return True

    @property
    def last_written_s(self) -> float:
        """When the last of its files was written."""
        entries = (*self.listing.manifests.values(), *(entry for _, entry in self.listing.entries()))
        return max((entry.modified_s for entry in entries), default=self.modified_s)

    def ending(self) -> tuple[Entry, ...]:
        """What goes with it when it is deleted: all but what an unfinished save has written."""
        newest = 0 if self.record is None else self.record.generation
        files = (entry for owner, entry in self.listing.entries() if owner.generation <= newest)
        return (*files, *(self.listing.manifests[generation] for generation in sorted(self.listing.manifests)))


def part_prefix(name: str) -> str:
    """Where a part is, below its step."""
    return f"{PARTS_PREFIX}{name}/"


def part_store(store: Store, name: str) -> StoreBelow:
    """The store of one part of the step in `store`."""
    return StoreBelow(store, part_prefix(name))


def list_parts(store: Store) -> tuple[str, ...]:
    """Names of all parts of which anything is there, published or not, sorted."""
    found = (prefix.removeprefix(PARTS_PREFIX).removesuffix("/") for prefix in store.list(PARTS_PREFIX).prefixes)
    return tuple(sorted(name for name in found if SECTION_DIRECTORY.fullmatch(name)))


def find_parts(store: Store, listing: StepListing) -> tuple[Part, ...]:
    """A look at every part of the step that `listing` shows."""
    return tuple(_look_at(store, name) for name in (list_parts(store) if listing.has_parts else ()))


def is_same_part(entry: PartEntry, manifest: Manifest) -> bool:
    """Whether the record of a part is of the data that `entry` names: fenced or thinned since, perhaps, but not replaced."""
    is_later = manifest.generation >= entry.generation
    return is_later and manifest.state is not StepState.DELETED and entry.attempt == manifest.data_attempt


def _look_at(store: Store, name: str) -> Part:
    listing, newest = look(part_store(store, name))
    entry = None if newest is None else listing.manifests.get(newest.generation)
    return Part(name, listing, newest, store.now_s() if entry is None else entry.modified_s)
