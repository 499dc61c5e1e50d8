"""Reads: which byte ranges of which blobs a load fetches, and what of each goes where.

Three steps on columns. *Runs*: the byte ranges of a blob that an item wants, nearly touching ones joined. *Intervals*: the cells
that hold runs, near ones coalesced whatever tensors they belong to. *Reads*: intervals cut at block length, with the pieces of
items that lie in each.

The bytes of all blobs are put on one line, blob after blob, so that one sort and one search serve all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anyshard.errors import LimitExceeded
from anyshard.planning.match import Matches, find_uncovered, locate
from anyshard.records.load_plan import NOT_DENSE, BlobLayout, LoadPlan, Pieces, ReadItems, ReadLimits, Reads
from anyshard.records.regions import dense_strides, flat_span
from anyshard.records.tables import IntColumn, ShardTable, expand_ranges, pad_columns


def plan_reads(matches: Matches, layouts: Mapping[int, BlobLayout], *, limits: ReadLimits) -> LoadPlan:
    """Plan reads so that every wanted element that is stored is placed exactly once, from bytes that whole cells verify.

    What is wanted may name a region several times. `layouts` has every blob that holds wanted bytes. Raises `CheckpointDamaged`
    if index and tails disagree or stored shards overlap in a wanted region, `LimitExceeded` if cells are longer than a block.
    What no stored shard holds is listed in the plan as `uncovered`.
    """
    wanted = matches.shards
    items = locate(matches, layouts)
    line = _make_line(items, layouts, limits)
    spans = _find_spans(items, wanted)
    runs = _find_runs(items, line, limits)
    reads = _cut(_find_intervals(runs, line, limits), line)
    first_piece, pieces = _find_pieces(items, spans, runs, reads)
    blob, base = line.blob[reads.number], line.base[reads.number]
    return LoadPlan(
        items=items,
        reads=Reads(blob, reads.start - base, reads.stop - base, first_piece),
        pieces=pieces,
        uncovered=find_uncovered(wanted, items),
    )


@dataclass(frozen=True, slots=True)
class _Line:
    """The line that the blobs in use lie on: the n-th begins at `base[n]`, further from the others than any gap that is bridged.

    `longest` is the longest read that cells and block allow. `item_number`, `item_start`: the blob of each item as n, and where
    its stored shard begins on the line.
    """

    blob: IntColumn
    base: IntColumn
    cell_nbytes: IntColumn
    tail_position: IntColumn
    longest: IntColumn
    item_number: IntColumn
    item_start: IntColumn


def _make_line(items: ReadItems, layouts: Mapping[int, BlobLayout], limits: ReadLimits) -> _Line:
    blob, number = np.unique(items.blob, return_inverse=True)
    used = [layouts[position] for position in blob.tolist()]
    tails = np.array([layout.tail_position for layout in used], dtype=np.int64)
    cells = np.array([layout.cell_nbytes for layout in used], dtype=np.int64)
    for cell in cells[cells > limits.block_nbytes][:1]:
        raise LimitExceeded(f"expected cells of at most block_nbytes = {limits.block_nbytes}, found {cell}; raise block_nbytes")
    reach = tails + limits.max_gap_nbytes + 1
    base = np.cumsum(reach) - reach
    longest = limits.block_nbytes // np.maximum(cells, 1) * cells
    return _Line(blob, base, cells, tails, longest, number, base[number] + items.position)


@dataclass(frozen=True, slots=True)
class _Spans:
    """Per item: whether it is one run both in the stored and in the wanted shard, and by how many elements they are apart."""

    is_dense: NDArray[np.bool_]
    shift: IntColumn


def _find_spans(items: ReadItems, wanted: ShardTable) -> _Spans:
    wanted_lengths = pad_columns(wanted.lengths, items.lengths.shape[1], fill=1)[items.wanted]
    stored_start, _, stored_dense = flat_span(items.stored_lengths, items.stored_offsets, items.lengths)
    wanted_start, _, wanted_dense = flat_span(wanted_lengths, items.wanted_offsets, items.lengths)
    return _Spans(stored_dense & wanted_dense, wanted_start - stored_start)


@dataclass(frozen=True, slots=True)
class _Runs:
    """Byte ranges on the line, each of one item (`owner`) and one blob (`number`), grouped by item, rising within an item.

    `origin` is where each *item's* stored shard begins on the line.
    """

    owner: IntColumn
    number: IntColumn
    start: IntColumn
    stop: IntColumn
    origin: IntColumn


def _find_runs(items: ReadItems, line: _Line, limits: ReadLimits) -> _Runs:
    """The runs of every item. Those of one item are a cell or more apart, so there are never more runs than cells."""
    strides = dense_strides(items.stored_lengths) * items.itemsize[:, None]
    bridged = np.maximum(limits.max_gap_nbytes, line.cell_nbytes[line.item_number] - 1)
    nbytes, counts = _join_dims(items, strides, bridged)
    owner, rest = expand_ranges(np.zeros_like(nbytes), counts.prod(axis=1))
    start = (line.item_start + (items.stored_offsets * strides).sum(axis=1))[owner]
    for dim in range(counts.shape[1] - 1, -1, -1):
        rest, index = np.divmod(rest, counts[owner, dim])
        start += index * strides[owner, dim]
    return _Runs(owner, line.item_number[owner], start, start + nbytes[owner], line.item_start)


def _join_dims(items: ReadItems, strides: IntColumn, bridged: IntColumn) -> tuple[IntColumn, IntColumn]:
    """Length of an item's runs, and their number per dim: from the last dim on, what leaves gaps of up to `bridged` is one."""
    nbytes, counts = items.itemsize.copy(), np.ones_like(items.lengths)
    is_joined = np.ones(len(items), dtype=bool)
    for dim in range(strides.shape[1] - 1, -1, -1):
        length, stride = items.lengths[:, dim], strides[:, dim]
        is_joined &= (length == 1) | (stride - nbytes <= bridged)
        nbytes = np.where(is_joined, (length - 1) * stride + nbytes, nbytes)
        counts[:, dim] = np.where(is_joined, 1, length)
    return nbytes, counts


@dataclass(frozen=True, slots=True)
class _Intervals:
    """Ranges of whole cells on the line, disjoint, rising; `number` is the blob's."""

    number: IntColumn
    start: IntColumn
    stop: IntColumn


def _find_intervals(runs: _Runs, line: _Line, limits: ReadLimits) -> _Intervals:
    """The cells that hold runs, joined where at most `max_gap_nbytes` lie between them."""
    base, cell = line.base[runs.number], line.cell_nbytes[runs.number]
    low = base + (runs.start - base) // cell * cell
    high = base + np.minimum(-(-(runs.stop - base) // cell) * cell, line.tail_position[runs.number])
    order = np.argsort(low, kind="stable")
    start, reach = low[order], np.maximum.accumulate(high[order])
    is_first = np.ones(len(order), dtype=bool)
    is_first[1:] = start[1:] - reach[:-1] > limits.max_gap_nbytes
    first = np.flatnonzero(is_first)
    last = np.append(first[1:], len(order))[: len(first)] - 1
    return _Intervals(runs.number[order][first], start[first], reach[last])


def _cut(intervals: _Intervals, line: _Line) -> _Intervals:
    """Cut intervals so that no read is longer than a block; all cuts are cell borders."""
    longest = line.longest[intervals.number]
    owner, step = expand_ranges(np.zeros_like(longest), -(-(intervals.stop - intervals.start) // longest))
    start = intervals.start[owner] + step * longest[owner]
    stop = np.minimum(start + longest[owner], intervals.stop[owner])
    return _Intervals(intervals.number[owner], start, stop)


def _find_pieces(items: ReadItems, spans: _Spans, runs: _Runs, reads: _Intervals) -> tuple[IntColumn, Pieces]:
    """The part of each item in each read, ordered by read, then position; and the first piece of each read."""
    first = np.searchsorted(reads.stop, runs.start, "right")
    run, read = expand_ranges(first, np.searchsorted(reads.start, runs.stop, "left") - first)
    item = runs.owner[run]
    # Runs of one item follow each other, so the ones that share a read are neighbours here, and become one piece.
    is_first = np.ones(len(run), dtype=bool)
    is_first[1:] = (item[1:] != item[:-1]) | (read[1:] != read[:-1])
    begin = np.flatnonzero(is_first)
    end = np.append(begin[1:], len(run))[: len(begin)] - 1
    start = np.maximum(runs.start[run], reads.start[read])[begin]
    stop = np.minimum(runs.stop[run], reads.stop[read])[end]
    item, read = item[begin], read[begin]
    order = np.lexsort((start, read))
    first_piece = np.searchsorted(read[order], np.arange(len(reads.start) + 1))
    return first_piece, _describe(
        items, spans, item[order], (start - runs.origin[item])[order], (stop - runs.origin[item])[order]
    )


def _describe(items: ReadItems, spans: _Spans, item: IntColumn, start: IntColumn, stop: IntColumn) -> Pieces:
    """Pieces from the bytes [start, stop) of the items' stored shards."""
    itemsize = items.itemsize[item]
    return Pieces(
        item=item,
        start=start // itemsize,
        stop=stop // itemsize,
        position=items.position[item] + start,
        nbytes=stop - start,
        wanted=items.wanted[item],
        wanted_position=np.where(spans.is_dense[item], start + spans.shift[item] * itemsize, NOT_DENSE),
    )
