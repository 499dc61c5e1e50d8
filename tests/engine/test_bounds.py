"""What the records of a stranger claim is bounded before memory is taken for it: a sparse file has any length for nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anyshard.engine.read import ReadJob, open_blobs
from anyshard.errors import CheckpointDamaged
from anyshard.records.values_types import ValueLimits
from anyshard.storage.memory import MemoryStore

from .scene import make_arrays, make_scene


def test_tail_of_any_length_is_not_read() -> None:
    """A manifest that claims a tail of 1 PiB is damaged; no memory is asked for."""
    scene = make_scene(make_arrays({"model/a": 100}))
    manifest = scene.write(store := MemoryStore())
    blob = replace(manifest.blobs[0], nbytes=manifest.blobs[0].tail_position + (1 << 50))
    hostile = replace(manifest, blobs=(blob,))
    with (
        pytest.raises(CheckpointDamaged, match="length of the tail at most"),
        open_blobs(store, hostile, blobs=[0], job=ReadJob(), pool=scene.pool),
    ):
        pass


def test_values_longer_than_any_save_makes_are_not_read() -> None:
    """A values slot beyond the limit of values is damaged, whatever its digests say."""
    scene = make_scene(make_arrays({"model/a": 100}))
    hostile = replace(scene, values={"model": bytes(ValueLimits().max_nbytes + 1)})
    manifest = hostile.write(store := MemoryStore())
    with (
        open_blobs(store, manifest, blobs=[0], job=ReadJob(), pool=scene.pool) as blobs,
        pytest.raises(CheckpointDamaged, match="length of the values at most"),
    ):
        blobs.read_values("model")
