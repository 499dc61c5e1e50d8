"""Probes: what saves ask of a store, tried out before there is anything to lose, and taken away again.

A probe has the names of an attempt that was never published (`index-2-probe....parquet`, `data/anyshard-probe/...`). So what a
rehearsal that was killed leaves behind is known for what it is: readers pass it over, saves go by it, a clean removes it.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

from anyshard.commit.foreign import show_names
from anyshard.commit.listing import DATA_PREFIX, StepListing
from anyshard.commit.resolve import Record, look, not_ours
from anyshard.errors import BlobExists, BlobNotFound, CheckpointDamaged, LimitExceeded, StorageError
from anyshard.records.addresses import section_directory
from anyshard.records.manifest import StepState
from anyshard.records.names import ATTEMPT_ALPHABET, ATTEMPT_LENGTH, MAX_GENERATION, blob_name, index_name
from anyshard.storage.protocol import Store

PROBE_SECTION: Final = "anyshard-probe"

_MARK = "probe"
_MAX_NBYTES = 1 << 16
_POLL_S = 0.1
_STEP = re.compile(r".*\d+/")  # directories of this run, or of whatever wrote into it before


@dataclass(frozen=True, slots=True)
class Ground:
    """A place at which a probe may be made: the generation of its names, directories that are not there yet, what to warn of."""

    generation: int
    directories: tuple[str, ...]
    warnings: tuple[str, ...]


def survey_ground(store: Store, *, sections: Sequence[str], is_step: bool) -> Ground:
    """Look at a place without touching it. Raises `NotACheckpoint` if a save would, and it is named like a step (`is_step`).

    A place with another name may be the directory of a run, in which anything may lie beside the steps.
    """
    listing, newest = look(store)
    if newest is not None and newest.generation >= MAX_GENERATION:
        raise LimitExceeded(f"{store.url}: generation {newest.generation} is the last one; save to another directory")
    wanted = (DATA_PREFIX, *(f"{DATA_PREFIX}{section_directory(section)}/" for section in (*sections, PROBE_SECTION)))
    missing = tuple(directory for directory in wanted if directory not in listing.directories)
    warnings = _describe_strangers(store, listing, is_step=is_step) if newest is None else _describe_taken(store, newest)
    return Ground(1 if newest is None else newest.generation + 1, missing, warnings)


def _describe_strangers(store: Store, listing: StepListing, *, is_step: bool) -> tuple[str, ...]:
    if not listing.is_foreign or any(map(_STEP.fullmatch, listing.foreign)):
        return ()
    if is_step:
        raise not_ours(store, listing)
    found = show_names(listing.foreign)
    return (f"{store.url} holds {found}, which anyshard did not write: save to new directories below it, not to it",)


def _describe_taken(store: Store, newest: Record) -> tuple[str, ...]:
    try:
        manifest = newest.decode()
    except CheckpointDamaged as damage:
        return (f"{store.url}: a damaged checkpoint is there ({damage}): a save to this very place needs overwrite=True",)
    if manifest.state is StepState.DELETED:
        return ()
    return (f"{store.url}: a checkpoint is there (step {manifest.step}): a save to this very place needs overwrite=True",)


def make_probe_id() -> str:
    """A new attempt id that says what it is."""
    rest = ATTEMPT_LENGTH - len(_MARK)
    return _MARK + "".join(secrets.choice(ATTEMPT_ALPHABET) for _ in range(rest))


def is_probe_id(attempt: str) -> bool:
    """Whether an attempt id is that of a probe, which is never published; no save takes such a one."""
    return attempt.startswith(_MARK)


def name_probe_blob(rank: int, *, generation: int, attempt: str) -> str:
    """The name of the blob by which a rank tries out writing."""
    return blob_name(section_directory(PROBE_SECTION), rank, k=0, generation=generation, attempt=attempt)


@final
class KeyProbe:
    """A small key by which a rank tries out create-if-absent, and by which others see whether they share its store.

    Call `create`, then from other ranks `is_seen`, then `remove`.
    """

    def __init__(self, store: Store, *, generation: int, attempt: str) -> None:
        self.attempt = attempt
        self._store = store
        self._key = index_name(generation, attempt)

    def create(self) -> None:
        """Create the key and, on a guarded store, try it once more with other content.

        Raises `StorageError` if the store does not keep the first.
        """
        data = self._content
        if self._store.capabilities.guarded:
            self._store.create(self._key, data, token=self.attempt)
            self._check_content("after it was created")
            self._check_guarded(data[::-1])
        else:
            self._store.put(self._key, data, token=self.attempt)
            self._check_content("after it was put")
        listed = {entry.key: entry.nbytes for entry in self._store.list("").entries}
        if listed.get(self._key) != len(data):
            raise self._refuse(f"to list the new key with {len(data)} bytes", f"{listed.get(self._key, 'no such key')}")

    def is_seen(self, patience_s: float) -> bool:
        """Whether the key, which another rank has created, is there, or comes up in time: mounts cache what they have seen."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                return self._store.read(self._key, max_nbytes=_MAX_NBYTES) == self._content
            except BlobNotFound:
                if time.monotonic() >= deadline:
                    return False
            time.sleep(_POLL_S)

    def remove(self) -> None:
        """Delete the key. Raises `StorageError` if it is there all the same."""
        self._store.delete([self._key])
        if any(entry.key == self._key for entry in self._store.list("").entries):
            raise self._refuse("to find the key gone after it was deleted", "it still")

    @property
    def _content(self) -> bytes:
        return f"{self.attempt}: made by a rehearsal of anyshard, may be deleted\n".encode("ascii")

    def _check_guarded(self, other: bytes) -> None:
        try:
            self._store.create(self._key, other, token=make_probe_id())
        except BlobExists:
            self._check_content("after another create of it was refused")
        else:
            raise self._refuse(
                "create-if-absent to refuse a key that is there",
                "that it went through: two saves to one place could both believe to be committed. Use a store that honours the "
                "condition, or one whose capabilities say that it is not guarded",
            )

    def _check_content(self, when: str) -> None:
        found = self._store.read(self._key, max_nbytes=_MAX_NBYTES)
        if found != self._content:
            raise self._refuse(f"to read back what was written, {when}", f"{len(found)} other bytes: the store loses writes")

    def _refuse(self, expected: str, found: str) -> StorageError:
        return StorageError(f"{self._store.url}: {self._key}: expected {expected}, found {found}", file=self._key)
