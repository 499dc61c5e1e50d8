"""Sharing: which rank writes which part of the regions that several ranks hold, so that all write equally much.

A region on one rank is written by it, a buffer by the first rank that has it. All else goes by *lanes*: the regions of one
replica set end to end, in index order, cut at shares that bring its ranks to one level, least loaded ranks first. A border moves
to the nearest row of the first dim longer than 1, or to a border between regions, so each piece is a region and a dense range of
the bytes of a shard. A replica set has two lanes: the first holds what can only be cut in long rows, the second evens it out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anyshard.planning.pack import shard_nbytes
from anyshard.planning.replicas import Replicas, count_holders
from anyshard.planning.unite import United
from anyshard.records.tables import IntColumn, ShardTable

# Nobody gets less than this of a lane: small writes cost more than uneven ones.
MIN_SHARE_NBYTES = 1 << 20
# Rows up to this part of a share are short, regions up to it are not cut, and no piece that is cut off is shorter. So a share is
# off by less than 1/32 of it: at both ends by half a row and half a piece.
_TOLERANCE = 64


@dataclass(frozen=True, slots=True)
class Pieces:
    """What is written: rows [start, start + count) of a region (in its first dim longer than 1), by `rank`.

    Ordered by region, then start; the pieces of a region are all of it.
    """

    region: IntColumn
    rank: IntColumn
    start: IntColumn
    count: IntColumn


@dataclass(frozen=True, slots=True)
class RowGeometry:
    """How regions can be cut: along `dim`, the first that is longer than 1, in `num_rows` rows of `row_nbytes`."""

    dim: IntColumn
    num_rows: IntColumn
    row_nbytes: IntColumn


def measure_rows(regions: ShardTable) -> RowGeometry:
    """The rows of each region; one without a dim longer than 1 is one row. All regions have elements."""
    lengths = regions.lengths
    if not lengths.shape[1]:
        return RowGeometry(np.zeros(len(regions), dtype=np.int64), np.ones(len(regions), dtype=np.int64), shard_nbytes(regions))
    dim = (lengths > 1).argmax(axis=1)
    num_rows = np.take_along_axis(lengths, dim[:, None], axis=1)[:, 0]
    return RowGeometry(dim, num_rows, shard_nbytes(regions) // num_rows)


def share(united: United, replicas: Replicas) -> Pieces:
    """Give every region to one rank or cut it over several that hold it: deterministic, and each element exactly once.

    No more pieces than regions and, per lane, one less than ranks that share it.
    """
    rows = measure_rows(replicas.regions)
    nbytes = rows.num_rows * rows.row_nbytes
    num_ranks, rank = count_holders(united, replicas)
    is_given = (num_ranks == 1) | united.is_buffer[replicas.regions.tensor]
    loads = np.zeros(united.num_ranks, dtype=np.int64)
    np.add.at(loads, rank[is_given], nbytes[is_given])
    given = np.flatnonzero(is_given)
    parts = [np.stack([given, rank[given], np.zeros_like(given), rows.num_rows[given]])]
    most = _tolerate(replicas.set_of, nbytes, num_ranks)
    grain = np.where(nbytes <= np.minimum(most, MIN_SHARE_NBYTES), nbytes, rows.row_nbytes)
    for lane in _find_lanes(np.flatnonzero(~is_given), replicas.set_of, num_ranks=num_ranks, is_fine=grain <= most):
        ranks = united.ranks_of(replicas.tables_of(int(lane[0])))
        place, region, owner = _cut_lane(nbytes[lane], grain[lane], loads[ranks])
        np.add.at(loads, ranks[owner], np.diff(place, append=nbytes[lane].sum()))
        begin = (np.cumsum(nbytes[lane]) - nbytes[lane])[region]
        start = (place - begin) // rows.row_nbytes[lane[region]]
        is_last = np.diff(region, append=len(lane)) != 0
        stop = np.where(is_last, rows.num_rows[lane[region]], np.append(start[1:], 0))
        parts.append(np.stack([lane[region], ranks[owner], start, stop - start]))
    pieces = np.concatenate(parts, axis=1)
    return Pieces(*pieces[:, np.lexsort((pieces[2], pieces[0]))])


def _tolerate(set_of: IntColumn, nbytes: IntColumn, num_ranks: IntColumn) -> IntColumn:
    """For each region by how many bytes a border may be off in its replica set."""
    total = np.zeros(int(set_of.max(initial=-1)) + 1, dtype=np.int64)
    np.add.at(total, set_of, nbytes)
    most: IntColumn = np.maximum(total[set_of] // num_ranks, MIN_SHARE_NBYTES) // _TOLERANCE
    return most


def _find_lanes(
    regions: IntColumn, set_of: IntColumn, *, num_ranks: IntColumn, is_fine: NDArray[np.bool_]
) -> Iterator[IntColumn]:
    """The regions of each lane: long rows first, small replica sets before large ones, which have more ways to even out."""
    regions = regions[np.lexsort((set_of[regions], num_ranks[regions], is_fine[regions]))]
    keys = np.stack([is_fine[regions], set_of[regions]])
    borders = np.flatnonzero((keys[:, 1:] != keys[:, :-1]).any(axis=0)) + 1
    return (lane for lane in np.split(regions, borders) if len(lane))


def _cut_lane(nbytes: IntColumn, grain: IntColumn, loads: IntColumn) -> tuple[IntColumn, IntColumn, IntColumn]:
    """The pieces of one lane: where each begins, its region and its rank (positions in `nbytes` and in `loads`)."""
    ends = np.cumsum(nbytes)
    shares = level_out(loads, int(ends[-1]))
    ranks = np.flatnonzero(shares)
    borders = np.cumsum(shares[ranks])[:-1]
    near = min(MIN_SHARE_NBYTES, int(ends[-1]) // len(ranks) // _TOLERANCE)
    borders = _move_borders(borders, nbytes, ends=ends, grain=grain, near=near)
    place = np.unique(np.concatenate([ends - nbytes, borders[borders < ends[-1]]]))
    owner = ranks[np.searchsorted(borders, place, "right")]
    return place, np.searchsorted(ends, place, "right"), owner


def level_out(loads: IntColumn, total: int) -> IntColumn:
    """Shares of `total` that lift the least loaded ranks to one level; a share is 0 or, if total is enough, 1 MiB and more."""
    order = np.argsort(loads, kind="stable")
    low = loads[order]
    count = np.arange(1, len(low) + 1)
    # Whether the first `count` ranks can be lifted to the level of the last of them, and each by at least the minimum.
    is_enough = total + np.cumsum(low) - count * low >= count * MIN_SHARE_NBYTES
    chosen = max(int(np.count_nonzero(is_enough)), 1)
    level, rest = divmod(total + int(low[:chosen].sum()), chosen)
    shares = np.zeros_like(loads)
    shares[order[:chosen]] = level - low[:chosen] + (np.arange(chosen) < rest)
    return shares


def _move_borders(borders: IntColumn, nbytes: IntColumn, *, ends: IntColumn, grain: IntColumn, near: int) -> IntColumn:
    """Borders moved to the nearest row, and to the border of a region if that is less than `near` away. They stay in order."""
    region = np.searchsorted(ends, borders, "right")
    length, grain = nbytes[region], grain[region]
    begin = ends[region] - length
    row: IntColumn = (borders - begin + grain // 2) // grain * grain
    is_near: NDArray[np.bool_] = np.minimum(row, length - row) < near
    row = np.where(is_near, np.where(2 * row < length, 0, length), row)
    moved: IntColumn = begin + row
    return moved
