"""The slots of a blob that is about to be written: everything its tail says, but the digests."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from anyshard.records.dtypes import find_dtype
from anyshard.records.layout import align_up, lay_out
from anyshard.records.tables import BlobPlan, IntColumn, ShardTable, TensorTable
from anyshard.records.tail import CELL_NBYTES, SMALL_ALIGNMENT, VALUES_DTYPE, BlobIdentity, Tail


def describe_blob(shards: ShardTable, plan: BlobPlan, *, identity: BlobIdentity, values_nbytes: int | None) -> Tail:
    """The tail of the blob, its cell digests all zero. `values_nbytes` is the length of the values slot (None: there is none)."""
    tensors, rows = shards.tensors, plan.rows
    chosen = shards.tensor[rows]
    addresses = tuple(tensors.addresses[t] for t in chosen.tolist())
    dtypes = tuple(tensors.dtypes[t] for t in chosen.tolist())
    itemsizes = np.array([find_dtype(dtype).itemsize for dtype in dtypes], dtype=np.int64)
    nbytes = shards.lengths[rows].prod(axis=1) * itemsizes
    ndims, shapes, offsets, lengths = tensors.ndims[chosen], tensors.shapes[chosen], shards.offsets[rows], shards.lengths[rows]
    if values_nbytes is not None:
        addresses, dtypes = (*addresses, plan.section), (*dtypes, VALUES_DTYPE)
        nbytes, ndims = np.append(nbytes, values_nbytes), np.append(ndims, ndims.dtype.type(0))
        shapes, offsets, lengths = _append_row(shapes, 1), _append_row(offsets, 0), _append_row(lengths, 1)
    positions = lay_out(nbytes)
    tail_position = align_up(int(positions[-1] + nbytes[-1]), SMALL_ALIGNMENT)
    return Tail(
        identity=identity,
        cell_nbytes=CELL_NBYTES,
        tail_position=tail_position,
        position=positions,
        nbytes=nbytes,
        addresses=addresses,
        dtypes=dtypes,
        ndims=ndims,
        shapes=shapes,
        offsets=offsets,
        lengths=lengths,
        cell_digests=np.zeros(-(-tail_position // CELL_NBYTES), dtype=np.uint64),
        also=_list_ties(tensors, chosen),
    )


def _append_row(column: IntColumn, value: int) -> IntColumn:
    return np.append(column, np.full((1, column.shape[1]), value, dtype=np.int64), axis=0)


def _list_ties(tensors: TensorTable, stored: IntColumn) -> Mapping[str, tuple[str, ...]]:
    """For each tensor stored in this blob the addresses that are tied to it."""
    ties: dict[str, list[str]] = {}
    for alias in np.flatnonzero(np.isin(tensors.alias_of, stored)).tolist():
        ties.setdefault(tensors.addresses[tensors.alias_of[alias]], []).append(tensors.addresses[alias])
    return {address: tuple(also) for address, also in ties.items()}
