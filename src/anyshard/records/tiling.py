"""Tiling: whether a set of regions covers a logical tensor exactly once, and if not, where.

The regions' counts per element, minus one, have to be 0 everywhere. That holds exactly if the *signed corners* of all regions
(+1 or -1 by parity) cancel against those of the whole tensor, which takes one sort, whatever the number of regions.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from anyshard.errors import LimitExceeded
from anyshard.records.regions import difference, overlap, volume
from anyshard.records.tables import IntColumn

# Numbers in the table of corners: bounds what hostile regions of many dims can make us allocate (64 MiB).
MAX_CORNER_VALUES = 1 << 23


class FlawKind(enum.StrEnum):
    """How regions can fail to tile a tensor."""

    HOLE = "hole"
    OVERLAP = "overlap"
    OUTSIDE = "outside"


@dataclass(frozen=True, slots=True)
class Flaw:
    """One region at which the tiling fails, and the rows to blame: two that overlap, one that lies outside, none for a hole."""

    kind: FlawKind
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    rows: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind} at {self.offsets} of lengths {self.lengths}" + (f" (rows {self.rows})" if self.rows else "")


def check_tiling(shape: tuple[int, ...], offsets: IntColumn, lengths: IntColumn, *, limit: int = 16) -> tuple[Flaw, ...]:
    """Whether the regions cover a tensor of `shape` exactly once: no flaw if and only if they do, else up to `limit` of them.

    Regions outside the tensor are reported alone. Each flaw names a region all of whose elements have it. Raises
    `LimitExceeded` if the tensor has too many elements, or is cut in so many dims that a check would be expensive.
    """
    bounds = np.array(shape, dtype=np.int64)
    volume(bounds[None, :])
    # Compared without a sum, which could wrap.
    outside = np.flatnonzero(((offsets < 0) | (lengths < 0) | (lengths > bounds) | (offsets > bounds - lengths)).any(axis=1))
    if len(outside):
        return tuple(_flaw(FlawKind.OUTSIDE, offsets[row], lengths[row], (int(row),)) for row in outside[:limit])
    rows = np.flatnonzero((lengths > 0).all(axis=1))
    if (bounds == 0).any():
        return ()
    return tuple(itertools.islice(_Tiling(bounds, rows, offsets[rows], lengths[rows]).flaws(), limit))


def _flaw(kind: FlawKind, offsets: IntColumn, lengths: IntColumn, rows: tuple[int, ...]) -> Flaw:
    return Flaw(kind, tuple(offsets.tolist()), tuple(lengths.tolist()), rows)


class _Tiling:
    """Regions on their way to a tiling: each flaw that is found is mended, so that the next one can be."""

    def __init__(self, bounds: IntColumn, rows: IntColumn, offsets: IntColumn, lengths: IntColumn) -> None:
        self._bounds, self._rows, self._offsets, self._lengths = bounds, rows, offsets, lengths
        # A dim that every region spans says nothing; leaving it out halves the corners.
        self._dims = np.flatnonzero((lengths != bounds).any(axis=0))
        self._points, self._signs = _cancel(
            *_corners(
                np.concatenate([offsets, np.zeros_like(bounds)[None]])[:, self._dims],
                np.concatenate([lengths, bounds[None]])[:, self._dims],
                np.concatenate([np.ones(len(rows), dtype=np.int64), [-1]]),
            )
        )

    def flaws(self) -> Iterator[Flaw]:
        """All flaws. At the first corner that is left the count per element is off by just its sign: nothing lies before it."""
        while len(self._points):
            point = np.zeros_like(self._bounds)
            point[self._dims] = self._points[0]
            yield self._mend_hole(point) if self._signs[0] < 0 else self._mend_overlap(point)

    def _mend_hole(self, point: IntColumn) -> Flaw:
        """Fill a hole from `point` on, as far as it goes dim by dim."""
        low, high = point, point + 1
        for dim in range(len(point) - 1, -1, -1):
            high[dim] = self._bounds[dim]
            _, _, hit = overlap(low, high - low, self._offsets, self._lengths)
            high[dim] = min(self._offsets[hit, dim], default=high[dim])
        self._append(low[None], (high - low)[None], row=-1)
        self._adjust(low, high - low, sign=1)
        return _flaw(FlawKind.HOLE, low, high - low, ())

    def _mend_overlap(self, point: IntColumn) -> Flaw:
        """Take the overlap of two regions that hold `point` out of the second one."""
        hit = ((self._offsets <= point) & (point < self._offsets + self._lengths)).all(axis=1)
        first, second = np.flatnonzero(hit)[:2]
        region = self._offsets[second], self._lengths[second]
        offsets, lengths, _ = overlap(self._offsets[first], self._lengths[first], *region)
        rows = int(self._rows[first]), int(self._rows[second])
        self._append(*difference(*region, offsets[None], lengths[None]), row=rows[1])
        self._lengths[second] = 0
        self._adjust(offsets, lengths, sign=-1)
        return _flaw(FlawKind.OVERLAP, offsets, lengths, rows)

    def _append(self, offsets: IntColumn, lengths: IntColumn, *, row: int) -> None:
        self._offsets = np.concatenate([self._offsets, offsets])
        self._lengths = np.concatenate([self._lengths, lengths])
        self._rows = np.concatenate([self._rows, np.full(len(offsets), row)])

    def _adjust(self, offsets: IntColumn, lengths: IntColumn, *, sign: int) -> None:
        points, signs = _corners(offsets[None, self._dims], lengths[None, self._dims], np.array([sign]))
        self._points, self._signs = _cancel(np.concatenate([self._points, points]), np.concatenate([self._signs, signs]))


def _corners(offsets: IntColumn, lengths: IntColumn, signs: IntColumn) -> tuple[IntColumn, IntColumn]:
    """All corners of regions and their signs: prefix sums of the signs give back each element's count."""
    num_corners = 1 << offsets.shape[1]
    if len(offsets) * num_corners * offsets.shape[1] > MAX_CORNER_VALUES:
        raise LimitExceeded(
            f"expected at most {MAX_CORNER_VALUES} numbers to describe all corners of the regions of a tensor, "
            f"found {len(offsets)} regions that are cut in {offsets.shape[1]} dims; cut it in fewer"
        )
    ends: NDArray[np.bool_] = (np.arange(num_corners)[:, None] >> np.arange(offsets.shape[1]) & 1).astype(bool)
    points = offsets[:, None, :] + np.where(ends[None], lengths[:, None, :], 0)
    parity = 1 - 2 * (ends.sum(axis=1) & 1)
    return points.reshape(len(offsets) * num_corners, offsets.shape[1]), (signs[:, None] * parity[None, :]).reshape(-1)


def _cancel(points: IntColumn, signs: IntColumn) -> tuple[IntColumn, IntColumn]:
    """Sort points and add up the signs of equal ones; those that cancel are gone."""
    if points.shape[1]:
        order = np.lexsort(points.T[::-1])
        points, signs = points[order], signs[order]
    is_first = np.ones(len(points), dtype=bool)
    is_first[1:] = (points[1:] != points[:-1]).any(axis=1)
    first = np.flatnonzero(is_first)
    totals = np.add.reduceat(signs, first)
    return points[first][totals != 0], totals[totals != 0]
