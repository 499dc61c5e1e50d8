"""Small checkpoints of known shape, written by hand in the order of a save, on any store."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from anyshard.commit.attempt import Attempt, begin
from anyshard.commit.deletion import remove_superseded
from anyshard.commit.publish import Patience, publish
from anyshard.commit.resolve import resolve
from anyshard.errors import CheckpointDamaged, CheckpointNotFound
from anyshard.records.digests import digest_bytes
from anyshard.records.index import encode_index
from anyshard.records.manifest import BlobEntry, IndexEntry, Manifest, StepState
from anyshard.records.names import blob_name, index_name, parse_name
from anyshard.records.tables import Index, make_tensor_table, whole_shards
from anyshard.storage.memory import MemoryStore
from anyshard.storage.protocol import Store

BLOB_NBYTES = 4096
INDEX = encode_index(Index(whole_shards(make_tensor_table([], [], [], {})), np.zeros(0, np.int64), np.zeros(0, np.int64)))
ATTEMPTS = tuple(letter * 13 for letter in "abcdef")


class Clock:
    """A clock that moves only when told to, or when somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def read(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def make_patience(clock: Clock) -> Patience:
    return Patience(timeout_s=10, poll_s=1, clock=clock.read, sleep=clock.sleep)


def make_manifest(generation: int, attempt: str, *, sections: tuple[str, ...] = ("model",)) -> Manifest:
    """The record that goes with the files of `write_files`."""
    blobs = tuple(
        BlobEntry(
            blob_name(section, 0, k=0, generation=generation, attempt=attempt), section, 0, BLOB_NBYTES, 64, digest_bytes(b"tail")
        )
        for section in sections
    )
    return Manifest(
        generation=generation,
        attempt=attempt,
        state=StepState.COMMITTED,
        step=100,
        run_id=None,
        sections=sections,
        time="2026-01-02T03:04:05Z",
        writer="anyshard test",
        world_size=1,
        num_rows=1,
        num_slots=1,
        index=IndexEntry(index_name(generation, attempt), len(INDEX), digest_bytes(INDEX)),
        blobs=blobs,
    )


def write_files(store: Store, manifest: Manifest) -> Iterator[str]:
    """Write the blobs and the index of `manifest`; yields after each file."""
    for blob in manifest.blobs:
        with store.create_blob(blob.name, nbytes=blob.nbytes) as writer:
            writer.write_at(0, memoryview(manifest.attempt.encode().ljust(blob.nbytes, b".")))
            writer.finish()
        yield "blob"
    assert manifest.index is not None
    store.create(manifest.index.name, INDEX, token=manifest.attempt)
    yield "index"


def save_slowly(store: Store, *, overwrite: bool = False, grace_s: float = 3600.0) -> Iterator[str]:
    """A save that stops at every point; closing the generator there is a death, going on later is a pause."""
    attempt = begin(store, sections=("model",), overwrite=overwrite)
    yield "begun"
    manifest = make_manifest(attempt.generation, attempt.id)
    yield from write_files(store, manifest)
    publish(store, manifest)
    yield "published"
    remove_superseded(store, grace_s)
    yield "removed"


def run_until(writer: Iterator[str], point: str) -> None:
    """Run a slow save up to and including `point`."""
    for reached in writer:
        if reached == point:
            return
    raise AssertionError(point)


def save(store: Store, *, overwrite: bool = False, grace_s: float = 3600.0) -> Manifest:
    """A whole save; returns the manifest that counts afterwards."""
    run_until(save_slowly(store, overwrite=overwrite, grace_s=grace_s), "removed")
    return resolve(store).manifest


def write_attempt(store: Store, attempt: Attempt, *, sections: tuple[str, ...] = ("model",)) -> Manifest:
    """All files of an attempt but its record, which is returned."""
    manifest = make_manifest(attempt.generation, attempt.id, sections=sections)
    for _ in write_files(store, manifest):
        pass
    return manifest


def verdict(store: Store) -> int | str:
    """The generation that readers see, or why they see none."""
    try:
        return resolve(store).manifest.generation
    except CheckpointNotFound as error:
        return "deleted" if "deleted" in str(error) else "unfinished" if "unfinished" in str(error) else "nothing"
    except CheckpointDamaged:
        return "damaged"


def contents(store: MemoryStore) -> list[str]:
    """What is there, as `<generation> <kind>` per file, sorted; foreign names as they are."""
    named = [(key, parse_name(key)) for key in store.snapshot()]
    return sorted(key if name is None else f"{name.generation} {name.kind}" for key, name in named)
