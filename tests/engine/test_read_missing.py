"""Blobs that are not there when a checkpoint is opened: all of them are told at once, with the host that misses them."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from anyshard.engine.read import ReadJob, open_blobs
from anyshard.errors import BlobNotFound, CheckpointDamaged
from anyshard.storage.local import LocalStore
from anyshard.storage.memory import MemoryStore

from .scene import Scene, count_descriptors, make_arrays, make_pool, make_scene

NUM_BLOBS = 9


@pytest.fixture
def scene() -> Scene:
    return make_scene(make_arrays({f"part{number}/a": 1000 for number in range(NUM_BLOBS)}), pool=make_pool(1))


@pytest.mark.parametrize("threads", [1, 4])
def test_all_missing_blobs_are_told_at_once(scene: Scene, threads: int) -> None:
    """How many of how many, the first five in the order of the manifest, the host, and what to check (B050)."""
    manifest = scene.write(store := MemoryStore())
    gone = [entry.name for entry in manifest.blobs[2:]]
    store.delete(gone)
    with pytest.raises(CheckpointDamaged) as caught:
        scene.load(store, manifest, ReadJob(threads=threads))
    text = str(caught.value)
    assert f"expected {NUM_BLOBS} blob(s) that the manifest lists, found 7 of them missing on host {socket.gethostname()}" in text
    assert f": {', '.join(gone[:5])} and 2 more. Check that the directory is the same on all hosts" in text
    assert gone[0] == caught.value.file


def test_one_missing_blob(scene: Scene) -> None:
    """Its name, no count of others, and the store's error as the reason behind it."""
    manifest = scene.write(store := MemoryStore())
    store.delete([manifest.blobs[4].name])
    with pytest.raises(CheckpointDamaged, match=rf": {manifest.blobs[4].name}\. Check") as caught:
        scene.load(store, manifest)
    missing = caught.value.__cause__
    assert (True, True) == (type(caught.value) is CheckpointDamaged, isinstance(missing and missing.__cause__, BlobNotFound))


def test_other_damage_is_told_as_it_is(scene: Scene) -> None:
    """A blob that is there and is not the one that was saved says more than those that are missing."""
    manifest = scene.write(store := MemoryStore())
    store.delete([entry.name for entry in manifest.blobs[:2]])
    store.delete([manifest.blobs[3].name])
    store.create(manifest.blobs[3].name, b"short", token="t")
    with pytest.raises(CheckpointDamaged, match="expected a length of"):
        scene.load(store, manifest)


def test_nothing_stays_open(scene: Scene, tmp_path: Path) -> None:
    """Of the blobs that are there every file is closed again, and they can be opened once more."""
    store = LocalStore(tmp_path)
    store.prepare([f"data/part{number}/" for number in range(NUM_BLOBS)])
    manifest = scene.write(store)
    store.delete([manifest.blobs[0].name])
    before = count_descriptors()
    with open_blobs(store, manifest, blobs=(), job=ReadJob(), pool=scene.pool) as blobs:
        with pytest.raises(CheckpointDamaged):
            blobs.open(range(NUM_BLOBS))
        assert before == count_descriptors()
        blobs.open(range(1, NUM_BLOBS))
        assert list(range(1, NUM_BLOBS)) == sorted(blobs.tails)
    assert before == count_descriptors()
