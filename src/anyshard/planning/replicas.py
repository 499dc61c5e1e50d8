"""Replicas: the distinct regions that all ranks hold, and for each of them its replica set, the ranks that hold it.

The elements of all tensors are put on one line, tensor after tensor in address order, so that one sort finds equal regions. Two
regions that begin at the same place and are not equal overlap, which is an error as a hole is: each element has exactly one
region, held by one or more ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anyshard.errors import InvalidAppState, LimitExceeded
from anyshard.planning.cover import check_cover
from anyshard.planning.unite import United, show_ranks
from anyshard.records.addresses import show
from anyshard.records.regions import MAX_COUNT, dense_strides, volume
from anyshard.records.tables import IntColumn, ShardTable, pad_columns
from anyshard.records.tiling import Flaw

NO_SET = -1
_SHOWN = 8  # holes and overlaps in a message


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
    _check_ties(united, held, order, ~is_first & (np.diff(held.table[order], prepend=-1) == 0))
    first = np.flatnonzero(is_first)
    chosen = order[first]
    _check_equal(united, held, order, chosen[np.cumsum(is_first) - 1])
    regions = ShardTable(united.tensors, held.tensor[chosen], held.offsets[chosen], held.lengths[chosen])
    table, bounds = held.table[order], np.append(first, len(order))
    replicas = Replicas(regions, bounds, table, held.row[order], _number_sets(bounds, table, len(united.tables)))
    _check_cover(united, replicas)
    return replicas


def _check_ties(united: United, held: _Holdings, order: IntColumn, is_again: NDArray[np.bool_]) -> None:
    """No rank holds one region twice: under two names that are one tensor on another rank. What to store would be a guess."""
    for place in np.flatnonzero(is_again)[:1].tolist():
        rows = order[[place - 1, place]]
        table = int(held.table[rows[0]])
        shards = united.tables[table].shards
        one, other = (show(shards.tensors.addresses[shards.tensor[row]]) for row in held.row[rows].tolist())
        ranks = show_ranks(united.ranks_of(held.table[rows[:1]]).tolist())
        raise InvalidAppState(
            f"{one} and {other}: expected them to be one tensor on all ranks that hold both, found two on {ranks} and one "
            "elsewhere. Nothing was written; tie them on all ranks or on none"
        )


def count_holders(united: United, replicas: Replicas) -> tuple[IntColumn, IntColumn]:
    """For each region how many ranks hold it, and the first of them."""
    if not len(replicas.regions):
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    _, first_rank, num_ranks = np.unique(united.table_of, return_index=True, return_counts=True)
    first = replicas.first[:-1]
    count: IntColumn = np.add.reduceat(num_ranks[replicas.table], first)
    rank: IntColumn = np.minimum.reduceat(first_rank[replicas.table], first)
    return count, rank


def number_rows(united: United, replicas: Replicas) -> tuple[tuple[IntColumn, ...], IntColumn]:
    """For each distinct table the replica set of each of its rows, and for each set how many ranks are in it.

    A row that no other rank holds, or without elements, is in set `NO_SET`; a set of one rank counts as 0.
    """
    num_ranks, _ = count_holders(united, replicas)
    num_holders = np.zeros(int(replicas.set_of.max(initial=-1)) + 1, dtype=np.int64)
    num_holders[replicas.set_of] = np.where(num_ranks > 1, num_ranks, 0)
    ends = np.cumsum([len(table.shards) for table in united.tables])
    sets = np.full(int(ends[-1]), NO_SET)
    begins = np.append(0, ends[:-1])
    of_region = np.where(num_ranks > 1, replicas.set_of, NO_SET)
    sets[begins[replicas.table] + replicas.row] = np.repeat(of_region, np.diff(replicas.first))
    return tuple(np.split(sets, ends[:-1])), num_holders


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
    flaws = [(united.tensors.rows[flaw.address], flaw.flaw) for flaw in check_cover(replicas.regions, limit=_SHOWN)]
    found = [(tensor, _describe(united, replicas, tensor, flaw)) for tensor, flaw in flaws]
    for tensor, text in found[:1]:
        raise _refusal(united, tensor, "; ".join([text, *(f"{_name(united, other)}: {text}" for other, text in found[1:])]))


def _describe(united: United, replicas: Replicas, tensor: int, flaw: Flaw) -> str:
    holders = [_show_region(replicas.regions, row, united.ranks_of(replicas.tables_of(row))) for row in flaw.rows]
    where = " and ".join(holders) or f"it is known to {_show_knowing(united, tensor)}"
    return f"{flaw.kind} at {flaw.offsets} of lengths {flaw.lengths} ({where})"


def _show(united: United, held: _Holdings, rows: Iterable[int]) -> str:
    regions = ShardTable(united.tensors, held.tensor, held.offsets, held.lengths)
    return " and ".join(_show_region(regions, row, united.ranks_of(held.table[row : row + 1])) for row in rows)


def _show_region(regions: ShardTable, row: int, ranks: IntColumn) -> str:
    offsets, lengths = regions.region(row)
    return f"{lengths} at {offsets} on {show_ranks(ranks.tolist())}"


def _show_knowing(united: United, tensor: int) -> str:
    held = [table for table, rows in enumerate(united.tensor_of) if (rows == tensor).any()]
    return show_ranks(united.ranks_of(np.array(held, dtype=np.int64)).tolist())


def _name(united: United, tensor: int) -> str:
    return f"{show(united.tensors.addresses[tensor])} {united.tensors.shape(tensor)}"


def _refusal(united: United, tensor: int, found: str) -> InvalidAppState:
    return InvalidAppState(
        f"{_name(united, tensor)}: expected regions that hold every element once, or the same region on several ranks, found "
        f"{found}. Nothing was written"
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
