"""Tiny rows, such as the step that an optimizer counts for each parameter: all are copied by one call of NumPy.

Torch takes some 5 us for each where memory is cold, which for thousands is more than all else that the call of a save does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from anyshard.engine.images import ImageLayout
from anyshard.engine.rows import Rows
from anyshard.engine.words import view_memory
from anyshard.records.tables import IntColumn

MAX_NBYTES: Final = 64
_UNIT = np.dtype(np.uint32)


def find_tiny(rows: Rows, layout: ImageLayout) -> NDArray[np.bool_]:
    """Which rows are tiny, and are known to have just their bytes at their address, in whole units."""
    nbytes, position, unit = layout.row_nbytes[rows.number], layout.row_position[rows.number], _UNIT.itemsize
    is_whole = (rows.address % unit == 0) & (nbytes % unit == 0) & (position % unit == 0)
    fits: NDArray[np.bool_] = rows.is_sure & rows.is_host & rows.is_dense & is_whole & (nbytes <= MAX_NBYTES)
    return fits


@final
class TinyRows:
    """The tiny rows of one layout in one arena. Where they go is kept, as one object, which no interrupt leaves half done."""

    def __init__(self, layout: ImageLayout, memory: memoryview) -> None:
        self._layout = layout
        self._units = np.frombuffer(memory, _UNIT)
        none: IntColumn = np.zeros(0, dtype=np.int64)
        self._kept = _Units(none, none, none, none)

    def copy(self, number: IntColumn, address: IntColumn) -> None:
        """Copy rows that `find_tiny` has found, which lie at these addresses."""
        if not len(number):
            return
        units = self._kept
        if not np.array_equal(number, units.number):
            units = self._kept = self._lay_out(number)
        base = int(address.min())
        index = ((address - base) // _UNIT.itemsize)[units.row] + units.order
        memory = view_memory(base, (int(index.max()) + 1) * _UNIT.itemsize)
        self._units[units.position] = np.frombuffer(memory, _UNIT)[index]

    def _lay_out(self, number: IntColumn) -> _Units:
        num = self._layout.row_nbytes[number] // _UNIT.itemsize
        row = np.repeat(np.arange(len(number)), num)
        order = np.arange(len(row)) - np.repeat(np.cumsum(num) - num, num)
        position = (self._layout.row_position[number] // _UNIT.itemsize)[row] + order
        return _Units(number, row, order, position)


@dataclass(frozen=True, slots=True)
class _Units:
    """Where the units of some rows go: of each unit its row, its place in it, its position in the arena."""

    number: IntColumn
    row: IntColumn
    order: IntColumn
    position: IntColumn
