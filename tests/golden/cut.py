"""A checkpoint whose one tensor is cut into boxes over two ranks, made from the rooms below the API."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from anyshard.commit.attempt import begin
from anyshard.commit.publish import publish
from anyshard.engine.blocks import BlockPool
from anyshard.engine.write import WriteJob, write_blobs
from anyshard.planning.pack import make_index, order_blobs, plan_save
from anyshard.records.digests import digest_bytes
from anyshard.records.handles import ArraySource
from anyshard.records.index import encode_index
from anyshard.records.manifest import BlobEntry, IndexEntry, Manifest, StepState
from anyshard.records.names import index_name
from anyshard.records.tables import SavePlan, ShardTable, make_tensor_table
from anyshard.records.values import TensorMark, ValueRegistry, encode_value
from anyshard.storage.local import LocalStore
from tests.golden.contents import fill

ADDRESS, SHAPE, DTYPE = "model/weight", (10, 6), "int32"
BOXES = {0: [((0, 0), (4, 6)), ((7, 3), (3, 3))], 1: [((4, 0), (3, 6)), ((7, 0), (3, 3))]}
TENSORS = make_tensor_table([ADDRESS], [DTYPE], [SHAPE], {})


def whole() -> np.ndarray:
    """The logical tensor."""
    return fill(SHAPE, DTYPE, 42).numpy()


def save_cut(path: Path) -> None:
    """Write it as a job of two ranks would."""
    store = LocalStore(str(path))
    attempt = begin(store, sections=("model",), overwrite=False)
    plans = [_plan(rank) for rank in BOXES]
    entries = {
        (entry.section, entry.rank): entry
        for rank, plan in enumerate(plans)
        for entry in write_blobs(
            store,
            plan,
            sources=_sources(rank),
            job=_job(attempt.id, rank),
            pool=BlockPool(byte_budget=1 << 20, block_nbytes=1 << 18),
        )
    }
    index = encode_index(make_index(plans, TENSORS))
    name = index_name(1, attempt.id)
    store.create(name, index, token=attempt.id)
    blobs = tuple(entries[blob.section, blob.rank] for blob in order_blobs(plans))
    publish(store, _manifest(attempt.id, IndexEntry(name, len(index), digest_bytes(index)), blobs))


def _plan(rank: int) -> SavePlan:
    boxes = np.array(BOXES[rank], dtype=np.int64)
    shards = ShardTable(TENSORS, np.zeros(len(boxes), dtype=np.int64), boxes[:, 0], boxes[:, 1])
    return plan_save(shards, ["model"], rank=rank, max_blob_nbytes=1 << 30)


def _sources(rank: int) -> list[ArraySource]:
    boxes = [tuple(slice(o, o + n) for o, n in zip(*box, strict=True)) for box in BOXES[rank]]
    return [ArraySource(whole()[box].view(np.uint32)) for box in boxes]


def _job(attempt: str, rank: int) -> WriteJob:
    members = {"shared": {"weight": TensorMark(ADDRESS, "tensor")}} if rank == 0 else {}
    values = {"model": encode_value(members, address="model", registry=ValueRegistry())}
    return WriteJob(generation=1, attempt=attempt, step=7, run_id=None, world_size=2, writer="anyshard 0.1.0", values=values)


def _manifest(attempt: str, index: IndexEntry, blobs: tuple[BlobEntry, ...]) -> Manifest:
    return Manifest(
        generation=1,
        attempt=attempt,
        state=StepState.COMMITTED,
        step=7,
        run_id=None,
        sections=("model",),
        time="2026-11-29T00:00:00Z",
        writer="anyshard 0.1.0",
        world_size=2,
        num_rows=4,
        num_slots=3,
        index=index,
        blobs=blobs,
        mesh={"fsdp": 2},
    )
