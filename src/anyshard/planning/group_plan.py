"""The plan of a process group: who writes what into which blob and slot, and the index of it.

Everything is columns over all ranks, in index order; the plan of one rank is cut out when it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from anyshard.planning.pack import plan_save
from anyshard.planning.rank_plan import RankPlan, take_rows
from anyshard.planning.replicas import Replicas, find_replicas, number_rows
from anyshard.planning.share import Pieces, measure_rows, share
from anyshard.planning.unite import United, unite
from anyshard.records.addresses import section_of
from anyshard.records.rank_table import RankTable
from anyshard.records.regions import dense_strides
from anyshard.records.tables import NO_BLOB, NOT_AN_ALIAS, BlobPlan, Index, IntColumn, SavePlan, ShardTable, TensorTable
from anyshard.records.tail import HEAD_NBYTES, LARGE_ALIGNMENT

NO_RANK = -1


@dataclass(frozen=True, slots=True)
class Blobs:
    """All blobs of a group in the manifest's order (section, rank, k), a row each. `section` counts the group's sections."""

    section: IntColumn
    rank: IntColumn
    k: IntColumn

    def __len__(self) -> int:
        return len(self.rank)


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """What all ranks of a group write.

    Row i of `index` is written by `rank[i]`: `nbytes[i]` bytes from `start[i]` on of row `local_row[i]` of that rank's table.
    Rows without elements have `NO_RANK`. `num_holders` has for each replica set how many ranks hold it, 0 if only one does.
    """

    united: United
    index: Index
    blobs: Blobs
    rank: IntColumn
    local_row: IntColumn
    start: IntColumn
    nbytes: IntColumn
    num_holders: IntColumn
    replica_set: tuple[IntColumn, ...]  # per distinct table

    @property
    def sections(self) -> tuple[str, ...]:
        """The sections of all ranks, those of the coordinator first."""
        return self.united.sections

    @property
    def num_ranks(self) -> int:
        """Ranks of the process group."""
        return self.united.num_ranks

    @property
    def tensors(self) -> TensorTable:
        """All logical tensors."""
        return self.index.shards.tensors

    def count_bytes(self) -> IntColumn:
        """Bytes that each rank writes, without values and padding."""
        loads = np.zeros(self.num_ranks, dtype=np.int64)
        np.add.at(loads, self.rank[self.rank != NO_RANK], self.nbytes[self.rank != NO_RANK])
        return loads

    def replica_sets(self, rank: int) -> IntColumn:
        """For each row of a rank's own table the number of its replica set, or `NO_SET` if nobody else holds it.

        Two rows on any ranks have the same number exactly if the same ranks hold them.
        """
        return self.replica_set[int(self.united.table_of[rank])]

    def split(self) -> tuple[RankPlan, ...]:
        """The plan of each rank, in rank order."""
        order = np.lexsort((self.index.slot, self.index.blob, self.rank))
        rows = np.split(order, np.searchsorted(self.rank[order], np.arange(self.num_ranks)))[1:]
        by_rank = np.argsort(self.blobs.rank, kind="stable")
        blobs = np.split(by_rank, np.searchsorted(self.blobs.rank[by_rank], np.arange(self.num_ranks)))[1:]
        held = [self._rename(table) for table in range(len(self.united.tables))]
        return tuple(
            self._cut_out(*own, replica_set=self.replica_set[table], held=held[table])
            for *own, table in zip(rows, blobs, self.united.table_of.tolist(), strict=True)
        )

    def _rename(self, table: int) -> RankTable:
        """A distinct table under the group's names."""
        own, tensor_of = self.united.tables[table], self.united.tensor_of[table]
        shards = ShardTable(self.tensors, tensor_of[own.shards.tensor], own.shards.offsets, own.shards.lengths)
        return RankTable(shards, own.sections, self.united.is_buffer)

    def _cut_out(self, rows: IntColumn, blobs: IntColumn, *, replica_set: IntColumn, held: RankTable) -> RankPlan:
        own = _take(self.index.shards, rows)
        bounds = np.searchsorted(self.index.blob[rows], np.append(blobs, len(self.blobs)))
        plans = tuple(self._blob_plan(blob, np.arange(bounds[i], bounds[i + 1])) for i, blob in enumerate(blobs.tolist()))
        columns = self.local_row[rows], self.start[rows], self.nbytes[rows]
        return RankPlan(SavePlan(own, plans), *columns, replica_set=replica_set, held=held)

    def _blob_plan(self, blob: int, rows: IntColumn) -> BlobPlan:
        return BlobPlan(self.sections[self.blobs.section[blob]], int(self.blobs.rank[blob]), int(self.blobs.k[blob]), rows)


def plan_group(tables: Sequence[RankTable], *, max_blob_nbytes: int) -> GroupPlan:
    """Plan the save of a whole process group: each element is written once, and ranks write equally much.

    `tables[r]` is what rank r holds; rank 0 is the coordinator. The plan depends on nothing else, so whoever makes it gets the
    same. Each rank has a blob 0 in each of its sections, the coordinator in all. Raises `InvalidAppState` if the ranks do not
    fit together: other dtypes or shapes under one address, regions that overlap or leave holes.
    """
    united = unite(tables)
    replicas = find_replicas(united)
    rows = _list_rows(united, replicas)
    section = _number_sections(united)
    full = np.flatnonzero(rows.rank != NO_RANK)
    places = _Places(united, section[rows.shards.tensor[full]], rows.rank[full])
    places.fill(_take(rows.shards, full), rows.nbytes[full], max_blob_nbytes)
    blobs, number = places.list_blobs()
    blob, slot = np.full(len(rows.rank), NO_BLOB), np.full(len(rows.rank), NO_BLOB)
    blob[full], slot[full] = number, places.slot
    index = Index(rows.shards, blob, slot)
    replica_set, num_holders = number_rows(united, replicas)
    columns = rows.rank, rows.local_row, rows.start, rows.nbytes
    return GroupPlan(united, index, blobs, *columns, num_holders=num_holders, replica_set=replica_set)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of the index, in order, and who writes them from what; see `GroupPlan`."""

    shards: ShardTable
    rank: IntColumn
    local_row: IntColumn
    start: IntColumn
    nbytes: IntColumn


def _list_rows(united: United, replicas: Replicas) -> _Rows:
    """A row for each piece of a region that is written, and for each tensor without elements."""
    pieces = share(united, replicas)
    geometry = measure_rows(replicas.regions)
    row_nbytes = geometry.row_nbytes[pieces.region]
    shards = _take(replicas.regions, pieces.region)
    shards = take_rows(shards, geometry.dim[pieces.region], start=pieces.start, count=pieces.count)
    empty = _whole(united.tensors, _find_empty(united.tensors))
    tensor = np.concatenate([shards.tensor, empty.tensor])
    offsets = np.concatenate([shards.offsets, empty.offsets])
    # Pieces of regions that lie side by side come one after the other by their offsets, as all rows of an index do.
    order = np.lexsort(((offsets * dense_strides(united.tensors.shapes)[tensor]).sum(axis=1), tensor))
    lengths = np.concatenate([shards.lengths, empty.lengths])
    none = np.full(len(empty), -1)
    columns = (
        (pieces.rank, none),
        (_find_local_rows(united, replicas, pieces), none),
        (pieces.start * row_nbytes, none + 1),
        (pieces.count * row_nbytes, none + 1),
    )
    shards = ShardTable(united.tensors, tensor[order], offsets[order], lengths[order])
    return _Rows(shards, *(np.concatenate(pair)[order] for pair in columns))


def _take(shards: ShardTable, rows: IntColumn) -> ShardTable:
    return ShardTable(shards.tensors, shards.tensor[rows], shards.offsets[rows], shards.lengths[rows])


def _whole(tensors: TensorTable, rows: IntColumn) -> ShardTable:
    return ShardTable(tensors, rows, np.zeros_like(tensors.shapes[rows]), tensors.shapes[rows])


def _find_empty(tensors: TensorTable) -> IntColumn:
    """The stored tensors without elements."""
    return np.flatnonzero((tensors.shapes == 0).any(axis=1) & (tensors.alias_of == NOT_AN_ALIAS))


def _find_local_rows(united: United, replicas: Replicas, pieces: Pieces) -> IntColumn:
    """For each piece the row of its region in the table of the rank that writes it."""
    num_tables = len(united.tables)
    held = np.repeat(np.arange(len(replicas.regions)), np.diff(replicas.first)) * num_tables + replicas.table
    return replicas.row[np.searchsorted(held, pieces.region * num_tables + united.table_of[pieces.rank])]


def _number_sections(united: United) -> IntColumn:
    """For each tensor the number of its section."""
    numbers = {name: number for number, name in enumerate(united.sections)}
    return np.array([numbers[section_of(address)] for address in united.tensors.addresses], dtype=np.int64)


class _Places:
    """Blob k and slot of every piece, one group of pieces after the other: those of one section and rank."""

    def __init__(self, united: United, section: IntColumn, rank: IntColumn) -> None:
        self._united = united
        self._group = section * united.num_ranks + rank
        self._k, self.slot = np.zeros_like(rank), np.zeros_like(rank)

    def fill(self, shards: ShardTable, nbytes: IntColumn, max_blob_nbytes: int) -> None:
        """Put each group into one blob, or into several if it could be longer than a blob may be."""
        order = np.argsort(self._group, kind="stable")
        groups, first, count = np.unique(self._group[order], return_index=True, return_counts=True)
        self.slot[order] = np.arange(len(order)) - np.repeat(first, count)
        most = np.zeros(len(groups), dtype=np.int64)
        np.add.at(most, np.repeat(np.arange(len(groups)), count), nbytes[order] + LARGE_ALIGNMENT)
        for i in np.flatnonzero(most + HEAD_NBYTES > max_blob_nbytes).tolist():
            name = self._united.sections[groups[i] // self._united.num_ranks]
            self._cut(shards, order[first[i] : first[i] + count[i]], name, max_blob_nbytes)

    def _cut(self, shards: ShardTable, rows: IntColumn, section: str, max_blob_nbytes: int) -> None:
        for blob in plan_save(_take(shards, rows), (section,), rank=0, max_blob_nbytes=max_blob_nbytes).blobs:
            self._k[rows[blob.rows]] = blob.k
            self.slot[rows[blob.rows]] = np.arange(len(blob.rows))

    def list_blobs(self) -> tuple[Blobs, IntColumn]:
        """All blobs, and the number of the one that each piece lies in."""
        num_ranks = self._united.num_ranks
        num_blobs = self._list_needed().astype(np.int64).reshape(-1)
        np.maximum.at(num_blobs, self._group, self._k + 1)
        first = np.cumsum(num_blobs) - num_blobs
        group = np.repeat(np.arange(len(num_blobs)), num_blobs)
        k = np.arange(len(group)) - first[group]
        return Blobs(group // num_ranks, group % num_ranks, k), first[self._group] + self._k

    def _list_needed(self) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
        """Whether (section, rank) needs a blob for values: a rank in its own sections, the coordinator in all."""
        united = self._united
        has = np.array([[name in table.sections for table in united.tables] for name in united.sections], dtype=np.bool_)
        needed = has.reshape(len(united.sections), len(united.tables))[:, united.table_of]
        needed[:, 0] = True
        return needed
