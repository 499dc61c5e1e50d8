"""The load plan: which bytes of which blobs to read, and where each of them goes. Columns; no I/O, no tensors.

Three tables, each pointing into the one before. An *item* is the overlap of one wanted and one stored shard. A *read* is a byte
range of one blob that begins and ends on cell borders. A *piece* is the part of one item that lies in one read.

The engine runs it like this, reads in any order:

    for read in range(len(plan.reads)):
        fill a block with [start, stop) of the blob, verify its cells, and for each piece of the read:
            dense (wanted_position >= 0) and memory() is there: copy `nbytes` at `position` to `wanted_position`
            else: for each step of plan.place_steps(piece): destination.place(step.where, bits of step)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np

from anyshard.errors import LimitExceeded
from anyshard.records.handles import Slices
from anyshard.records.regions import decompose_run
from anyshard.records.tables import IntColumn
from anyshard.records.tail import Tail

NOT_DENSE = -1


@dataclass(frozen=True, slots=True)
class BlobLayout:
    """Where the slots of one blob lie: what planning needs of a tail."""

    cell_nbytes: int
    tail_position: int
    position: IntColumn
    nbytes: IntColumn

    @classmethod
    def of(cls, tail: Tail) -> Self:
        """The layout that a tail describes."""
        return cls(tail.cell_nbytes, tail.tail_position, tail.position, tail.nbytes)


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """How reads are cut and coalesced.

    No read is longer than `block_nbytes`. Reads with up to `max_gap_nbytes` of unwanted whole cells between them become one, so
    bytes read <= bytes of cells that hold wanted bytes x (1 + max_gap_nbytes / cell_nbytes).
    """

    block_nbytes: int
    max_gap_nbytes: int

    def __post_init__(self) -> None:
        # Below a block, so that no read is all gap.
        if not 0 <= self.max_gap_nbytes < self.block_nbytes:
            raise LimitExceeded(f"max_gap_nbytes must be >= 0 and below block_nbytes, found {self}")


@dataclass(frozen=True, slots=True)
class ReadItems:
    """Overlaps of wanted and stored shards, one per row; item i copies `lengths[i]` elements per dim.

    `wanted`, `stored`: rows of the wanted shard table and of the index. `blob`, `position`: where the stored shard's first byte
    is. `wanted_offsets`, `stored_offsets`: where the overlap begins, relative to each shard. `stored_lengths`: the stored
    shard's own lengths. Columns at and beyond `ndims[i]` hold offset 0 and length 1.
    """

    wanted: IntColumn
    stored: IntColumn
    blob: IntColumn
    position: IntColumn
    itemsize: IntColumn
    ndims: IntColumn
    wanted_offsets: IntColumn
    stored_offsets: IntColumn
    stored_lengths: IntColumn
    lengths: IntColumn

    def __len__(self) -> int:
        return len(self.wanted)


@dataclass(frozen=True, slots=True)
class Reads:
    """Byte ranges [start, stop) of blobs, disjoint, ordered by blob, then start.

    `start` is a multiple of the blob's cell size; `stop` too, or it is the tail's position. The pieces of read r are
    `first_piece[r]` up to `first_piece[r + 1]` (one entry more than reads).
    """

    blob: IntColumn
    start: IntColumn
    stop: IntColumn
    first_piece: IntColumn

    def __len__(self) -> int:
        return len(self.blob)


@dataclass(frozen=True, slots=True)
class Pieces:
    """Parts of items within one read, grouped by read, within a read in order of position.

    `start`, `stop`: elements of the flattened *stored* shard; wanted are those of them that lie in the item's overlap (a column
    slice leaves holes; now and then none is wanted). `position`, `nbytes`: the same range as bytes of the blob.
    `wanted`: the item's wanted row. `wanted_position`: if the piece is one byte range of the wanted shard's dense bytes, where
    that begins (counted in the stored dtype), else `NOT_DENSE`.
    """

    item: IntColumn
    start: IntColumn
    stop: IntColumn
    position: IntColumn
    nbytes: IntColumn
    wanted: IntColumn
    wanted_position: IntColumn

    def __len__(self) -> int:
        return len(self.item)


@dataclass(frozen=True, slots=True)
class PlaceStep:
    """One copy: `nbytes` at `position` of the blob are a dense array of `shape`, and its part `inside` goes to `where`."""

    position: int
    nbytes: int
    shape: tuple[int, ...]
    inside: Slices
    where: Slices


@dataclass(frozen=True, slots=True)
class Uncovered:
    """A wanted region (in the logical tensor) that no stored shard holds."""

    wanted: int
    address: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.address}: region at {self.offsets} of lengths {self.lengths}"


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """All reads of one load. With `uncovered` regions the checkpoint cannot fill what is wanted, and nothing may be run."""

    items: ReadItems
    reads: Reads
    pieces: Pieces
    uncovered: tuple[Uncovered, ...]

    @property
    def read_nbytes(self) -> int:
        """Bytes that the reads fetch."""
        return int((self.reads.stop - self.reads.start).sum())

    def place_steps(self, piece: int) -> Iterator[PlaceStep]:
        """The copies that put one piece into its destination, whatever its shape: each wanted element once."""
        items, item = self.items, int(self.pieces.item[piece])
        ndim, itemsize = int(items.ndims[item]), int(items.itemsize[item])
        low = items.stored_offsets[item, :ndim]
        high = low + items.lengths[item, :ndim]
        shift = items.wanted_offsets[item, :ndim] - low
        shape = tuple(map(int, items.stored_lengths[item, :ndim]))
        position = int(self.pieces.position[piece])
        runs = decompose_run(shape, int(self.pieces.start[piece]), int(self.pieces.stop[piece]))
        for offset, length in zip(*runs, strict=True):
            begin, end = np.maximum(offset, low), np.minimum(offset + length, high)
            nbytes = int(length.prod()) * itemsize
            if (begin < end).all():
                inside, where = _slices(begin - offset, end - offset), _slices(begin + shift, end + shift)
                yield PlaceStep(position, nbytes, tuple(map(int, length)), inside, where)
            position += nbytes


def _slices(begin: IntColumn, end: IntColumn) -> Slices:
    return tuple(slice(int(b), int(e)) for b, e in zip(begin, end, strict=True))
