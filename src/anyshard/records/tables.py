"""Shard tables and plans: columns, not objects.

A `TensorTable` describes logical tensors, a `ShardTable` regions of them, an `Index` says in which blob and slot each
stored region lies, a `SavePlan` which rows go where. All are NumPy columns; rows are never objects. No I/O here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

IntColumn: TypeAlias = NDArray[np.int64]

NO_BLOB = -1
NOT_AN_ALIAS = -1


@dataclass(frozen=True)  # without slots, so that a property can be kept
class TensorTable:
    """Logical tensors in the order of their address bytes; row t is tensor t.

    `shapes` has one column per dim up to the largest `ndims`; columns at and beyond a tensor's own ndim hold 1.
    `alias_of[t]` is the row of the stored tensor that t is tied to, or `NOT_AN_ALIAS`.
    """

    addresses: tuple[str, ...]
    dtypes: tuple[str, ...]
    ndims: NDArray[np.int8]
    shapes: IntColumn
    alias_of: IntColumn

    def __len__(self) -> int:
        return len(self.addresses)

    @cached_property
    def rows(self) -> Mapping[str, int]:
        """The row of each address; made when it is first asked for, then kept."""
        return MappingProxyType({address: row for row, address in enumerate(self.addresses)})

    def shape(self, tensor: int) -> tuple[int, ...]:
        """Global shape of one logical tensor."""
        return tuple(int(n) for n in self.shapes[tensor, : self.ndims[tensor]])


@dataclass(frozen=True, slots=True)
class ShardTable:
    """Regions of logical tensors: shard i is the box `offsets[i]`, `lengths[i]` of tensor `tensor[i]`.

    Columns beyond a tensor's ndim hold offset 0 and length 1, so that products over a row are right for all. Rows are
    ordered by tensor, then offsets. An alias has no row; a tensor with zero elements has one row (offsets 0, lengths = shape).
    """

    tensors: TensorTable
    tensor: IntColumn
    offsets: IntColumn
    lengths: IntColumn

    def __len__(self) -> int:
        return len(self.tensor)

    def region(self, row: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offsets and lengths of one shard, cut to the tensor's ndim."""
        ndim = int(self.tensors.ndims[self.tensor[row]])
        return tuple(map(int, self.offsets[row, :ndim])), tuple(map(int, self.lengths[row, :ndim]))


@dataclass(frozen=True, slots=True)
class Index:
    """What is where: for each row of `shards` the blob (position in the manifest's list) and the slot within it.

    Rows without elements have `NO_BLOB` in both columns.
    """

    shards: ShardTable
    blob: IntColumn
    slot: IntColumn

    @property
    def num_rows(self) -> int:
        """Rows of the stored table: one per shard and one per alias."""
        return len(self.shards) + int((self.shards.tensors.alias_of != NOT_AN_ALIAS).sum())


@dataclass(frozen=True, slots=True)
class BlobPlan:
    """One blob to write: the rows of the shard table that become its slots, in slot order.

    Blob k = 0 of a section has one slot more, the last: the rank's values.
    """

    section: str
    rank: int
    k: int
    rows: IntColumn


@dataclass(frozen=True, slots=True)
class SavePlan:
    """All blobs that one rank writes, ordered by (section, k), over the rank's own shard table."""

    shards: ShardTable
    blobs: tuple[BlobPlan, ...]


def make_tensor_table(
    addresses: Sequence[str], dtypes: Sequence[str], shapes: Sequence[tuple[int, ...]], aliases: dict[str, str]
) -> TensorTable:
    """Sort logical tensors by address bytes and put them in columns. `aliases` maps an address to the stored one."""
    order = sorted(range(len(addresses)), key=lambda i: addresses[i].encode())
    rows = {addresses[i]: row for row, i in enumerate(order)}
    width = max((len(shapes[i]) for i in order), default=0)
    padded = np.ones((len(order), width), dtype=np.int64)
    for row, i in enumerate(order):
        padded[row, : len(shapes[i])] = shapes[i]
    return TensorTable(
        addresses=tuple(addresses[i] for i in order),
        dtypes=tuple(dtypes[i] for i in order),
        ndims=np.array([len(shapes[i]) for i in order], dtype=np.int8),
        shapes=padded,
        alias_of=np.array([rows[aliases[a]] if (a := addresses[i]) in aliases else NOT_AN_ALIAS for i in order], dtype=np.int64),
    )


def whole_shards(tensors: TensorTable) -> ShardTable:
    """One shard per stored logical tensor, the whole of it (what a single process holds)."""
    rows = np.flatnonzero(tensors.alias_of == NOT_AN_ALIAS)
    lengths = tensors.shapes[rows]
    return ShardTable(tensors=tensors, tensor=rows, offsets=np.zeros_like(lengths), lengths=lengths)


def expand_ranges(first: IntColumn, count: IntColumn) -> tuple[IntColumn, IntColumn]:
    """The numbers of all ranges [first, first + count) end to end, each with the row of the range that it is from."""
    owner = np.repeat(np.arange(len(first)), count)
    begins = np.cumsum(count) - count
    return owner, np.arange(len(owner)) - begins[owner] + first[owner]


def pad_columns(columns: IntColumn, width: int, *, fill: int) -> IntColumn:
    """Columns of dims widened to `width`: `fill` is 0 for offsets, 1 for lengths and shapes."""
    if columns.shape[1] == width:
        return columns
    return np.pad(columns, ((0, 0), (0, width - columns.shape[1])), constant_values=fill)


def one_shard(tensors: TensorTable, tensor: int, offsets: Sequence[int], lengths: Sequence[int]) -> ShardTable:
    """The table of a single region of one logical tensor."""
    columns = np.zeros((1, tensors.shapes.shape[1]), dtype=np.int64), np.ones((1, tensors.shapes.shape[1]), dtype=np.int64)
    for column, values in zip(columns, (offsets, lengths), strict=True):
        column[0, : len(values)] = values
    return ShardTable(tensors, np.array([tensor], dtype=np.int64), *columns)
