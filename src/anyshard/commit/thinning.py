"""Thinning: a committed checkpoint gives up sections, by a new index and a new record over the blobs that are left.

No blob is read or written. What the new record does not name goes by the one deletion rule.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

from anyshard.commit.attempt import Attempt, abandoning, make_attempt_id
from anyshard.commit.deletion import remove_licensed
from anyshard.commit.guard import as_it_is
from anyshard.commit.parts import is_same_part, part_prefix, part_store
from anyshard.commit.publish import PATIENT, Patience, publish
from anyshard.commit.resolve import Resolved, check_complete, resolve
from anyshard.commit.stamp import utc_now, writer_name
from anyshard.commit.stored_index import read_index
from anyshard.errors import CheckpointDamaged, CommitConflict, InvalidOption, LimitExceeded, StorageUnguarded
from anyshard.monitor.events import SILENT, Emitter
from anyshard.records.addresses import show
from anyshard.records.digests import digest_bytes
from anyshard.records.index import decode_index, encode_index
from anyshard.records.manifest import IndexEntry, Manifest, PartEntry, Thinned, decode_manifest, encode_manifest
from anyshard.records.names import MAX_GENERATION, index_name
from anyshard.records.thinner import select_blobs, select_sections
from anyshard.storage.protocol import Store


def thin_step(  # noqa: PLR0913 - what to keep, and the means
    store: Store,
    sections: Collection[str],
    *,
    generation: int | None = None,
    grace_s: float = 0.0,
    settle: Callable[[Store], Store] = as_it_is,
    patience: Patience = PATIENT,
    events: Emitter = SILENT,
) -> tuple[str, ...]:
    """Leave of a checkpoint only these sections (those of them that it has), and return the keys of the files that are gone.

    It is whole for its readers at every moment: as it was, or thinned. It stays the checkpoint of its step and its save, and
    says since when it lacks what. Files that it needs no more go once `grace_s` have passed, at once by default; where they or a
    thinner were interrupted, thinning again finishes it. One that is as thin already stays as it is. Of a step in parts each part
    is thinned that has any of these sections. With `generation` it is the checkpoint of that generation alone that is thinned;
    another one is left alone (`CommitConflict`). `settle` finds out whether the store is `guarded`.

    Raises `InvalidOption` (nothing would be left, or what is kept is tied to what is not), `CommitConflict` (a save, a delete or
    another thinner came first), `StorageUnguarded`, `CheckpointDamaged` (a file is not as its manifest says), or what `resolve`
    does; then nothing has changed.
    """
    resolved, means = resolve(store), _Means(grace_s, settle, patience, events)
    if generation not in (None, resolved.manifest.generation):
        raise CommitConflict(
            f"{store.url}: expected to thin the checkpoint of generation {generation}, found generation "
            f"{resolved.manifest.generation}: it was saved over meanwhile. Nothing was changed"
        )
    if resolved.manifest.parts:
        return _thin_parts(store, resolved.manifest, sections, means)
    return _thin(store, resolved, sections, means)


@dataclass(frozen=True, slots=True)
class _Means:
    grace_s: float
    settle: Callable[[Store], Store]
    patience: Patience
    events: Emitter


def _thin(
    store: Store, resolved: Resolved, sections: Collection[str], means: _Means, *, named: PartEntry | None = None
) -> tuple[str, ...]:
    """Thin a checkpoint, or a part as it is `named`; if that is saved anew meanwhile, what is named keeps its files."""
    manifest = resolved.manifest
    kept = tuple(section for section in manifest.sections if section in sections)
    if not kept:
        raise _nothing_left(store, sections, manifest.sections)
    if len(kept) < len(manifest.sections):
        _publish(means.settle(store), resolved, kept, means)
    entry = PartEntry("", manifest.generation, manifest.data_attempt) if named is None else named
    may_go = partial(is_same_part, entry)
    return remove_licensed(store, grace_s=means.grace_s, event="thin.files.removed", may_go=may_go, events=means.events)


def _thin_parts(store: Store, manifest: Manifest, sections: Collection[str], means: _Means) -> tuple[str, ...]:
    named = {entry.name: entry for entry in manifest.parts}
    found = {name: _resolve_part(store, entry) for name, entry in named.items()}
    chosen = {name: resolved for name, resolved in found.items() if set(sections) & set(resolved.manifest.sections)}
    if not chosen:
        raise _nothing_left(store, sections, [section for part in found.values() for section in part.manifest.sections])
    store = means.settle(store)
    means = replace(means, settle=as_it_is)
    return tuple(
        part_prefix(name) + key
        for name, resolved in chosen.items()
        for key in _thin(part_store(store, name), resolved, sections, means, named=named[name])
    )


def _resolve_part(store: Store, entry: PartEntry) -> Resolved:
    own = part_store(store, entry.name)
    resolved = resolve(own)
    if not is_same_part(entry, resolved.manifest):
        raise CheckpointDamaged(
            f"{own.url}: expected the part that the record of its step names (attempt {entry.attempt}), found attempt "
            f"{resolved.manifest.data_attempt}: somebody saved over the part. Load another step",
            file=own.url,
        )
    return resolved


def _publish(store: Store, resolved: Resolved, kept: tuple[str, ...], means: _Means) -> None:
    """Make the record of the thinned checkpoint the one that counts, or leave everything as it was."""
    manifest = resolved.manifest
    if not store.capabilities.guarded:
        raise StorageUnguarded(
            f"{store.url}: this store has no create-if-absent that can be relied upon, so to thin a step there is not safe: "
            "a save at the same time could be lost without a word. Nothing was changed; delete the step instead",
            file=store.url,
        )
    if manifest.generation >= MAX_GENERATION:
        raise LimitExceeded(f"{store.url}: generation {manifest.generation} is the last one; this step cannot be thinned")
    check_complete(store, manifest, resolved.listing)
    blobs, positions = select_blobs(manifest.blobs, kept)
    index = decode_index(read_index(store, manifest), max_rows=manifest.num_rows, file=f"index of {store.url}")
    left = select_sections(index, kept, positions)
    data = encode_index(left)
    attempt = Attempt(manifest.generation + 1, make_attempt_id(), manifest)
    entry = IndexEntry(index_name(attempt.generation, attempt.id), len(data), digest_bytes(data))
    thinned = replace(
        manifest,
        generation=attempt.generation,
        attempt=attempt.id,
        writer=writer_name(),
        sections=kept,
        num_rows=left.num_rows,
        index=entry,
        blobs=blobs,
        commit="guarded",
        thinned=_describe(manifest, kept),
    )
    decode_manifest(encode_manifest(thinned), file="manifest")  # what a reader would refuse must not be committed
    with abandoning(store, attempt, events=means.events):
        store.create(entry.name, data, token=attempt.id)
        means.events.event("thin.index.created", detail=f"generation {attempt.generation}, attempt {attempt.id}")
        publish(store, thinned, patience=means.patience, events=means.events)


def _describe(manifest: Manifest, kept: Collection[str]) -> Thinned:
    before = () if manifest.thinned is None else manifest.thinned.dropped
    dropped = tuple(section for section in manifest.sections if section not in kept)
    return Thinned(manifest.data_attempt, (*before, *dropped), utc_now())


def _nothing_left(store: Store, sections: Collection[str], there: Sequence[str]) -> InvalidOption:
    return InvalidOption(
        f"{store.url}: expected to keep at least one of the sections there ({_list(there)}), found none of them in "
        f"{_list(sorted(sections))}; name what to keep, or delete the step"
    )


def _list(sections: Sequence[str]) -> str:
    return ", ".join(map(show, sections)) or "nothing"
