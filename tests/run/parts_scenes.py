"""Steps in parts for tests, on any store: parts written by hand in the order of a save, and what a reader finds of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from anyshard.commit.attempt import abandoning, begin
from anyshard.commit.part_saving import PartSaving
from anyshard.commit.publish import publish
from anyshard.commit.publish_parts import Outcome, Publication, publish_parts
from anyshard.commit.resolve import check_complete, resolve
from anyshard.commit.saved_parts import Incarnation, find_part, read_step_record
from anyshard.records.manifest import Manifest
from anyshard.storage.memory import MemoryStore
from anyshard.storage.protocol import Store
from tests.commit.steps import Clock, write_files
from tests.commit.steps import make_manifest as make_part_manifest

STEP = 100
ROLES = ("actor", "critic")
FRESH = Incarnation()


def save_part(
    store: Store,
    role: str,
    *,
    incarnation: Incarnation = FRESH,
    overwrite: bool = False,
    **facts: Any,
) -> Manifest:
    """Save a part in the order of a save; its record, which says these facts."""
    own = PartSaving(store, role, step=STEP, incarnation=incarnation)
    attempt = begin(own, sections=("model",), overwrite=overwrite)
    with abandoning(own, attempt):
        manifest = replace(make_part_manifest(attempt.generation, attempt.id), **facts)
        for _ in write_files(own, manifest):
            pass
        publish(own, manifest)
    return manifest


def save_all(store: Store, *, run_id: str | None = None, incarnation: Incarnation = FRESH, overwrite: bool = False) -> list[str]:
    """Save all parts; their attempts."""
    given: dict[str, Any] = {"run_id": run_id, "overwrite": overwrite}
    return [save_part(store, role, incarnation=incarnation, **given).attempt for role in ROLES]


def ask(*roles: str, incarnation: Incarnation = FRESH, **attempts: str) -> Publication:
    """A publication of these roles, with the given attempts."""
    return Publication(STEP, {role: None for role in roles or () if role not in attempts} | attempts, incarnation)


BOTH = ask(*ROLES)


def publish_both(store: Store) -> Outcome:
    """Publish the step with all parts."""
    return publish_parts(store, BOTH)


def make_store(clock: Clock | None = None) -> MemoryStore:
    """An empty step; its clock stands still unless one is given."""
    return MemoryStore(clock=(Clock() if clock is None else clock).read)


def named_attempts(store: Store) -> list[str]:
    """The attempts of the parts that the step is published with."""
    published = read_step_record(store).published
    return [] if published is None else [part.attempt for part in published.parts]


def seen_attempts(store: Store) -> list[str]:
    """The attempts of the parts that a reader of the published step finds, each of them whole; none if it is not published."""
    published = read_step_record(store).published
    roles = () if published is None else [part.name for part in published.parts]
    found = [resolve_whole(find_part(store, role, published=True)) for role in roles]
    return [manifest.data_attempt for manifest in found]


def resolve_whole(store: Store) -> Manifest:
    """The record that counts in a store, with all of its files there."""
    resolved = resolve(store)
    check_complete(store, resolved.manifest, resolved.listing)
    return resolved.manifest
