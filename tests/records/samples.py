"""One small checkpoint's records that belong together, for tests that need something whole to start from."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from anyshard.records.digests import digest_bytes
from anyshard.records.index import encode_index
from anyshard.records.layout import lay_out
from anyshard.records.manifest import BlobEntry, IndexEntry, Manifest, Parent, StepState
from anyshard.records.names import blob_name, index_name
from anyshard.records.tables import NO_BLOB, NOT_AN_ALIAS, Index, ShardTable, make_tensor_table
from anyshard.records.tail import CELL_NBYTES, BlobIdentity, Tail, encode_tail

ATTEMPT = "abcdefgh23456"
VALUES = bytes.fromhex("82a16101a162a3787978")  # {"a": 1, "b": "xyx"}


def make_index(**changes: Any) -> Index:
    """Four tensors: an empty one, a scalar, a matrix in two shards and its alias."""
    tensors = make_tensor_table(
        ["model/empty", "model/scalar", "model/weight", "model/tied"],
        ["float32", "int64", "bfloat16", "bfloat16"],
        [(0, 4), (), (8, 64), (8, 64)],
        {"model/tied": "model/weight"},
    )
    shards = ShardTable(
        tensors=tensors,
        tensor=np.array([0, 1, 3, 3]),
        offsets=np.array([[0, 0], [0, 0], [0, 0], [3, 0]]),
        lengths=np.array([[0, 4], [1, 1], [3, 64], [5, 64]]),
    )
    index = Index(shards, blob=np.array([NO_BLOB, 0, 0, 0]), slot=np.array([NO_BLOB, 0, 1, 2]))
    assert [NOT_AN_ALIAS, NOT_AN_ALIAS, 3, NOT_AN_ALIAS] == tensors.alias_of.tolist()
    return dataclasses.replace(index, **changes)


def make_tail(**changes: Any) -> Tail:
    """Blob 0 of section `model`: the scalar, the two shards of the matrix, the values."""
    nbytes = np.array([8, 3 * 64 * 2, 5 * 64 * 2, len(VALUES)])
    position = lay_out(nbytes)
    lengths = np.array([[1, 1], [3, 64], [5, 64], [1, 1]])
    tail = Tail(
        identity=BlobIdentity("model", 0, 0, 1, ATTEMPT, 100, "run", 1, "anyshard 0"),
        cell_nbytes=CELL_NBYTES,
        tail_position=int(position[-1] + nbytes[-1]),
        position=position,
        nbytes=nbytes,
        addresses=("model/scalar", "model/weight", "model/weight", "model"),
        dtypes=("int64", "bfloat16", "bfloat16", "msgpack"),
        ndims=np.array([0, 2, 2, 0], dtype=np.int8),
        shapes=np.array([[1, 1], [8, 64], [8, 64], [1, 1]]),
        offsets=np.array([[0, 0], [0, 0], [3, 0], [0, 0]]),
        lengths=lengths,
        cell_digests=np.array([7], dtype=np.uint64),
        also={"model/weight": ("model/tied",)},
    )
    return dataclasses.replace(tail, **changes)


def make_manifest(**changes: Any) -> Manifest:
    """The manifest of the index and the tail above."""
    index, tail = encode_index(make_index()), encode_tail(make_tail())
    position = make_tail().tail_position
    name = blob_name("model", 0, k=0, generation=1, attempt=ATTEMPT)
    manifest = Manifest(
        generation=1,
        attempt=ATTEMPT,
        state=StepState.COMMITTED,
        step=100,
        run_id="run",
        sections=("model",),
        time="2026-01-02T03:04:05Z",
        writer="anyshard 0",
        world_size=1,
        num_rows=make_index().num_rows,
        num_slots=4,
        index=IndexEntry(index_name(1, ATTEMPT), len(index), digest_bytes(index)),
        blobs=(BlobEntry(name, "model", 0, position + len(tail), position, digest_bytes(tail)),),
        parent=Parent("run", 90, ATTEMPT),
        mesh={"dp": 1},
        user={"loss": 1.5, "tags": ["a", None, True]},
    )
    return dataclasses.replace(manifest, **changes)
