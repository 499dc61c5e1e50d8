"""The slots of a blob that is about to be written: everything its tail says, but the digests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anyshard.records.digests import cell_digests
from anyshard.records.dtypes import find_dtype
from anyshard.records.footer import HEAD_NBYTES
from anyshard.records.layout import SMALL_ALIGNMENT, align_up, lay_out, place_after
from anyshard.records.slot_table import BlobIdentity, PackedSlots, SlotColumns, SlotTable
from anyshard.records.tables import BlobPlan, IntColumn, ShardTable, TensorTable
from anyshard.records.tail import CELL_NBYTES, VALUES_DTYPE, join_tail, measure_blob


@dataclass(frozen=True, slots=True)
class BlobSlots:
    """What follows of a blob from the plan alone, the same in every save: made once, kept with the plan.

    `position` and `nbytes` say where the extents of `rows` lie; `end` is where the last one ends (without any: the head does).
    """

    rows: IntColumn
    position: IntColumn
    nbytes: IntColumn
    end: int
    table: SlotTable
    has_values: bool

    def describe(self, identity: BlobIdentity, *, values_nbytes: int | None) -> BlobFrame:
        """What is around the extents in one save. `values_nbytes` is the length of the values slot (None: there is none)."""
        if (values_nbytes is not None) != self.has_values:
            raise ValueError(f"expected values for blob 0 of a section and for no other, found {values_nbytes} bytes")
        if values_nbytes is None:
            last, end = None, self.end
        else:
            last = place_after(self.end, values_nbytes), values_nbytes
            end = sum(last)
        return BlobFrame(self.table.pack(identity, last=last), values=last, tail_position=align_up(end, SMALL_ALIGNMENT))


class BlobFrame:
    """What one save writes around the extents of a blob: where the values lie, and the tail, whose cell digests it collects."""

    def __init__(self, slots: PackedSlots, *, values: tuple[int, int] | None, tail_position: int) -> None:
        self.values_position = values[0] if values else tail_position
        self.tail_position = tail_position
        self._slots = slots
        self._cells: NDArray[np.uint64] = np.zeros(-(-tail_position // CELL_NBYTES), dtype=np.uint64)

    @property
    def blob_nbytes(self) -> int:
        """Length of the whole blob, known before any digest is."""
        return measure_blob(self._slots, num_cells=len(self._cells), tail_position=self.tail_position)

    def digest(self, piece: memoryview, position: int) -> None:
        """Note the digests of the cells in `piece`, which begins at `position` of the blob. For several threads at once."""
        digests = cell_digests(piece, CELL_NBYTES)
        first = position // CELL_NBYTES
        self._cells[first : first + len(digests)] = digests

    def encode_tail(self) -> bytes:
        """All bytes from `tail_position` to the end of the blob, once all cells are digested."""
        return join_tail(self._slots, self._cells, cell_nbytes=CELL_NBYTES, tail_position=self.tail_position)


def tabulate_slots(shards: ShardTable, plan: BlobPlan) -> BlobSlots:
    """The slots of one blob of a plan, with one for the values if it is the first of its section."""
    tensors, rows, has_values = shards.tensors, plan.rows, plan.k == 0
    chosen = shards.tensor[rows]
    addresses, dtypes = (tuple(map(column.__getitem__, chosen.tolist())) for column in (tensors.addresses, tensors.dtypes))
    sizes = {dtype: find_dtype(dtype).itemsize for dtype in set(dtypes)}
    itemsizes = np.array([sizes[dtype] for dtype in dtypes], dtype=np.int64)
    nbytes = shards.lengths[rows].prod(axis=1) * itemsizes
    position = lay_out(nbytes)
    columns = SlotColumns(
        position=position,
        nbytes=nbytes,
        addresses=addresses,
        dtypes=dtypes,
        ndims=tensors.ndims[chosen],
        shapes=tensors.shapes[chosen],
        offsets=shards.offsets[rows],
        lengths=shards.lengths[rows],
    )
    return BlobSlots(
        rows=rows,
        position=position,
        nbytes=nbytes,
        end=int(position[-1] + nbytes[-1]) if len(rows) else HEAD_NBYTES,
        table=SlotTable(_add_values(columns, plan.section) if has_values else columns, _list_ties(tensors, chosen)),
        has_values=has_values,
    )


def _add_values(columns: SlotColumns, section: str) -> SlotColumns:
    """The slots with one more for the values, whose position and length only a save knows."""
    return SlotColumns(
        position=np.append(columns.position, 0),
        nbytes=np.append(columns.nbytes, 0),
        addresses=(*columns.addresses, section),
        dtypes=(*columns.dtypes, VALUES_DTYPE),
        ndims=np.append(columns.ndims, columns.ndims.dtype.type(0)),
        shapes=_append_row(columns.shapes, 1),
        offsets=_append_row(columns.offsets, 0),
        lengths=_append_row(columns.lengths, 1),
    )


def _append_row(column: IntColumn, value: int) -> IntColumn:
    return np.append(column, np.full((1, column.shape[1]), value, dtype=np.int64), axis=0)


def _list_ties(tensors: TensorTable, stored: IntColumn) -> Mapping[str, tuple[str, ...]]:
    """For each tensor stored in this blob the addresses that are tied to it."""
    ties: dict[str, list[str]] = {}
    for alias in np.flatnonzero(np.isin(tensors.alias_of, stored)).tolist():
        ties.setdefault(tensors.addresses[tensors.alias_of[alias]], []).append(tensors.addresses[alias])
    return {address: tuple(also) for address, also in ties.items()}
