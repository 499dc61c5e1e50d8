"""Publishing a step in parts: one record above its parts makes all of them exist at once, the parts that it names and no others.

Each part is a checkpoint of its own, saved by its own ranks. Nobody holds a lock, so a part may be saved again while the step is
being published. Either side acts first and looks then: whoever saves a part looks at the record of the step once its own is
there, and whoever publishes looks at the parts. So at least one of them sees the other, and commits the part that the record
names once more, under the next generation: nothing that removes superseded files takes those of a published step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from anyshard.commit.deletion import deletable, read_generations
from anyshard.commit.guard import as_it_is
from anyshard.commit.parts import is_same_part, part_store
from anyshard.commit.probe import is_probe_id
from anyshard.commit.publish import PATIENT, Patience, create_record, go_ahead
from anyshard.commit.resolve import LOOKS, look
from anyshard.commit.saved_parts import Incarnation, SavedPart, StepRecord, find_saved, read_named, read_step_record
from anyshard.commit.stamp import stamp_after, writer_name
from anyshard.errors import (
    AnyshardError,
    CheckpointExists,
    CheckpointNotFound,
    CommitConflict,
    StorageUnguarded,
)
from anyshard.monitor.events import SILENT, Emitter
from anyshard.records.digests import digest_bytes
from anyshard.records.manifest import REQUIRES_PARTS, Manifest, PartEntry, Resumed, StepState, decode_manifest, encode_manifest
from anyshard.records.names import ATTEMPT_ALPHABET, ATTEMPT_LENGTH, manifest_name
from anyshard.storage.protocol import Store

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Publication:
    """What is to be published: the step, the attempt of the part of each role (None: whichever is there), the user's metadata."""

    step: int
    roles: Mapping[str, str | None]
    incarnation: Incarnation = field(default_factory=Incarnation)
    user: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The record of a published step, and whether this publication has made it."""

    manifest: Manifest
    is_new: bool


def publish_parts(  # noqa: PLR0913 - what the caller decides, and its means
    store: Store,
    asked: Publication,
    *,
    timeout_s: float = 0.0,
    settle: Callable[[Store], Store] = as_it_is,
    decide: Callable[[], None] = go_ahead,
    patience: Patience = PATIENT,
    events: Emitter = SILENT,
) -> Outcome:
    """Make the step exist with the parts of these roles, once all of them are committed and complete; wait for that so long.

    Whoever asks again for the same roles, or at the same moment, gets the same record: what it holds depends on the parts alone.
    `decide` is called right before it is created; what it raises ends this with nothing published. Raises `CheckpointNotFound`
    (a part is missing; the message says which and why), `CommitConflict` (the step is published with other parts, or parts are of
    another run), `CheckpointExists` (a whole checkpoint is there), `CommitOutcomeUnknown`, or the store's error.
    """
    missing: Mapping[str, str] = {}
    for _ in replace(patience, timeout_s=timeout_s, visibility_timeout_s=timeout_s).looks():
        found = _try(store, asked, settle=settle, decide=decide, patience=patience, events=events)
        if isinstance(found, Outcome):
            return found
        missing = found
    raise _missing(store, missing, timeout_s)


def _try(  # noqa: PLR0913 - all that its caller was given, handed on
    store: Store,
    asked: Publication,
    *,
    settle: Callable[[Store], Store],
    decide: Callable[[], None],
    patience: Patience,
    events: Emitter,
) -> Outcome | dict[str, str]:
    """Publish the step if all parts are there; else why they do not count, by role. Who loses a race looks at what has won."""
    for _ in range(LOOKS):
        record = read_step_record(store)  # before the parts: whatever comes after them takes the next generation
        if standing := find_standing(store, record, asked):
            return Outcome(hold_all(store, standing, patience=patience), is_new=False)
        parts, missing = sort_parts(store, record, asked)
        if missing:
            return missing
        store = settle(store)
        manifest = make_step_record(store, record, asked, parts)
        decide()
        with suppress(CommitConflict):
            create_record(store, manifest, patience=patience)
            events.event("parts.published", file=manifest_name(manifest.generation))
            return Outcome(hold_all(store, manifest, patience=patience), is_new=True)
    raise CommitConflict(
        f"{store.url}: others changed the record of the step {LOOKS} times while it was being published; try again"
    )


def find_standing(store: Store, record: StepRecord, asked: Publication) -> Manifest | None:
    """The record that is there, if it is what is asked for; an error if it is another one that may not be replaced."""
    published = record.published
    if published is None:
        return None
    if not published.parts:
        raise CheckpointExists(
            f"{store.url}: a whole checkpoint (saved on {published.time}) is there, not a step in parts; choose another step"
        )
    found = {entry.name: entry.attempt for entry in published.parts}
    is_same = found.keys() == asked.roles.keys() and all(asked.roles[name] in (None, found[name]) for name in found)
    if asked.incarnation.may_replace(asked.step, record):
        return published if is_same and None not in asked.roles.values() else None
    if is_same:
        return published
    raise CommitConflict(
        f"{store.url}: expected to publish {_show_parts(asked.roles)}, found the step published with {_show_parts(found)}. That "
        "one stands; a published step is not changed"
    )


def sort_parts(store: Store, record: StepRecord, asked: Publication) -> tuple[tuple[SavedPart, ...], dict[str, str]]:
    """The parts that count, in the order of their names, and why others do not."""
    found = {role: find_saved(store, role) for role in sorted(asked.roles)}
    parts = [part for part in found.values() if isinstance(part, SavedPart)]
    missing = {role: part for role, part in found.items() if isinstance(part, str)}
    missing |= {part.name: why for part in parts if (why := _why_not(part, record, asked))}
    ids = {part.manifest.run_id for part in parts} | {asked.incarnation.run_id}
    if not missing and len(ids - {None}) > 1:
        raise CommitConflict(
            f"{store.url}: expected parts of one run{_show_id(asked.incarnation.run_id)}, found "
            + ", ".join(f"{part.name} of {part.manifest.run_id}" for part in parts)
            + ". Nothing was published; save those of the other run again, or publish from the run that saved them"
        )
    return tuple(parts), missing


def _why_not(part: SavedPart, record: StepRecord, asked: Publication) -> str:
    wanted, since_s = asked.roles[part.name], asked.incarnation.since_s
    if record.deleted_s is not None and part.modified_s < record.deleted_s:
        return "it is from before the step was deleted"
    if wanted is None and since_s is not None and part.modified_s < since_s:
        return f"it is of {part.manifest.time}, before this job resumed; give its attempt ({part.entry.attempt}) to take it"
    if wanted not in (None, part.entry.attempt):
        return f"expected attempt {wanted}, found {part.entry.attempt}"
    return ""


def make_step_record(store: Store, record: StepRecord, asked: Publication, parts: Sequence[SavedPart]) -> Manifest:
    """The record that names these parts, the same for everybody who makes it of them."""
    if record.published is not None and not store.capabilities.guarded:
        raise StorageUnguarded(
            f"{store.url}: the step is published, and this store has no create-if-absent that can be relied upon, so to replace "
            "it is not safe. Delete the step first, or save another one. Nothing was published",
            file=store.url,
        )
    attempt = _derive_attempt(record.generation + 1, parts)
    resumed = asked.incarnation.mark or _find_resumed(parts)
    newest = max((part.manifest.time for part in parts), key=lambda time: time.rstrip("Z"))
    ids = [asked.incarnation.run_id, *(part.manifest.run_id for part in parts)]
    manifest = Manifest(
        generation=record.generation + 1,
        attempt=attempt,
        state=StepState.COMMITTED,
        step=asked.step,
        run_id=next((run_id for run_id in ids if run_id is not None), attempt),
        sections=(),
        time=stamp_after(newest, (asked.incarnation.after, "" if resumed is None else resumed.time)),
        writer=writer_name(),
        world_size=max(part.manifest.world_size for part in parts),
        num_rows=0,
        num_slots=0,
        index=None,
        blobs=(),
        commit="guarded" if store.capabilities.guarded else "unguarded",
        requires=(REQUIRES_PARTS,),
        user=dict(asked.user),
        parts=tuple(part.entry for part in parts),
        resumed=resumed,
    )
    decode_manifest(encode_manifest(manifest), file="manifest")  # what a reader would refuse must not be committed
    return manifest


def _find_resumed(parts: Sequence[SavedPart]) -> Resumed | None:
    """Where the worlds of the parts have gone on from, for a driver that has not loaded anything: the lowest step of all."""
    found = [part.manifest.resumed for part in parts if part.manifest.resumed is not None]
    return min(found, key=lambda resumed: (resumed.step, resumed.time), default=None)


def hold_all(store: Store, manifest: Manifest, *, patience: Patience = PATIENT) -> Manifest:
    """The record itself, once its parts are kept as it names them. The step exists by now, so what fails here is only logged."""
    for named in manifest.parts:
        try:
            hold_part(store, named, patience=patience)
        except AnyshardError as error:
            logger.warning("%s: part %s of the published step could not be looked at: %s", store.url, named.name, error)
    return manifest


def hold_part(store: Store, named: PartEntry, *, patience: Patience = PATIENT) -> None:
    """Commit a part as it is named once more if another save took its place meanwhile; that one is superseded."""
    own = part_store(store, named.name)
    for _ in range(LOOKS):
        _, newest = look(own)
        if newest is not None and is_same_part(named, newest.decode()):
            return
        manifest = read_named(store, named)
        if newest is None or newest.decode().state is StepState.DELETED:
            return  # it is being deleted, with the step
        with suppress(CommitConflict):
            create_record(own, replace(manifest, generation=newest.generation + 1), patience=patience)


def tidy_parts(store: Store, manifest: Manifest, grace_s: float, *, events: Emitter = SILENT) -> tuple[str, ...]:
    """Remove what the parts of a published step have superseded, once the grace has passed; return what there is to warn of."""
    try:
        for named in manifest.parts:
            _tidy_part(part_store(store, named.name), named, grace_s, events)
    except AnyshardError as error:
        return (f"files of superseded parts could not be removed: {error}",)
    return ()


def _tidy_part(own: Store, named: PartEntry, grace_s: float, events: Emitter) -> None:
    listing, generations = read_generations(own)
    newest = generations.manifests.get(generations.newest)
    if newest is None or not is_same_part(named, newest):
        return  # a save has just taken its place, and looks whether it may
    keys = deletable(listing, generations, now_s=own.now_s(), grace_s=grace_s)
    own.delete(keys)
    events.event("save.superseded.removed", detail=f"{len(keys)} files of {named.name}")


def _derive_attempt(generation: int, parts: Sequence[SavedPart]) -> str:
    """An attempt id that follows from what is published, so that two who publish the same make the same record."""
    named = " ".join(f"{part.name}:{part.entry.generation}:{part.entry.attempt}" for part in parts)
    texts = (f"{generation} {number} {named}" for number in count())
    return next(attempt for attempt in map(_spell_digest, texts) if not is_probe_id(attempt))


def _spell_digest(text: str) -> str:
    value = int(digest_bytes(text.encode("ascii")).rpartition(":")[2], 16)
    return "".join(ATTEMPT_ALPHABET[value >> (5 * i) & 31] for i in range(ATTEMPT_LENGTH))


def _missing(store: Store, missing: Mapping[str, str], timeout_s: float) -> CheckpointNotFound:
    waited = f" within {timeout_s:g} s" if timeout_s else ""
    reasons = "; ".join(f"{role}: {why}" for role, why in missing.items())
    return CheckpointNotFound(
        f"{store.url}: the step was not published, for not all of its parts are there{waited}: {reasons}. Publish it once they "
        "are; each can be loaded by the number of the step and its role"
    )


def show_roles(roles: Iterable[str]) -> str:
    """The names of roles for a message."""
    return ", ".join(sorted(roles))


def _show_parts(attempts: Mapping[str, str | None]) -> str:
    return ", ".join(role if attempt is None else f"{role} ({attempt})" for role, attempt in sorted(attempts.items()))


def _show_id(run_id: str | None) -> str:
    return "" if run_id is None else f" ({run_id})"
