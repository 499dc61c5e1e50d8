"""The layout of a blob: where its extents lie. A pure function of their lengths, so writer and planner agree without talking."""

from __future__ import annotations

import numpy as np

from anyshard.records.tables import IntColumn
from anyshard.records.tail import HEAD_NBYTES, LARGE_ALIGNMENT, LARGE_NBYTES, SMALL_ALIGNMENT


def align_up(position: int, alignment: int) -> int:
    """The first multiple of `alignment` (a power of two) that is not below `position`."""
    return (position + alignment - 1) & -alignment


def lay_out(nbytes: IntColumn) -> IntColumn:
    """Positions of the extents of a blob in slot order: aligned to 64 bytes, to 4096 from 64 KiB up, after the head."""
    positions, end = [], HEAD_NBYTES
    for length in nbytes.tolist():
        start = align_up(end, LARGE_ALIGNMENT if length >= LARGE_NBYTES else SMALL_ALIGNMENT)
        positions.append(start)
        end = start + length
    return np.array(positions, dtype=np.int64)
