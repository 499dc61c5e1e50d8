"""The layout of a blob: where its extents lie. A pure function of their lengths, so writer and planner agree without talking."""

from __future__ import annotations

import numpy as np

from anyshard.records.footer import HEAD_NBYTES
from anyshard.records.tables import IntColumn

SMALL_ALIGNMENT, LARGE_ALIGNMENT, LARGE_NBYTES = 64, 4096, 64 * 1024


def align_up(position: int, alignment: int) -> int:
    """The first multiple of `alignment` (a power of two) that is not below `position`."""
    return (position + alignment - 1) & -alignment


def lay_out(nbytes: IntColumn) -> IntColumn:
    """Positions of the extents of a blob in slot order: aligned to 64 bytes, to 4096 from 64 KiB up, after the head."""
    # A run begins with each large extent, and so at a multiple of 4096; within a run all extents follow at multiples of 64.
    # The head is taken for the first extent of the first run, which begins at 0.
    begins = np.concatenate([[True], nbytes >= LARGE_NBYTES])
    sizes = _align_all(np.concatenate([[HEAD_NBYTES], nbytes]), SMALL_ALIGNMENT)
    firsts = np.flatnonzero(begins)
    runs = _align_all(np.add.reduceat(sizes, firsts), LARGE_ALIGNMENT)
    before = np.cumsum(sizes) - sizes
    shift = np.cumsum(runs) - runs - before[firsts]
    positions: IntColumn = before + np.repeat(shift, np.diff(firsts, append=len(sizes)))
    return positions[1:]


def place_after(end: int, nbytes: int) -> int:
    """Where an extent of `nbytes` bytes lies behind one that ends at `end`, as `lay_out` would have it."""
    return align_up(end, LARGE_ALIGNMENT if nbytes >= LARGE_NBYTES else SMALL_ALIGNMENT)


def _align_all(positions: IntColumn, alignment: int) -> IntColumn:
    return (positions + alignment - 1) & -alignment
