"""Packing: which rows of a shard table go into which blob and slot, and the index that says so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from anyshard.records.addresses import section_of, show
from anyshard.records.dtypes import find_dtype
from anyshard.records.layout import lay_out
from anyshard.records.regions import volume
from anyshard.records.tables import (
    NO_BLOB,
    NOT_AN_ALIAS,
    BlobPlan,
    Index,
    IntColumn,
    SavePlan,
    ShardTable,
    TensorTable,
    pad_columns,
)


def plan_save(shards: ShardTable, sections: Sequence[str], *, rank: int, max_blob_nbytes: int) -> SavePlan:
    """Put every row that has elements into exactly one slot: grouped by section, in address order, in blobs of bounded length.

    Every section gets a blob 0, even without tensors, for its values. A blob's extents end by `max_blob_nbytes`, unless it holds
    a single row that is longer. Raises `ValueError` for an address outside of `sections`.
    """
    nbytes = shard_nbytes(shards)
    section = _section_numbers(shards, sections)
    blobs = []
    for number, name in enumerate(sections):
        rows = np.flatnonzero((section == number) & (nbytes > 0))
        blobs += [BlobPlan(name, rank, k, part) for k, part in enumerate(_cut(rows, nbytes[rows], max_blob_nbytes))]
    return SavePlan(shards=shards, blobs=tuple(blobs))


def shard_nbytes(shards: ShardTable) -> IntColumn:
    """Stored bytes of each shard."""
    itemsizes = np.array([find_dtype(name).itemsize for name in shards.tensors.dtypes], dtype=np.int64)
    return volume(np.column_stack([shards.lengths, itemsizes[shards.tensor]]))


def _section_numbers(shards: ShardTable, sections: Sequence[str]) -> IntColumn:
    numbers = {name: number for number, name in enumerate(sections)}
    of_tensor = np.array([numbers.get(section_of(address), -1) for address in shards.tensors.addresses], dtype=np.int64)
    of_row = of_tensor[shards.tensor]
    for row in np.flatnonzero(of_row < 0)[:1]:
        address = shards.tensors.addresses[shards.tensor[row]]
        raise ValueError(f"expected addresses in the sections {', '.join(map(show, sections))}, found {show(address)}")
    return of_row


def _cut(rows: IntColumn, nbytes: IntColumn, max_blob_nbytes: int) -> Iterator[IntColumn]:
    """Cut rows, in order, into the fewest blobs; at least one, which may be empty."""
    while True:
        ends = lay_out(nbytes) + nbytes
        count = max(int(np.searchsorted(ends, max_blob_nbytes, "right")), 1)
        yield rows[:count]
        rows, nbytes = rows[count:], nbytes[count:]
        if not len(rows):
            return


def make_index(plans: Sequence[SavePlan], tensors: TensorTable) -> Index:
    """The index of all plans, over the logical tensors of all ranks: sorted by address, then offsets.

    A blob's number is its place in `order_blobs(plans)`. Tensors without elements get one row each, aliases none.
    """
    width = tensors.shapes.shape[1]
    parts = [_empty_rows(tensors)]
    numbers = {(blob.section, blob.rank, blob.k): number for number, blob in enumerate(order_blobs(plans))}
    for plan in plans:
        tensor = np.array([tensors.rows[address] for address in plan.shards.tensors.addresses], dtype=np.int64)
        for blob in plan.blobs:
            columns = tensor[plan.shards.tensor[blob.rows]], np.full(len(blob.rows), numbers[blob.section, blob.rank, blob.k])
            offsets, lengths = plan.shards.offsets[blob.rows], plan.shards.lengths[blob.rows]
            shape = pad_columns(offsets, width, fill=0), pad_columns(lengths, width, fill=1)
            parts.append(np.column_stack([*columns, np.arange(len(blob.rows)), *shape]))
    table = np.concatenate(parts)
    offsets = table[:, 3 : 3 + width]
    table = table[np.lexsort((*offsets.T[::-1], table[:, 0]))]
    shards = ShardTable(tensors, table[:, 0], table[:, 3 : 3 + width], table[:, 3 + width :])
    return Index(shards=shards, blob=table[:, 1], slot=table[:, 2])


def order_blobs(plans: Sequence[SavePlan]) -> tuple[BlobPlan, ...]:
    """All blobs as the manifest lists them: by section (in the order of the plans), rank, k."""
    blobs = [blob for plan in plans for blob in plan.blobs]
    sections = {name: number for number, name in enumerate(dict.fromkeys(blob.section for blob in blobs))}
    return tuple(sorted(blobs, key=lambda blob: (sections[blob.section], blob.rank, blob.k)))


def _empty_rows(tensors: TensorTable) -> IntColumn:
    """Rows (tensor, blob, slot, offsets, lengths) of the stored tensors that have no elements."""
    rows = np.flatnonzero((tensors.shapes == 0).any(axis=1) & (tensors.alias_of == NOT_AN_ALIAS))
    nowhere = np.full(len(rows), NO_BLOB)
    return np.column_stack([rows, nowhere, nowhere, np.zeros_like(tensors.shapes[rows]), tensors.shapes[rows]])
