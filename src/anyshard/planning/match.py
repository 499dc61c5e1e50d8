"""Matching: the overlaps of wanted and stored shards, and the wanted regions that no stored shard holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from anyshard.errors import CheckpointDamaged
from anyshard.records.addresses import show
from anyshard.records.dtypes import find_dtype
from anyshard.records.load_plan import BlobLayout, ReadItems, Uncovered
from anyshard.records.regions import difference, find_overlaps, overlap, volume
from anyshard.records.tables import NOT_AN_ALIAS, Index, IntColumn, ShardTable, TensorTable, expand_ranges, pad_columns


@dataclass(frozen=True, slots=True)
class Matches:
    """All overlaps of wanted and stored shards of equal address, as pairs of rows: of `shards`, and of the index."""

    shards: ShardTable
    index: Index
    wanted: IntColumn
    stored: IntColumn

    def list_blobs(self) -> list[int]:
        """The blobs that hold wanted bytes."""
        blobs: list[int] = np.unique(self.index.blob[self.stored]).tolist()
        return blobs


def match_shards(wanted: ShardTable, index: Index) -> Matches:
    """Find what is wanted in the index. An alias of the checkpoint counts as the tensor it is tied to."""
    stored = index.shards
    w_tensor = _find_stored(wanted, stored.tensors)
    # Only rows of tensors that both sides have are looked at: reading one tensor must not cost a look at all.
    w_rows = np.flatnonzero(w_tensor >= 0)
    s_rows = _rows_of(stored, np.unique(w_tensor[w_rows]))
    width = max(wanted.offsets.shape[1], stored.offsets.shape[1])
    w_offsets, w_lengths = _take(wanted, w_rows, width)
    s_offsets, s_lengths = _take(stored, s_rows, width)
    a, b = find_overlaps(
        np.column_stack([w_tensor[w_rows], w_offsets]),  # the tensor is the first dim
        np.insert(w_lengths, 0, 1, axis=1),
        np.column_stack([stored.tensor[s_rows], s_offsets]),
        np.insert(s_lengths, 0, 1, axis=1),
    )
    return Matches(wanted, index, w_rows[a], s_rows[b])


def locate(matches: Matches, layouts: Mapping[int, BlobLayout]) -> ReadItems:
    """Where the bytes of all overlaps are, ordered by blob, then position.

    Raises `CheckpointDamaged` if the index names a slot that `layouts` lacks or that has another length.
    """
    index, shards = matches.index, matches.index.shards
    width = max(matches.shards.offsets.shape[1], shards.offsets.shape[1])
    itemsize = _itemsizes(shards.tensors, shards.tensor[matches.stored])
    nbytes = volume(np.column_stack([shards.lengths[matches.stored], itemsize]))
    position = _find_positions(index, matches.stored, nbytes, layouts)
    order = np.lexsort((matches.wanted, position, index.blob[matches.stored]))
    wanted, stored = matches.wanted[order], matches.stored[order]
    w_offsets, w_lengths = _take(matches.shards, wanted, width)
    s_offsets, s_lengths = _take(shards, stored, width)
    offsets, lengths, _ = overlap(w_offsets, w_lengths, s_offsets, s_lengths)
    return ReadItems(
        wanted=wanted,
        stored=stored,
        blob=index.blob[stored],
        position=position[order],
        itemsize=itemsize[order],
        ndims=shards.tensors.ndims[shards.tensor[stored]].astype(np.int64),
        wanted_offsets=offsets - w_offsets,
        stored_offsets=offsets - s_offsets,
        stored_lengths=s_lengths,
        lengths=lengths,
    )


def _find_stored(wanted: ShardTable, stored: TensorTable) -> IntColumn:
    """For each wanted shard the row of the stored tensor that has its bytes, or -1."""
    used, number = np.unique(wanted.tensor, return_inverse=True)
    found = np.array([stored.rows.get(wanted.tensors.addresses[row], -1) for row in used.tolist()], dtype=np.int64)
    hit = np.flatnonzero(found >= 0)
    alias_of = stored.alias_of[found[hit]]
    found[hit] = np.where(alias_of == NOT_AN_ALIAS, found[hit], alias_of)
    return found[number]


def _rows_of(shards: ShardTable, tensors: IntColumn) -> IntColumn:
    """The rows of some tensors in a table that is ordered by tensor."""
    first, stop = np.searchsorted(shards.tensor, tensors, "left"), np.searchsorted(shards.tensor, tensors, "right")
    return expand_ranges(first, stop - first)[1]


def _take(shards: ShardTable, rows: IntColumn, width: int) -> tuple[IntColumn, IntColumn]:
    """Offsets and lengths of some rows, widened to `width` dims."""
    return pad_columns(shards.offsets[rows], width, fill=0), pad_columns(shards.lengths[rows], width, fill=1)


def _itemsizes(tensors: TensorTable, rows: IntColumn) -> IntColumn:
    """Bytes per element of some tensors. Only theirs: a tensor of an unknown dtype that is not wanted does no harm."""
    used, number = np.unique(rows, return_inverse=True)
    return np.array([find_dtype(tensors.dtypes[row]).itemsize for row in used.tolist()], dtype=np.int64)[number]


def _find_positions(index: Index, rows: IntColumn, nbytes: IntColumn, layouts: Mapping[int, BlobLayout]) -> IntColumn:
    """Byte positions of the extents of stored shards, whose lengths must be those of their slots."""
    blobs, number = np.unique(index.blob[rows], return_inverse=True)
    slot = index.slot[rows]
    position = np.full(len(rows), -1)
    for i, blob in enumerate(blobs.tolist()):
        layout = layouts.get(blob)
        if layout is not None:
            hit = np.flatnonzero((number == i) & (slot >= 0) & (slot < len(layout.position)))
            hit = hit[layout.nbytes[slot[hit]] == nbytes[hit]]
            position[hit] = layout.position[slot[hit]]
    for row in np.flatnonzero(position < 0)[:1]:
        address = show(index.shards.tensors.addresses[index.shards.tensor[rows[row]]])
        raise CheckpointDamaged(
            f"{address}: expected {nbytes[row]} bytes in slot {slot[row]} of blob {index.blob[rows[row]]}, "
            "found no such slot in the tail of that blob; load another checkpoint"
        )
    return position


def find_uncovered(wanted: ShardTable, items: ReadItems) -> tuple[Uncovered, ...]:
    """The wanted regions that no item fills. Raises `CheckpointDamaged` if two items fill the same elements of a wanted shard."""
    _check_disjoint(wanted, items)
    missing = volume(wanted.lengths)
    np.subtract.at(missing, items.wanted, volume(items.lengths))
    return tuple(region for row in np.flatnonzero(missing).tolist() for region in _uncovered_of(wanted, items, row))


def _check_disjoint(wanted: ShardTable, items: ReadItems) -> None:
    # Counting elements would not do: an overlap and a hole of equal volume hide each other.
    shared = np.flatnonzero(np.bincount(items.wanted, minlength=len(wanted))[items.wanted] > 1)
    if not len(shared):
        return
    offsets = np.column_stack([items.wanted, items.wanted_offsets])[shared]
    lengths = np.insert(items.lengths, 0, 1, axis=1)[shared]
    one, other = find_overlaps(offsets, lengths, offsets, lengths)
    for item in shared[one[one != other]][:1]:
        address = show(wanted.tensors.addresses[wanted.tensor[items.wanted[item]]])
        raise CheckpointDamaged(f"{address}: expected every element in one stored shard, found shards that overlap in the index")


def _uncovered_of(wanted: ShardTable, items: ReadItems, row: int) -> list[Uncovered]:
    own = np.flatnonzero(items.wanted == row)
    ndim = int(wanted.tensors.ndims[wanted.tensor[row]])
    low, length = wanted.offsets[row, :ndim], wanted.lengths[row, :ndim]
    left = zip(*difference(low, length, low + items.wanted_offsets[own, :ndim], items.lengths[own, :ndim]), strict=True)
    address = wanted.tensors.addresses[wanted.tensor[row]]
    return [Uncovered(row, address, tuple(offset.tolist()), tuple(lengths.tolist())) for offset, lengths in left]
