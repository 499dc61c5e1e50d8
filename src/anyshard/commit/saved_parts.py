"""Parts of a step as their readers and their publisher see them: which are whole, and which the record of the step names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, final

from anyshard.commit.parts import is_same_part, list_parts, part_prefix, part_store
from anyshard.commit.resolve import find_incomplete, look, read_record
from anyshard.errors import BlobNotFound, CheckpointDamaged, CheckpointNotFound, InvalidOption
from anyshard.records.manifest import Manifest, PartEntry, Resumed, StepState
from anyshard.records.names import SECTION_DIRECTORY, FileKind, manifest_name, parse_name
from anyshard.storage.protocol import Listing, Store
from anyshard.storage.wrappers.forward import Call, Verb, WrapperStore

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The newest record of a step, if it has one, its generation (else 0), and when it was made by the store's clock."""

    manifest: Manifest | None
    generation: int
    modified_s: float

    @property
    def published(self) -> Manifest | None:
        """The record if the step exists, in parts or not."""
        return self.manifest if self.manifest is not None and self.manifest.state is StepState.COMMITTED else None

    @property
    def deleted_s(self) -> float | None:
        """When the step was deleted, if it is; parts from before are about to go."""
        return self.modified_s if self.manifest is not None and self.manifest.state is StepState.DELETED else None

    def find(self, role: str) -> PartEntry | None:
        """The part of a role, if the step is published with it."""
        entries = () if self.published is None else self.published.parts
        return next((entry for entry in entries if entry.name == role), None)


@dataclass(frozen=True, slots=True)
class SavedPart:
    """A part that is committed and complete: its newest record, and when that was made by the store's clock."""

    name: str
    manifest: Manifest
    modified_s: float

    @property
    def entry(self) -> PartEntry:
        """How the record of a step names it."""
        return PartEntry(self.name, self.manifest.generation, self.manifest.data_attempt)


@dataclass(frozen=True, slots=True)
class Incarnation:
    """What a job knows of itself: its run, the step that it resumed from, and when it did by the store's clock; None: not yet.

    `since` is the same moment as records have it, `after` the time of the newest step of the run that it knows; empty: none.
    `pinned` are steps that are not to be replaced.
    """

    run_id: str | None = None
    resumed: int | None = None
    since_s: float | None = None
    since: str = ""
    after: str = ""
    pinned: frozenset[int] = frozenset()

    @property
    def mark(self) -> Resumed | None:
        """What the steps that it saves say of where it has gone on from."""
        return Resumed(self.resumed, self.since) if self.resumed is not None and self.since else None

    def may_replace(self, step: int, record: StepRecord) -> bool:
        """Whether it may put another step in the place of this one: it went back before it, and the step is of an earlier job.

        One of another run stays, and a pinned one.
        """
        if record.published is None:
            return True
        is_after = self.resumed is not None and step > self.resumed and step not in self.pinned
        is_own = self.run_id in (None, record.published.run_id)
        return is_after and is_own and self.since_s is not None and record.modified_s < self.since_s


def check_role(role: str) -> str:
    """The role itself if it can be the name of a directory; else `InvalidOption`."""
    if not isinstance(role, str) or SECTION_DIRECTORY.fullmatch(role) is None:
        raise InvalidOption(
            f"role: expected 1 to 64 of a-z, 0-9, '_', '.' and '-', the first one of a-z, 0-9 and '_', found {role!r}"
        )
    return role


def read_step_record(store: Store) -> StepRecord:
    """The newest record of the step in `store`, whatever it says; damage is `CheckpointDamaged`."""
    listing, newest = look(store)
    if newest is None:
        return StepRecord(None, 0, 0.0)
    entry = listing.manifests.get(newest.generation)
    return StepRecord(newest.decode(), newest.generation, store.now_s() if entry is None else entry.modified_s)


def find_saved(store: Store, role: str) -> SavedPart | str:
    """The part of a role as it is now, or why it does not count. A record that is damaged is `CheckpointDamaged`."""
    own = part_store(store, role)
    listing, newest = look(own)
    if newest is not None and newest.generation not in listing.manifests:  # it came after the listing, its files perhaps too
        listing, newest = look(own)
    if newest is None:
        return "only an unfinished save is there" if listing.files else "nothing is there"
    if newest.is_torn:
        return "it is being committed"
    manifest = newest.decode()
    if manifest.state is StepState.DELETED:
        return f"it was deleted on {manifest.time}"
    if wrong := find_incomplete(manifest, listing):
        return f"{len(wrong)} file(s) are not as its record says: {wrong[0]}"
    entry = listing.manifests.get(manifest.generation)
    return SavedPart(role, manifest, own.now_s() if entry is None else entry.modified_s)


def list_saved(store: Store) -> tuple[SavedPart, ...]:
    """All parts of the step that are committed and complete, published or not, by name."""
    found = (find_saved(store, name) for name in list_parts(store))
    return tuple(part for part in found if isinstance(part, SavedPart))


def find_part(store: Store, role: str, *, published: bool = False) -> Store:
    """The store of the part of a role of the step in `store`: that which the step is published with, else the one that is there.

    With `published` only the former. Raises `CheckpointNotFound` (no such part, or not published) or `CheckpointDamaged` (the
    part that the record of the step names is gone).
    """
    check_role(role)
    step = read_step_record(store)
    named = step.find(role)
    if named is not None:
        return _find_named(store, named)
    if published or (step.published is not None and not step.published.parts):
        raise _absence(store, role, step)
    found = find_saved(store, role)
    if isinstance(found, str):
        raise CheckpointNotFound(f"{store.url}: no part {role!r} can be loaded: {found}. {_tell_others(list_saved(store))}")
    if step.deleted_s is not None and found.modified_s < step.deleted_s:
        raise CheckpointNotFound(f"{store.url}: this checkpoint was deleted, and its part {role!r} with it; load another step")
    return part_store(store, role)


def _find_named(store: Store, named: PartEntry) -> Store:
    own = part_store(store, named.name)
    _, newest = look(own)
    if newest is not None and is_same_part(named, newest.decode()):
        return own
    read_named(store, named)
    return PastStore(own, named.generation)


def read_named(store: Store, named: PartEntry) -> Manifest:
    """The record of a part as the record of the step names it, or `CheckpointDamaged` if that is gone."""
    own = part_store(store, named.name)
    record = read_record(own, named.generation)
    manifest = None if record is None else record.decode()
    if manifest is None or not is_same_part(named, manifest):
        raise CheckpointDamaged(
            f"{store.url}: expected part {named.name!r} as the record of the step names it (generation {named.generation}, "
            f"attempt {named.attempt}), found it replaced or deleted. Load another step, or publish this one again",
            file=part_prefix(named.name) + manifest_name(named.generation),
        )
    return manifest


def _absence(store: Store, role: str, step: StepRecord) -> CheckpointNotFound:
    if step.published is None:
        return CheckpointNotFound(
            f"{store.url}: the step is not published, so part {role!r} can only be loaded by the number of the step and its "
            f"role. {_tell_others(list_saved(store))}"
        )
    if not step.published.parts:
        return CheckpointNotFound(f"{store.url}: expected a step in parts, found a whole checkpoint; load it without a role")
    names = ", ".join(entry.name for entry in step.published.parts)
    return CheckpointNotFound(f"{store.url}: the step is published without a part {role!r}; it has {names}")


def _tell_others(saved: Sequence[SavedPart]) -> str:
    return f"Parts that are there: {', '.join(part.name for part in saved) or 'none'}"


@final
class PastStore(WrapperStore):
    """A part as it was at `generation`: records that came later do not show.

    For readers while a step is saved again: until it is published anew its record names this generation.
    """

    def __init__(self, inner: Store, generation: int) -> None:
        super().__init__(inner)
        self.generation = generation

    def around(self, call: Call, run: Callable[[], T]) -> T:
        """Do the call, unless it reads a later record."""
        if call.verb is Verb.READ and self._is_later(call.key):
            raise BlobNotFound(f"{self.url}: {call.key}: the record of a later generation is not looked at", file=call.key)
        return run()

    def list(self, prefix: str) -> Listing:
        """All entries but later records."""
        found = super().list(prefix)
        return replace(found, entries=tuple(entry for entry in found.entries if not self._is_later(entry.key)))

    def _is_later(self, key: str) -> bool:
        name = parse_name(key)
        return name is not None and name.kind is FileKind.MANIFEST and name.generation > self.generation
