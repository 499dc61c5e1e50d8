"""Reading ends when another rank of the job has failed."""

from __future__ import annotations

import threading

import pytest

from anyshard.engine.read import ReadJob, open_blobs
from anyshard.storage.memory import MemoryStore
from anyshard.storage.wrappers import FaultStore, Rule, Verb, do_before

from .scene import Scene, join_threads, make_arrays, make_scene


@pytest.fixture
def scene() -> Scene:
    return make_scene(make_arrays({"model/a": 100, "model/b": 70_000, "optimizer/m": 8}))


@pytest.mark.parametrize("verb", [Verb.OPEN_BLOB, Verb.READ_INTO])
def test_reads_end_when_another_rank_has_failed(scene: Scene, verb: Verb) -> None:
    """Also while the storage hangs: whoever waits for blobs and reads looks at the others meanwhile."""
    manifest, gate = scene.write(inner := MemoryStore()), threading.Event()
    checks = iter([False, True])

    def check() -> None:
        if next(checks):
            gate.set()
            raise KeyError("rank 1 has failed")

    store = FaultStore(inner, [Rule(verb, "*", do_before(gate.wait))])
    with pytest.raises(KeyError, match="rank 1"):
        scene.fill(store, manifest, [], ReadJob(check=check))


def test_fill_ends_when_another_rank_has_failed(scene: Scene) -> None:
    """As opening does; the threads are gone then."""
    manifest, failed = scene.write(store := MemoryStore()), list[str]()

    def check() -> None:
        if failed:
            raise KeyError(failed[0])

    with open_blobs(store, manifest, blobs=[0, 1], job=ReadJob(check=check), pool=scene.pool) as blobs:
        failed.append("rank 1 has failed")
        with pytest.raises(KeyError, match="rank 1"):
            blobs.verify(scene.plan_load(scene.plan.shards, blobs.tails))
    join_threads("anyshard")
