"""`clean`: removes what no reader needs any more, and takes the right to publish from saves that died before it does."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from anyshard.commit.deletion import Generations, deletable, empty_directories, read_generations
from anyshard.commit.guard import UNGUARDED, Guards
from anyshard.commit.listing import Owner, StepListing
from anyshard.commit.publish import create_record
from anyshard.commit.tombstone import make_fence
from anyshard.errors import CommitConflict
from anyshard.monitor.events import Emitter, Sink
from anyshard.ops.opening import operating
from anyshard.records.manifest import Manifest, StepState
from anyshard.storage.protocol import Entry, Store

DAY_S = 86_400.0
TOMBSTONE_S = 7 * DAY_S


@dataclass(frozen=True, slots=True)
class CleanReport:
    """What `clean` removed (with `dry_run`: would remove), and what it left and why.

    `fenced` is the generation taken from unfinished saves, if any. `in_progress` are attempts that may still be running (or aim
    beyond the next generation). `warnings` say why others could not be ended.
    `foreign` are names that anyshard never makes; they are never touched.
    """

    url: str
    removed: tuple[str, ...]
    nbytes: int
    fenced: int | None
    in_progress: tuple[str, ...]
    foreign: tuple[str, ...]
    dry_run: bool
    warnings: tuple[str, ...] = ()


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


def clean(  # noqa: PLR0913 - what the user may choose
    target: str | os.PathLike[str] | Store,
    *,
    older_than_s: float = DAY_S,
    grace_s: float = 3600.0,
    dry_run: bool = False,
    storage_options: Mapping[str, Any] = MappingProxyType({}),
    sinks: Sequence[Sink] = (),
) -> CleanReport:
    """Remove leftovers of saves that died and superseded files; what a checkpoint or a running save needs is never removed.

    A save counts as dead if nothing of it was written for `older_than_s`. Superseded files stay `grace_s` for their readers.
    Directories of sections that are empty then go too. On a store without create-if-absent nobody can take the right to publish
    from a save: then the files of dead ones stay. `storage_options` are those of `SaveOptions`. Raises `CheckpointDamaged`,
    having changed nothing, if the newest manifest is damaged.
    """
    with operating(target, sinks, storage_options) as operation:
        store, events = operation.store, operation.events
        listing, generations = read_generations(store)
        plan = _plan(listing, generations, now_s=store.now_s(), older_than_s=older_than_s, grace_s=grace_s)
        if plan.fence is not None and not dry_run:  # the probe writes, so only where there is something to gain
            store = Guards().settle(store, required=False, events=events)
        plan, warnings = _without_rights(store, plan)
        if not dry_run:
            plan = _fence(store, plan, events)
            _remove(store, listing, plan, events)
    nbytes = sum(entry.nbytes for _, entry in listing.entries() if entry.key in set(plan.removed))
    fenced = None if plan.fence is None else plan.fence.generation
    return CleanReport(store.url, plan.removed, nbytes, fenced, plan.in_progress, listing.foreign, dry_run, warnings)


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


def _fence(store: Store, plan: _Plan, events: Emitter) -> _Plan:
    """Create the fence; the plan without it if another writer took the generation, whose files are not dead then."""
    if plan.fence is None:
        return plan
    try:
        create_record(store, plan.fence)
    except CommitConflict:
        return plan.without_fence()
    events.event("clean.fence.created", detail=f"generation {plan.fence.generation}")
    return plan


def _remove(store: Store, listing: StepListing, plan: _Plan, events: Emitter) -> None:
    store.delete(plan.removed)
    events.event("clean.files.removed", detail=f"{len(plan.removed)} files")
    if (listing.manifests or listing.files) and not plan.in_progress:  # else a directory of this name may be somebody else's
        newest = max(listing.newest, 0 if plan.fence is None else plan.fence.generation)
        store.delete(empty_directories(listing, newest, removed=plan.removed))


def _plan(listing: StepListing, generations: Generations, *, now_s: float, older_than_s: float, grace_s: float) -> _Plan:
    superseded = deletable(listing, generations, now_s=now_s, grace_s=grace_s)
    unfinished = listing.unfinished(generations.newest)
    attempts = tuple(owner.attempt for owner in unfinished)
    if not unfinished:
        return _Plan(superseded + _expired_tombstone(listing, generations, now_s), (), ())
    # The fence has to be the very next generation: then it cannot pass over a save that is published meanwhile.
    dead = {owner: entries for owner, entries in unfinished.items() if owner.generation == generations.newest + 1}
    if not dead or now_s - _last_written_s(dead) < older_than_s:
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
    is_alone = not listing.files and len(listing.manifests) == 1
    if newest is None or newest.state is not StepState.DELETED or not is_alone:
        return ()
    expired = now_s - generations.created_s[generations.newest] >= TOMBSTONE_S
    return (listing.manifests[generations.newest].key,) if expired else ()
