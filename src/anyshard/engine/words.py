"""Words: 8 bytes of memory here and there, by which a lazy snapshot knows whether its source has changed since.

Counters of versions do not see the steps of fused optimizers nor writes through `.data`; bytes do. Which words are read follows
from the lengths alone, so the choice is made once per layout, and reading those of thousands of rows is one NumPy call. Memory
is given by its address: who calls answers for its being there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast, final

import numpy as np
from numpy.typing import NDArray

from anyshard.records.tables import IntColumn

WORD_NBYTES = 8
# Of a long row there is a word for each stretch of this length. Each costs a miss of the TLB, about 2 us where memory is cold.
_STRETCH_NBYTES = 1 << 20

Words = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class WordPlaces:
    """Which words of rows are read: the one at byte `start[i]` of row `row[i]`, aligned or not."""

    row: IntColumn
    start: IntColumn


def choose_words(nbytes: IntColumn) -> WordPlaces:
    """The first and the last 8 bytes of each row, where the copy begins and ends, and of longer ones more, one word for each MiB.

    No row is shorter than a word.
    """
    num = 2 + np.maximum(nbytes - WORD_NBYTES - 1, 0) // _STRETCH_NBYTES
    row = np.repeat(np.arange(len(nbytes)), num)
    order = np.arange(len(row)) - np.repeat(np.cumsum(num) - num, num)
    is_last = order == (num - 1)[row]
    return WordPlaces(row, np.where(is_last, (nbytes - WORD_NBYTES)[row], order * _STRETCH_NBYTES))


def read_words(addresses: IntColumn, places: WordPlaces) -> Words:
    """The words of rows that lie in memory at these addresses."""
    if not len(places.row):
        return np.zeros(0, dtype=np.uint64)
    base = int(addresses.min())
    starts = (addresses - base)[places.row] + places.start
    return _pick(_view(base, int(starts.max()) + WORD_NBYTES).data, starts)


def pick_words(memory: memoryview, positions: IntColumn, places: WordPlaces) -> Words:
    """The words of rows that lie at these positions of `memory`."""
    return _pick(memory, positions[places.row] + places.start) if len(places.row) else np.zeros(0, dtype=np.uint64)


def _pick(memory: memoryview, starts: IntColumn) -> Words:
    """The words that begin at these bytes."""
    words: Words = np.ndarray(memory.nbytes - WORD_NBYTES + 1, np.uint64, memory, strides=(1,))[starts]
    return words


def view_memory(address: int, nbytes: int) -> memoryview:
    """The memory at an address. Making the view reads nothing, and keeps nothing alive."""
    return _view(address, nbytes).data


@final
class _Memory:
    """Memory as NumPy asks for it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__array_interface__ = {"version": 3, "data": (address, True), "shape": (nbytes,), "typestr": "|u1"}


def _view(address: int, nbytes: int) -> NDArray[np.uint8]:
    return np.asarray(cast("Any", _Memory(address, nbytes)))
