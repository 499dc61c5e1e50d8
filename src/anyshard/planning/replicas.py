"""Replicas: the distinct regions that all ranks hold, and for each of them its replica set, the ranks that hold it.

The elements of all tensors are put on one line, tensor after tensor in address order, so that one sort finds equal regions. Two
regions that begin at the same place and are not equal overlap, which is an error as a hole is: each element has exactly one
region, held by one or more ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from anyshard.errors import InvalidAppState, LimitExceeded
from anyshard.planning.cover import check_cover
from anyshard.planning.unite import United, show_ranks
from anyshard.records.addresses import show
from anyshard.records.regions import MAX_COUNT, dense_strides, volume
from anyshard.records.tables import IntColumn, ShardTable, pad_columns


@dataclass(frozen=True, slots=True)
class Replicas:
    """Distinct regions in index order, and who holds them.

    Region g is row `row[i]` of table `table[i]` for i in [first[g], first[g + 1]), tables rising. Regions with equal `set_of`
    are held by the same ranks.
    """

    regions: ShardTable
    first: IntColumn
    table: IntColumn
    row: IntColumn
    set_of: IntColumn

    def tables_of(self, region: int) -> IntColumn:
        """The tables that have a region."""
        return self.table[self.first[region] : self.first[region + 1]]


@dataclass(frozen=True, slots=True)
class _Holdings:
    """All rows with elements of all distinct tables, end to end."""

    table: IntColumn
    row: IntColumn
    tensor: IntColumn
    offsets: IntColumn
    lengths: IntColumn


def find_replicas(united: United) -> Replicas:
    """The distinct regions of all ranks.

    Raises `InvalidAppState`, naming address, regions and ranks, unless they tile every tensor.
    """
    held = _collect(united)
    line = _find_places(united, held)
    order = np.argsort(line, kind="stable")  # holders of a region stay in the order of their tables
    line = line[order]
    is_first = np.diff(line, prepend=-1) != 0
    # A tie that only another rank sees makes one region out of two of this rank's: one of them is enough.
    is_again = ~is_first & (np.diff(held.table[order], prepend=-1) == 0)
    order, is_first = order[~is_again], is_first[~is_again]
    first = np.flatnonzero(is_first)
    chosen = order[first]
    _check_equal(united, held, order, chosen[np.cumsum(is_first) - 1])
    regions = ShardTable(united.tensors, held.tensor[chosen], held.offsets[chosen], held.lengths[chosen])
    table, bounds = held.table[order], np.append(first, len(order))
    replicas = Replicas(regions, bounds, table, held.row[order], _number_sets(bounds, table, len(united.tables)))
    _check_cover(united, replicas)
    return replicas


def _collect(united: United) -> _Holdings:
    width = united.tensors.shapes.shape[1]
    shards = [table.shards for table in united.tables]
    count = np.array([len(each) for each in shards], dtype=np.int64)
    nothing = np.zeros((0, width), dtype=np.int64)
    held = _Holdings(
        table=np.repeat(np.arange(len(shards)), count),
        row=np.concatenate([nothing[:, :0].reshape(0), *(np.arange(n) for n in count)]),
        tensor=np.concatenate([rows[each.tensor] for rows, each in zip(united.tensor_of, shards, strict=True)]),
        offsets=np.concatenate([nothing, *(pad_columns(each.offsets, width, fill=0) for each in shards)]),
        lengths=np.concatenate([nothing, *(pad_columns(each.lengths, width, fill=1) for each in shards)]),
    )
    is_full = (held.lengths > 0).all(axis=1)
    return held if is_full.all() else _Holdings(*(column[is_full] for column in _columns(held)))


def _columns(held: _Holdings) -> tuple[IntColumn, ...]:
    return held.table, held.row, held.tensor, held.offsets, held.lengths


def _find_places(united: United, held: _Holdings) -> IntColumn:
    """Where each region's first element is on the line of all tensors."""
    shapes, tensor = united.tensors.shapes, held.tensor
    bad = ((held.offsets < 0) | (held.lengths > shapes[tensor]) | (held.offsets > shapes[tensor] - held.lengths)).any(axis=1)
    for i in np.flatnonzero(bad)[:1]:
        raise _refusal(united, int(tensor[i]), f"a region outside of it, {_show(united, held, [int(i)])}")
    numel = volume(shapes)
    if numel.astype(np.float64).sum() >= MAX_COUNT / 16:  # 16: bytes of the longest dtype
        raise LimitExceeded("expected fewer than 2^58 elements in all tensors together")
    places: IntColumn = (np.cumsum(numel) - numel)[tensor] + (held.offsets * dense_strides(shapes)[tensor]).sum(axis=1)
    return places


def _check_equal(united: United, held: _Holdings, holders: IntColumn, firsts: IntColumn) -> None:
    """Each holder has the same region as the first one that begins where it does."""
    differs = (held.lengths[holders] != held.lengths[firsts]).any(axis=1)
    for i in np.flatnonzero(differs)[:1]:
        pair = [int(firsts[i]), int(holders[i])]
        raise _refusal(united, int(held.tensor[pair[0]]), f"regions that overlap, {_show(united, held, pair)}")


def _check_cover(united: United, replicas: Replicas) -> None:
    for flaw in check_cover(replicas.regions, limit=1):
        holders = [_show_region(replicas.regions, row, united.ranks_of(replicas.tables_of(row))) for row in flaw.flaw.rows]
        tensor = united.tensors.rows[flaw.address]
        raise _refusal(united, tensor, f"{flaw.flaw.kind} at {flaw.flaw.offsets} of lengths {flaw.flaw.lengths}", holders)


def _show(united: United, held: _Holdings, rows: Iterable[int]) -> str:
    regions = ShardTable(united.tensors, held.tensor, held.offsets, held.lengths)
    return " and ".join(_show_region(regions, row, united.ranks_of(held.table[row : row + 1])) for row in rows)


def _show_region(regions: ShardTable, row: int, ranks: IntColumn) -> str:
    offsets, lengths = regions.region(row)
    return f"{lengths} at {offsets} on {show_ranks(ranks.tolist())}"


def _refusal(united: United, tensor: int, found: str, holders: Iterable[str] = ()) -> InvalidAppState:
    held = [table for table, rows in enumerate(united.tensor_of) if (rows == tensor).any()]
    ranks = united.ranks_of(np.array(held, dtype=np.int64)).tolist()
    where = " and ".join(holders) or f"it is known to {show_ranks(ranks)}"
    tensors = united.tensors
    return InvalidAppState(
        f"{show(tensors.addresses[tensor])} {tensors.shape(tensor)}: expected regions that hold every element once, or the same "
        f"region on several ranks, found {found} ({where}). Nothing was written"
    )


def _number_sets(first: IntColumn, table: IntColumn, num_tables: int) -> IntColumn:
    """A number per region: equal if and only if the regions are held by the same tables. Exact: holder by holder."""
    count = np.diff(first)
    numbers = np.zeros(len(count), dtype=np.int64)
    num_sets = 0
    for size in np.unique(count).tolist():
        regions = np.flatnonzero(count == size)
        label = table[first[regions]]
        for i in range(1, size):
            _, label = np.unique(label * num_tables + table[first[regions] + i], return_inverse=True)
        numbers[regions] = num_sets + label
        num_sets += int(label.max()) + 1
    return numbers
