"""Regions: axis-aligned boxes inside a logical tensor, and their algebra on NumPy columns.

A region is (offsets, lengths), one entry per dim, in elements. A set of n regions is a pair of (n, ndim) int64 arrays.
Flat positions are element numbers in C order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from anyshard.errors import LimitExceeded
from anyshard.records.tables import IntColumn, expand_ranges

# Every dim, offset + length, element count and byte count stays below this, so that no sum of two of them wraps (E3).
MAX_COUNT = 1 << 62
MAX_NDIM = 64

# Comparing a pair costs about this much less than sorting one more entry into groups.
_PAIRS_PER_ENTRY = 8
_PAIRS_AT_ONCE = 1 << 20


def decompose_run(shape: tuple[int, ...], start: int, stop: int) -> tuple[IntColumn, IntColumn]:
    """Cut the flattened run [start, stop) of a tensor of `shape` into the fewest regions, in flat order.

    Each region is itself one unbroken part of the run, so the regions' elements follow each other in flat order. Returns
    offsets and lengths of shape (n, ndim), n <= 2 * ndim - 1 (an empty run gives none; a 0-d tensor one of no dims).
    Raises `ValueError` for a negative dim or a run that does not lie within the tensor.
    """
    strides = _strides(shape)
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"expected a run within the {math.prod(shape)} elements of shape {shape}, found [{start}, {stop})")
    regions: list[tuple[list[int], list[int]]] = []
    while start < stop:
        region = _longest_region(shape, strides, start, stop)
        regions.append(region)
        start += math.prod(region[1])
    columns = np.array(regions, dtype=np.int64).reshape(len(regions), 2, len(shape))
    return columns[:, 0], columns[:, 1]


def _strides(shape: tuple[int, ...]) -> list[int]:
    """Elements from one index to the next, per dim, of a dense tensor."""
    if any(length < 0 for length in shape):
        raise ValueError(f"expected dims of 0 or more, found shape {shape}")
    strides = [1] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    return strides


def _longest_region(shape: tuple[int, ...], strides: list[int], start: int, stop: int) -> tuple[list[int], list[int]]:
    """The longest region that begins at `start`, ends by `stop` and is one run. Taking it each time gives the fewest."""
    offsets = [start // stride % length for stride, length in zip(strides, shape, strict=True)]
    lengths = [1] * len(shape)
    for dim, stride in enumerate(strides):
        if start % stride == 0 and start + stride <= stop:
            lengths[dim] = min(shape[dim] - offsets[dim], (stop - start) // stride)
            lengths[dim + 1 :] = shape[dim + 1 :]
            break
    return offsets, lengths


def volume(lengths: IntColumn) -> IntColumn:
    """Elements of each region (the product over the last dimension of the array), exact: a count of 2^62 or more is an error.

    Raises `LimitExceeded` for such a count or more than 64 dims, `ValueError` for a negative length.
    """
    if lengths.shape[-1] > MAX_NDIM:
        raise LimitExceeded(f"expected at most {MAX_NDIM} dims, found {lengths.shape[-1]}")
    if lengths.size and lengths.min() < 0:
        raise ValueError(f"expected lengths of 0 or more, found {lengths.min()}")
    with np.errstate(over="ignore", invalid="ignore"):
        estimate = lengths.astype(np.float64).prod(axis=-1)
    for row in lengths[estimate >= MAX_COUNT / 2]:
        if math.prod(row.tolist()) >= MAX_COUNT:
            raise LimitExceeded(f"expected fewer than 2^62 elements, found a region of lengths {tuple(row.tolist())}")
    counts: IntColumn = lengths.prod(axis=-1, dtype=np.int64)
    return counts


def overlap(
    a_offsets: IntColumn, a_lengths: IntColumn, b_offsets: IntColumn, b_lengths: IntColumn
) -> tuple[IntColumn, IntColumn, NDArray[np.bool_]]:
    """Overlap of regions a and b, row by row (arrays broadcast): offsets, lengths, and whether it holds an element.

    Where it holds none, the length of at least one dim is 0.
    """
    offsets = np.maximum(a_offsets, b_offsets)
    lengths = np.maximum(np.minimum(a_offsets + a_lengths, b_offsets + b_lengths) - offsets, 0)
    return offsets, lengths, (lengths > 0).all(axis=-1)


def dense_strides(shapes: IntColumn) -> IntColumn:
    """Elements from one index to the next, per dim, of dense boxes; one box per row."""
    strides = np.ones_like(shapes)
    strides[:, :-1] = np.cumprod(shapes[:, :0:-1], axis=1)[:, ::-1]
    return strides


def flat_span(shapes: IntColumn, offsets: IntColumn, lengths: IntColumn) -> tuple[IntColumn, IntColumn, NDArray[np.bool_]]:
    """Where regions lie in the flattened boxes that hold them, row by row: start, stop, and whether they fill that span.

    The span runs from a region's first element to after its last; a region that fills it is one run. Regions are not empty.
    """
    strides = dense_strides(shapes)
    start = (offsets * strides).sum(axis=1)
    stop = start + ((lengths - 1) * strides).sum(axis=1) + 1
    return start, stop, lengths.prod(axis=1) == stop - start


def difference(
    offsets: IntColumn, lengths: IntColumn, minus_offsets: IntColumn, minus_lengths: IntColumn
) -> tuple[IntColumn, IntColumn]:
    """What is left of one region without a set of others: disjoint regions, ordered by offsets."""
    low, high = offsets[None, :], (offsets + lengths)[None, :]
    cut_low, cut_lengths, hit = overlap(offsets, lengths, minus_offsets, minus_lengths)
    for cut, length in zip(cut_low[hit], cut_lengths[hit], strict=True):
        low, high = _subtract(low, high, cut, cut + length)
    full = (low < high).all(axis=1)
    low, high = low[full], high[full]
    order = np.lexsort(low.T[::-1]) if low.size else np.arange(len(low))
    return low[order], (high - low)[order]


def _subtract(low: IntColumn, high: IntColumn, cut_low: IntColumn, cut_high: IntColumn) -> tuple[IntColumn, IntColumn]:
    """Regions [low, high) without one region: slabs before and after it, dim by dim. Some of them may be empty."""
    inner_low, inner_high = np.maximum(low, cut_low), np.minimum(high, cut_high)
    hit = (inner_low < inner_high).all(axis=1)
    lows, highs = [low[~hit]], [high[~hit]]
    low, high, inner_low, inner_high = low[hit], high[hit], inner_low[hit], inner_high[hit]
    for dim in range(low.shape[1]):
        before, after = high.copy(), low.copy()
        before[:, dim], after[:, dim] = inner_low[:, dim], inner_high[:, dim]
        lows += [low, after]
        highs += [before, high]
        low, high = low.copy(), high.copy()
        low[:, dim], high[:, dim] = inner_low[:, dim], inner_high[:, dim]
    left_low, left_high = np.concatenate(lows), np.concatenate(highs)
    full = (left_low < left_high).all(axis=1)
    return left_low[full], left_high[full]


def find_overlaps(
    a_offsets: IntColumn, a_lengths: IntColumn, b_offsets: IntColumn, b_lengths: IntColumn
) -> tuple[IntColumn, IntColumn]:
    """All pairs (row of a, row of b) of regions that share an element, ordered by a, then b.

    Works dim by dim on groups of rows with equal intervals, so that grids cost what they hold and not their square; where
    groups are small, pairs are looked at one by one. Regions of several tensors can be matched at once with the tensor's number
    as a first dim of length 1.
    """
    a_low, a_high, b_low, b_high = (*_borders(a_offsets, a_lengths), *_borders(b_offsets, b_lengths))
    a, b = np.flatnonzero((a_low < a_high).all(axis=1)), np.flatnonzero((b_low < b_high).all(axis=1))
    a_key, b_key = np.zeros_like(a), np.zeros_like(b)
    for dim in range(a_low.shape[1]):
        a_groups, b_groups = _Intervals(a_key, a_low[a, dim], a_high[a, dim]), _Intervals(b_key, b_low[b, dim], b_high[b, dim])
        a_met, b_met = _join_intervals(a_groups, b_groups)
        a_count, b_count = a_groups.counts[a_met], b_groups.counts[b_met]
        is_last = dim == a_low.shape[1] - 1
        if is_last or (a_count * b_count).sum() <= _PAIRS_PER_ENTRY * (a_count + b_count).sum():
            break
        (a_key, a_entry), (b_key, b_entry) = a_groups.members(a_met), b_groups.members(b_met)
        a, b = a[a_entry], b[b_entry]
    found = [np.zeros((2, 0), dtype=np.int64)]
    for a_part, b_part in _split(a_met, b_met, a_count * b_count):
        owner, a_entry = a_groups.members(a_part)
        number, b_entry = b_groups.members(b_part[owner])
        a_row, b_row = a[a_entry[number]], b[b_entry]
        hit = (np.maximum(a_low[a_row], b_low[b_row]) < np.minimum(a_high[a_row], b_high[b_row])).all(axis=1)
        found.append(np.stack([a_row[hit], b_row[hit]]))
    pairs = np.concatenate(found, axis=1)
    a_row, b_row = pairs[:, np.lexsort(pairs[::-1])]
    return a_row, b_row


def _borders(offsets: IntColumn, lengths: IntColumn) -> tuple[IntColumn, IntColumn]:
    """First and end index per dim, after a first dim in which all are [0, 1): the group of all rows."""
    num = len(offsets)
    low, high = (np.zeros(num, dtype=np.int64), offsets), (np.ones(num, dtype=np.int64), offsets + lengths)
    return np.column_stack(low), np.column_stack(high)


def _split(a: IntColumn, b: IntColumn, num_pairs: IntColumn) -> Iterator[tuple[IntColumn, IntColumn]]:
    """Two columns, some rows at a time, so that memory stays small."""
    cuts = np.flatnonzero(np.diff(np.cumsum(num_pairs) // _PAIRS_AT_ONCE, prepend=0))
    return zip(np.split(a, cuts), np.split(b, cuts), strict=True)


class _Intervals:
    """The distinct (key, start, stop) of a set of entries in rising order, and the entries that have each."""

    def __init__(self, keys: IntColumn, starts: IntColumn, stops: IntColumn) -> None:
        self._order = np.lexsort((stops, starts, keys))
        columns = np.stack([keys, starts, stops])[:, self._order]
        is_first = np.ones(len(keys), dtype=bool)
        is_first[1:] = (columns[:, 1:] != columns[:, :-1]).any(axis=0)
        self._first = np.flatnonzero(is_first)
        self.counts = np.diff(self._first, append=len(keys))
        self.keys, self.starts, self.stops = columns[:, self._first]

    def members(self, groups: IntColumn) -> tuple[IntColumn, IntColumn]:
        """For each of `groups` all its entries: number within `groups`, and entry."""
        owner, position = expand_ranges(self._first[groups], self.counts[groups])
        return owner, self._order[position]


def _join_intervals(a: _Intervals, b: _Intervals) -> tuple[IntColumn, IntColumn]:
    """Pairs of intervals with equal keys that overlap: one of the two begins within the other."""
    borders = np.unique(np.concatenate([a.starts, a.stops, b.starts, b.stops]))
    width = len(borders) + 1
    a_start, a_stop = (a.keys * width + np.searchsorted(borders, border) for border in (a.starts, a.stops))
    b_start, b_stop = (b.keys * width + np.searchsorted(borders, border) for border in (b.starts, b.stops))
    first = np.searchsorted(b_start, a_start, "left")
    a_owner, b_inside = expand_ranges(first, np.searchsorted(b_start, a_stop, "left") - first)
    first = np.searchsorted(a_start, b_start, "right")
    b_owner, a_inside = expand_ranges(first, np.maximum(np.searchsorted(a_start, b_stop, "left") - first, 0))
    return np.concatenate([a_owner, a_inside]), np.concatenate([b_inside, b_owner])
