"""Uniting: the tables of all ranks become one table of logical tensors, on which all of them must agree.

Ranks that hold the same (their tables are one object, as `decode_tables` makes them) are looked at once: planning then costs what
differs between ranks, not how many there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anyshard.errors import InvalidAppState
from anyshard.records.addresses import show
from anyshard.records.rank_table import RankTable
from anyshard.records.regions import volume
from anyshard.records.tables import NOT_AN_ALIAS, IntColumn, TensorTable, expand_ranges, pad_columns

_SHOWN = 8  # addresses, and ranks of each side


@dataclass(frozen=True, slots=True)
class United:
    """All logical tensors of a process group, and who is in it.

    `tables` are the distinct tables; rank r holds `tables[table_of[r]]`. `tensor_of[t]` has for each tensor of table t the row
    of the stored tensor in `tensors`. `sections` are those of the coordinator, then what others add.
    """

    tensors: TensorTable
    is_buffer: NDArray[np.bool_]
    sections: tuple[str, ...]
    tables: tuple[RankTable, ...]
    table_of: IntColumn
    tensor_of: tuple[IntColumn, ...]

    @property
    def num_ranks(self) -> int:
        """Ranks of the process group."""
        return len(self.table_of)

    def ranks_of(self, tables: IntColumn) -> IntColumn:
        """The ranks that hold one of `tables`, in rising order."""
        order = np.argsort(self.table_of, kind="stable")
        first = np.searchsorted(self.table_of[order], tables, "left")
        count = np.searchsorted(self.table_of[order], tables, "right") - first
        return np.sort(order[expand_ranges(first, count)[1]])


def unite(tables: Sequence[RankTable]) -> United:
    """One table of all logical tensors, ties of all ranks joined. `tables[r]` is what rank r of the process group holds.

    Tied tensors are stored under the smallest of their addresses on any rank. Raises `InvalidAppState`, naming address, ranks
    and both sides, where ranks differ in the dtype or shape of a tensor.
    """
    distinct = tuple({id(table): table for table in tables}.values())
    number = {id(table): i for i, table in enumerate(distinct)}
    table_of = np.array([number[id(table)] for table in tables], dtype=np.int64)
    vocabularies = {id(table.shards.tensors): table.shards.tensors for table in distinct}
    # Code points sort as UTF-8 bytes do.
    addresses = tuple(sorted(set[str]().union(*(tensors.addresses for tensors in vocabularies.values()))))
    row_of = {address: row for row, address in enumerate(addresses)}
    rows = {
        key: np.array([row_of[address] for address in tensors.addresses], dtype=np.int64) for key, tensors in vocabularies.items()
    }
    tensors = _join_tensors(addresses, vocabularies, rows, tables)
    root = _join_ties(len(addresses), vocabularies, rows)
    tensors = TensorTable(addresses, tensors.dtypes, tensors.ndims, tensors.shapes, _alias_of(root))
    _check_ties(tensors)
    stored = {key: root[row] for key, row in rows.items()}
    tensor_of = tuple(stored[id(table.shards.tensors)] for table in distinct)
    is_buffer = np.zeros(len(addresses), dtype=np.bool_)
    for table, tensor in zip(distinct, tensor_of, strict=True):
        is_buffer[tensor[table.is_buffer]] = True
    sections = tuple(dict.fromkeys(name for table in distinct for name in table.sections))
    return United(tensors, is_buffer, sections, distinct, table_of, tensor_of)


def _join_tensors(
    addresses: tuple[str, ...],
    vocabularies: Mapping[int, TensorTable],
    rows: Mapping[int, IntColumn],
    tables: Sequence[RankTable],
) -> TensorTable:
    """Dtype and shape of each address from the first table that has it; all others must agree."""
    width = max((tensors.shapes.shape[1] for tensors in vocabularies.values()), default=0)
    codes = {name: code for code, name in enumerate(dict.fromkeys(d for v in vocabularies.values() for d in v.dtypes))}
    # One row per tensor: code of the dtype, ndim, shape.
    spec = np.full((len(addresses), 2 + width), -1, dtype=np.int64)
    differs = np.zeros(len(addresses), dtype=np.bool_)
    for key, tensors in vocabularies.items():
        code = np.array([codes[dtype] for dtype in tensors.dtypes], dtype=np.int64)
        own = np.column_stack([code, tensors.ndims.astype(np.int64), pad_columns(tensors.shapes, width, fill=1)])
        row = rows[key]
        is_new = spec[row, 1] < 0
        spec[row[is_new]] = own[is_new]
        differs[row[(spec[row] != own).any(axis=1)]] = True
    if differs.any():
        raise _disagreement([addresses[row] for row in np.flatnonzero(differs)], tables)
    names = tuple(codes)
    dtypes = tuple(names[code] for code in spec[:, 0].tolist())
    no_ties = np.full(len(addresses), NOT_AN_ALIAS)
    return TensorTable(addresses, dtypes, spec[:, 1].astype(np.int8), np.ascontiguousarray(spec[:, 2:]), no_ties)


def _disagreement(addresses: list[str], tables: Sequence[RankTable]) -> InvalidAppState:
    lines = []
    for address in addresses[:_SHOWN]:
        sides: dict[str, list[int]] = {}
        for rank, table in enumerate(tables):
            tensors = table.shards.tensors
            if (row := tensors.rows.get(address)) is not None:
                sides.setdefault(f"{tensors.dtypes[row]} {tensors.shape(row)}", []).append(rank)
        lines.append(f"{show(address)}: " + ", ".join(f"{side} on {show_ranks(ranks)}" for side, ranks in sides.items()))
    more = f"; and {len(addresses) - _SHOWN} more" if len(addresses) > _SHOWN else ""
    return InvalidAppState(
        f"expected equal dtype and global shape of each address on all ranks, found {'; '.join(lines)}{more}. "
        "Nothing was written; give tensors that are not the same one different names"
    )


def show_ranks(ranks: Sequence[int]) -> str:
    """Ranks for a message, a few of them."""
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _join_ties(count: int, vocabularies: Mapping[int, TensorTable], rows: Mapping[int, IntColumn]) -> IntColumn:
    """For each address the smallest one that it is tied to, whichever rank says so, or itself."""
    pairs = {
        (int(rows[key][alias]), int(rows[key][tensors.alias_of[alias]]))
        for key, tensors in vocabularies.items()
        for alias in np.flatnonzero(tensors.alias_of != NOT_AN_ALIAS)
    }
    ties = np.array(sorted(pairs), dtype=np.int64).reshape(len(pairs), 2)
    root = np.arange(count)
    while (root[ties[:, 0]] != root[ties[:, 1]]).any():
        smallest = root[ties].min(axis=1)
        np.minimum.at(root, ties[:, 0], smallest)
        np.minimum.at(root, ties[:, 1], smallest)
    return root


def _alias_of(root: IntColumn) -> IntColumn:
    return np.where(root == np.arange(len(root)), NOT_AN_ALIAS, root)


def _check_ties(tensors: TensorTable) -> None:
    """Tied tensors have the same dtype and shape; no count of bytes is so large that sums could wrap."""
    volume(tensors.shapes)
    for alias in np.flatnonzero(tensors.alias_of != NOT_AN_ALIAS).tolist():
        stored = int(tensors.alias_of[alias])
        ours, theirs = ((tensors.dtypes[row], tensors.shape(row)) for row in (alias, stored))
        if ours != theirs:
            raise InvalidAppState(
                f"expected tied tensors of equal dtype and shape, found {show(tensors.addresses[alias])} {ours} "
                f"and {show(tensors.addresses[stored])} {theirs}. Nothing was written"
            )
