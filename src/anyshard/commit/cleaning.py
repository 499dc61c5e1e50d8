"""Cleaning of one step: what no reader needs goes, and saves that died lose the right to publish before their files go."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from anyshard.commit.deletion import Generations, deletable, empty_directories, read_generations
from anyshard.commit.guard import UNGUARDED, as_it_is
from anyshard.commit.listing import PARTS_PREFIX, Owner, StepListing
from anyshard.commit.parts import Part, find_parts, is_same_part, part_prefix, part_store
from anyshard.commit.publish import create_record
from anyshard.commit.resolve import Record, look
from anyshard.commit.tombstone import end_parts, find_outdated, make_fence
from anyshard.errors import CommitConflict
from anyshard.monitor.events import SILENT, Emitter
from anyshard.records.manifest import Manifest, PartEntry, StepState
from anyshard.storage.protocol import Entry, Store

DAY_S = 86_400.0
TOMBSTONE_S = 7 * DAY_S


def _is_unknown(_: Owner) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class CleanRules:
    """What counts as left behind. A save is dead if `is_dead` knows it, or nothing of it was written for `older_than_s`.

    Superseded files stay `grace_s` for their readers. `unpublished`: parts that no record of their step names go too, once
    nothing was written to any of them for `older_than_s`.
    """

    older_than_s: float = DAY_S
    grace_s: float = 3600.0
    is_dead: Callable[[Owner], bool] = _is_unknown
    unpublished: bool = False
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class Cleaned:
    """What is gone from a step (in a dry run: would be), and what was left and why; keys in parts begin with `parts/`.

    `fenced` is the generation taken from unfinished saves, if any. `in_progress` are attempts that may still be running (or aim
    beyond the next generation). `unpublished` are parts that no record names and that were left. `foreign` are names that
    anyshard never makes.
    """

    removed: tuple[str, ...] = ()
    nbytes: int = 0
    fenced: int | None = None
    in_progress: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    unpublished: tuple[str, ...] = ()

    def __add__(self, other: Cleaned) -> Cleaned:
        """Both together."""
        return Cleaned(
            self.removed + other.removed,
            self.nbytes + other.nbytes,
            self.fenced or other.fenced,
            self.in_progress + other.in_progress,
            self.foreign + other.foreign,
            tuple(dict.fromkeys(self.warnings + other.warnings)),
            self.unpublished + other.unpublished,
        )


def clean_step(
    store: Store,
    rules: CleanRules,
    *,
    settle: Callable[[Store], Store] = as_it_is,
    events: Emitter = SILENT,
) -> Cleaned:
    """Remove what the rules let go from a step and its parts; what a checkpoint or a running save needs is never removed.

    Directories of sections that are empty then go too. `settle` finds out whether the store is `guarded`, once that matters: if
    it is not, nobody can take the right to publish from a save, and the files of dead ones stay. Raises `CheckpointDamaged`,
    having changed nothing there, if the newest record of the step or of a part is damaged.
    """
    listing, newest = look(store)
    parts = _clean_parts(store, listing, newest, _Means(rules, settle, events)) if listing.has_parts else Cleaned()
    return _clean_own(store, _Means(rules, settle, events)) + parts


@dataclass(frozen=True, slots=True)
class _Means:
    rules: CleanRules
    settle: Callable[[Store], Store]
    events: Emitter


# The parts -----------------------------------------------------------------------------------------------------------------


def _clean_parts(store: Store, listing: StepListing, newest: Record | None, means: _Means) -> Cleaned:
    """Finish what a delete has left, end what was never published if the rules let it, and clean every part that stays."""
    record = None if newest is None else newest.decode()
    parts = find_parts(store, listing)
    is_deleted = record is not None and record.state is StepState.DELETED
    outdated = [part for part in (find_outdated(parts, listing, newest) if is_deleted else ()) if part.is_living]
    named = {} if record is None else {entry.name: entry for entry in record.parts}
    known = {*named, *(part.name for part in outdated)}
    loose = [part for part in parts if part.is_living and part.name not in known]
    cleaned = _end(store, outdated, means) + _end_loose(store, record, loose, _last_written_in(parts), means)
    going = {*(part.name for part in (*outdated, *loose))} - set(cleaned.unpublished)
    for part in parts:
        is_as_named = part.name not in named or _is_as_named(part, named[part.name])
        if part.name not in going and is_as_named:  # one that is saved anew keeps what is named until the step is published anew
            cleaned += _below(part_prefix(part.name), _clean_own(part_store(store, part.name), means))
    if not means.rules.dry_run:
        _remove_empty(store, parts)
    return cleaned


def _end_loose(store: Store, record: Manifest | None, loose: Sequence[Part], written_s: float, means: _Means) -> Cleaned:
    """Delete parts that were never published, once nobody can publish them any more."""
    left = Cleaned(unpublished=tuple(part.name for part in loose))
    rules = means.rules
    if not loose or not rules.unpublished or store.now_s() - written_s < rules.older_than_s:
        return left
    if not rules.dry_run:
        store = means.settle(store)
        if not store.capabilities.guarded:
            return replace(left, warnings=(f"unpublished parts are left, for they may still be published: {UNGUARDED}",))
    fence = make_fence(1 if record is None else record.generation + 1, record)
    if not rules.dry_run and not _is_created(store, fence, means.events):
        return left
    return replace(_end(store, loose, means), fenced=fence.generation)


def _end(store: Store, parts: Sequence[Part], means: _Means) -> Cleaned:
    going = {part_prefix(part.name) + entry.key: entry.nbytes for part in parts for entry in part.ending()}
    removed = tuple(going) if means.rules.dry_run else end_parts(store, parts, events=means.events)
    return Cleaned(removed, sum(going.get(key, 0) for key in removed))


def _below(prefix: str, cleaned: Cleaned) -> Cleaned:
    """What was done in a part, as the step has it."""
    removed, foreign = (tuple(prefix + key for key in keys) for keys in (cleaned.removed, cleaned.foreign))
    return replace(cleaned, removed=removed, foreign=foreign, fenced=None)


def _is_as_named(part: Part, entry: PartEntry) -> bool:
    return part.record is not None and is_same_part(entry, part.record.decode())


def _last_written_in(parts: Sequence[Part]) -> float:
    return max((part.last_written_s for part in parts), default=0.0)


def _remove_empty(store: Store, parts: Sequence[Part]) -> None:
    """Remove the directories of parts of which nothing is left."""
    empty = [part_prefix(part.name) for part in parts if _is_empty(part_store(store, part.name))]
    if empty:
        store.delete([*empty, *([PARTS_PREFIX] if len(empty) == len(parts) else [])])


def _is_empty(store: Store) -> bool:
    found = store.list("")
    return not found.entries and not found.prefixes


# A step, or a part, without what lies below it -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Plan:
    """What to remove: `dead` only once `fence` is there. `unfinished` are all unfinished attempts, those dead ones too."""

    superseded: tuple[str, ...]
    unfinished: tuple[str, ...]
    in_progress: tuple[str, ...]
    fence: Manifest | None = None
    dead: tuple[str, ...] = ()

    @property
    def removed(self) -> tuple[str, ...]:
        return self.dead + self.superseded

    def without_fence(self) -> _Plan:
        return _Plan(self.superseded, self.unfinished, self.unfinished)


def _clean_own(store: Store, means: _Means) -> Cleaned:
    listing, generations = read_generations(store)
    rules, events = means.rules, means.events
    plan = _plan(listing, generations, rules, now_s=store.now_s())
    if plan.fence is not None and not rules.dry_run:  # the probe writes, so only where there is something to gain
        store = means.settle(store)
    plan, warnings = _without_rights(store, plan)
    if not rules.dry_run:
        if plan.fence is not None and not _is_created(store, plan.fence, events):
            plan = plan.without_fence()
        _remove(store, listing, plan, events)
    nbytes = sum(entry.nbytes for _, entry in listing.entries() if entry.key in set(plan.removed))
    fenced = None if plan.fence is None else plan.fence.generation
    return Cleaned(plan.removed, nbytes, fenced, plan.in_progress, listing.foreign, warnings)


def _without_rights(store: Store, plan: _Plan) -> tuple[_Plan, tuple[str, ...]]:
    """What can be done of a plan on this store, and why not all."""
    guarded = store.capabilities.guarded
    if plan.fence is None or guarded:
        return plan, ()
    if guarded is None:
        return plan, (
            f"{store.url}: whether the store is guarded is not tried in a dry run; if it is not, unfinished saves stay",
        )
    return plan.without_fence(), (f"unfinished saves are left, for one may still be running: {UNGUARDED}",)


def _is_created(store: Store, fence: Manifest, events: Emitter) -> bool:
    """Create the fence; whether it is there: another writer may take the generation, whose files are not dead then."""
    try:
        create_record(store, fence)
    except CommitConflict:
        return False
    events.event("clean.fence.created", detail=f"generation {fence.generation}")
    return True


def _remove(store: Store, listing: StepListing, plan: _Plan, events: Emitter) -> None:
    store.delete(plan.removed)
    events.event("clean.files.removed", detail=f"{len(plan.removed)} files")
    if (listing.manifests or listing.files) and not plan.in_progress:  # else a directory of this name may be somebody else's
        newest = max(listing.newest, 0 if plan.fence is None else plan.fence.generation)
        store.delete(empty_directories(listing, newest, removed=plan.removed))


def _plan(listing: StepListing, generations: Generations, rules: CleanRules, *, now_s: float) -> _Plan:
    superseded = deletable(listing, generations, now_s=now_s, grace_s=rules.grace_s)
    unfinished = listing.unfinished(generations.newest)
    attempts = tuple(owner.attempt for owner in unfinished)
    if not unfinished:
        return _Plan(superseded + _expired_tombstone(listing, generations, now_s), (), ())
    # The fence has to be the very next generation: then it cannot pass over a save that is published meanwhile.
    dead = {owner: entries for owner, entries in unfinished.items() if owner.generation == generations.newest + 1}
    unknown = {owner: entries for owner, entries in dead.items() if not rules.is_dead(owner)}
    if not dead or (unknown and now_s - _last_written_s(unknown) < rules.older_than_s):
        return _Plan(superseded, attempts, attempts)
    fence = make_fence(generations.newest + 1, generations.manifests.get(generations.newest))
    licensed = deletable(listing, _with(generations, fence), now_s=math.inf, grace_s=0)
    keys = {entry.key for entries in dead.values() for entry in entries}
    kept = tuple(owner.attempt for owner in unfinished if owner not in dead)
    return _Plan(superseded, attempts, kept, fence, tuple(key for key in licensed if key in keys))


def _with(generations: Generations, fence: Manifest) -> Generations:
    manifests = {**generations.manifests, fence.generation: fence}
    return replace(generations, manifests=manifests, created_s={**generations.created_s, fence.generation: 0.0})


def _last_written_s(unfinished: Mapping[Owner, tuple[Entry, ...]]) -> float:
    return max(entry.modified_s for entries in unfinished.values() for entry in entries)


def _expired_tombstone(listing: StepListing, generations: Generations, now_s: float) -> tuple[str, ...]:
    newest = generations.manifests.get(generations.newest)
    is_alone = not listing.files and not listing.has_parts and len(listing.manifests) == 1
    if newest is None or newest.state is not StepState.DELETED or not is_alone:
        return ()
    expired = now_s - generations.created_s[generations.newest] >= TOMBSTONE_S
    return (listing.manifests[generations.newest].key,) if expired else ()
