"""Placing: what is in progress when a load ends is waited for, but not for ever."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from anyshard.engine.crew import Patience, StorageStuck
from anyshard.engine.place import Placer
from anyshard.engine.read import ReadJob, open_blobs
from anyshard.storage.memory import MemoryStore

from .scene import make_arrays, make_scene


class HangingDestination:
    """A destination on a device that answers when the gate is opened."""

    def __init__(self, gate: threading.Event) -> None:
        self.begun = threading.Event()
        self._gate = gate

    def memory(self) -> None:
        return None

    def place(self, where: tuple[slice, ...], bits: Any) -> None:
        assert (1, 100) == (len(where), bits.size)
        self.begun.set()
        self._gate.wait(30)


def test_placement_that_hangs_is_given_up(gate: threading.Event) -> None:
    """Closing says that tensors may still change when a copy does not end in time."""
    scene = make_scene(make_arrays({"model/a": 100}))
    manifest = scene.write(store := MemoryStore())
    with open_blobs(store, manifest, blobs=[0], job=ReadJob(), pool=scene.pool) as blobs:
        plan = scene.plan_load(scene.plan.shards, blobs.tails)
    hanging = HangingDestination(gate)
    placer = Placer(plan, [hanging])
    data = memoryview(bytearray(int(plan.reads.stop[0] - plan.reads.start[0])))
    threading.Thread(target=placer.place, args=(0, data), name="test-place", daemon=True).start()
    assert hanging.begun.wait(30)
    with pytest.raises(StorageStuck, match="may still change"):
        placer.close(0.05)


def test_failed_load_does_not_wait_for_a_hanging_placement(gate: threading.Event) -> None:
    """A fill into a device that hangs ends after the set time, and leaves the pool as large as it was."""
    scene = make_scene(make_arrays({"model/a": 100}))
    manifest = scene.write(store := MemoryStore())
    with pytest.raises(StorageStuck, match="may still change"):
        scene.fill(store, manifest, [HangingDestination(gate)], ReadJob(patience=Patience(timeout_s=0.2, report_s=0.1)))
    assert 4 == scene.pool.num_free
