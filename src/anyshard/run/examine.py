"""One look at one step: what its records and its listing say, in parts or not. Decides nothing."""

from __future__ import annotations

import errno
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from anyshard.commit.listing import StepListing
from anyshard.commit.parts import is_same_part, list_parts, part_store
from anyshard.commit.resolve import PENDING_S, SHOWN, Record, age_s, find_incomplete, look, named_files, resolve
from anyshard.errors import (
    CheckpointDamaged,
    CheckpointNotFound,
    LimitExceeded,
    StorageError,
    UnsupportedFormat,
)
from anyshard.records.manifest import Manifest, StepState
from anyshard.run.metrics import read_metrics
from anyshard.run.step_info import BEING_WRITTEN, Condition, StepInfo
from anyshard.storage.protocol import Entry, Store

# A directory, or something else that is no file, under the name of a record. Any other error may have passed when asked again.
_ODD_FILES = (errno.EISDIR, errno.ENXIO)


@dataclass(frozen=True, slots=True)
class Examined:
    """What was found, and how much of it can still be relied upon later.

    `records` are the listed records. `is_settled`: nobody but a save, a delete or a thinning would change it.
    """

    info: StepInfo
    manifest: Manifest | None = None
    records: frozenset[Entry] = frozenset()
    has_parts: bool = False
    is_settled: bool = False

    @property
    def is_told_by_records(self) -> bool:
        """Whether other records would be listed if anything but the presence of blobs had changed."""
        return self.is_settled and not self.has_parts


def examine(store: Store, step: int) -> Examined | None:
    """What is at the place of a step; None if nothing of it is ours.

    Raises whatever error the store has, and `UnsupportedFormat`: what cannot be read now, or by this release, may be good, so
    nobody may pass it over, or save over it. What the bytes themselves show to be wrong is in the result.
    """
    try:
        listing, newest = look(store)
    except (StorageError, LimitExceeded) as error:
        if isinstance(error, StorageError) and error.errno not in _ODD_FILES:
            raise
        return Examined(StepInfo(step, store.url, Condition.DAMAGED, note=str(error)))
    parts = _examine_parts(store, listing, step)
    if newest is None and not listing.files and not parts:
        return None
    records = frozenset(listing.manifests.values())
    found = Examined(_measure(store, listing, parts, step), records=records, has_parts=bool(parts))
    if newest is None:
        return _as_pending(found, parts)
    try:
        manifest = newest.decode() if not newest.is_torn else resolve(store).manifest
    except CheckpointNotFound:  # behind a torn record, and deleted
        return _with(found, Condition.DELETED, note="a save over it is being committed")
    except CheckpointDamaged as error:
        return _as_damaged(found, store, listing, newest, error)
    except UnsupportedFormat as error:
        raise UnsupportedFormat(f"{store.url}: {error}") from error
    return _judge(found, listing, manifest, parts)


def _examine_parts(store: Store, listing: StepListing, step: int) -> dict[str, Examined]:
    names = list_parts(store) if listing.has_parts else ()
    looks = {name: examine(part_store(store, name), step) for name in names}
    return {name: found for name, found in looks.items() if found is not None}


def _measure(store: Store, listing: StepListing, parts: Mapping[str, Examined], step: int) -> StepInfo:
    """How large and how old it all is; the condition is only assumed."""
    files = [entry for _, entry in listing.entries()]
    records = [listing.manifests[listing.newest]] if listing.manifests else []
    written_s = [entry.modified_s for entry in records or files] or [part.info.written_s for part in parts.values()]
    nbytes = sum(entry.nbytes for entry in (*files, *listing.manifests.values()))
    nbytes += sum(part.info.nbytes for part in parts.values())
    return StepInfo(step, store.url, Condition.PENDING, nbytes=nbytes, written_s=max(written_s, default=math.inf))


def _with(found: Examined, condition: Condition, *, note: str) -> Examined:
    return replace(found, info=replace(found.info, condition=condition, note=note))


def _as_pending(found: Examined, parts: Mapping[str, Examined]) -> Examined:
    saved = [name for name, part in parts.items() if part.info.condition is Condition.COMMITTED]
    note = f"parts that are not published: {', '.join(saved)}" if saved else "a save that has not ended, or never will"
    has_leftovers = not parts or any(part.info.has_leftovers for part in parts.values())
    return replace(found, info=replace(found.info, note=note, parts=tuple(parts), has_leftovers=has_leftovers))


def _as_damaged(found: Examined, store: Store, listing: StepListing, newest: Record, error: CheckpointDamaged) -> Examined:
    if newest.is_torn and age_s(store, listing, newest) < PENDING_S:
        return _with(found, Condition.PENDING, note=BEING_WRITTEN)
    return _with(found, Condition.DAMAGED, note=str(error))


def _judge(found: Examined, listing: StepListing, manifest: Manifest, parts: Mapping[str, Examined]) -> Examined:
    """What a record that can be read makes of the step."""
    own = _facts(found.info, manifest, parts)
    is_deleted = manifest.state is StepState.DELETED
    has_leftovers = _has_leftovers(listing, manifest, parts)
    if is_deleted:
        living = tuple(name for name, part in parts.items() if part.info.condition is not Condition.DELETED)
        own = replace(own, condition=Condition.DELETED, parts=living)
    elif manifest.step not in (None, own.step):
        own = replace(own, condition=Condition.DAMAGED, note=f"its record is of step {manifest.step}: it was moved or renamed")
    elif wrong := find_incomplete(manifest, listing) + _find_wrong_parts(manifest, parts):
        shown = "; ".join(wrong[:SHOWN]) + (f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else "")
        own = replace(own, condition=Condition.INCOMPLETE, note=f"{len(wrong)} file(s) are not as its record says: {shown}")
    else:
        own = replace(own, condition=Condition.COMMITTED)
    is_quiet = manifest.generation == listing.newest and not has_leftovers
    is_settled = is_quiet and own.condition in (Condition.COMMITTED, Condition.DELETED)
    return replace(found, info=replace(own, has_leftovers=has_leftovers), manifest=manifest, is_settled=is_settled)


def _facts(info: StepInfo, manifest: Manifest, parts: Mapping[str, Examined]) -> StepInfo:
    """What the record says, and what the records of its parts say."""
    nbytes: dict[str, int] = defaultdict(int)
    for blob in manifest.blobs:
        nbytes[blob.section] += blob.nbytes
    sections, dropped = list(manifest.sections), [] if manifest.thinned is None else list(manifest.thinned.dropped)
    for name in (part.name for part in manifest.parts if part.name in parts):
        part = parts[name].info
        sections += [f"{name}/{section}" for section in part.sections]
        dropped += [f"{name}/{section}" for section in part.dropped]
        nbytes |= {f"{name}/{section}": found for section, found in part.section_nbytes.items()}
    return replace(
        info,
        generation=manifest.generation,
        attempt=manifest.attempt,
        run_id=manifest.run_id,
        time=manifest.time,
        sections=tuple(sections),
        dropped=tuple(dropped),
        parts=tuple(part.name for part in manifest.parts),
        metrics=read_metrics(manifest.user),
        section_nbytes=dict(nbytes),
        resumed=manifest.resumed,
    )


def _has_leftovers(listing: StepListing, manifest: Manifest, parts: Mapping[str, Examined]) -> bool:
    files, known = named_files(manifest), {part.name for part in manifest.parts}
    is_deleted = manifest.state is StepState.DELETED
    return (
        any(generation < manifest.generation for generation in listing.manifests)
        or any(entry.key not in files for _, entry in listing.entries())
        or any(part.info.has_leftovers for name, part in parts.items() if is_deleted or name in known)
        or (is_deleted and any(part.info.condition is not Condition.DELETED for part in parts.values()))
    )


def _find_wrong_parts(manifest: Manifest, parts: Mapping[str, Examined]) -> list[str]:
    """One line for each part that is not there as the record names it."""
    wrong = []
    for entry in manifest.parts:
        part = parts.get(entry.name)
        if part is None or part.manifest is None or not is_same_part(entry, part.manifest):
            found = "nothing" if part is None else f"attempt {part.info.attempt} ({part.info.condition})"
            wrong.append(f"part {entry.name}: expected attempt {entry.attempt}, found {found}")
        elif part.info.condition is not Condition.COMMITTED:
            wrong.append(f"part {entry.name}: {part.info.note}")
    return wrong
