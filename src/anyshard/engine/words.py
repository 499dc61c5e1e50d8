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
    """Which words of rows are read: word `word[i]` of row `row[i]`."""

    row: IntColumn
    word: IntColumn


def choose_words(nbytes: IntColumn) -> WordPlaces:
    """The first and the last word of each row, where the copy begins and ends, and of longer ones more, one for each MiB.

    Of a row that is not made of whole words the last bytes are in none.
    """
    num_words = nbytes // WORD_NBYTES
    # Those at the start of a stretch end before the last word, so none of them reaches behind the row.
    num = np.minimum(2 + (num_words - 2) // (_STRETCH_NBYTES // WORD_NBYTES), num_words)
    row = np.repeat(np.arange(len(nbytes)), num)
    order = np.arange(len(row)) - np.repeat(np.cumsum(num) - num, num)
    is_last = order == (num - 1)[row]
    return WordPlaces(row, np.where(is_last, (num_words - 1)[row], order * _STRETCH_NBYTES // WORD_NBYTES))


def read_words(addresses: IntColumn, places: WordPlaces) -> Words:
    """The words of rows that lie in memory at these addresses, which are multiples of 8."""
    if not len(places.row):
        return np.zeros(0, dtype=np.uint64)
    base = int(addresses.min())
    index = ((addresses - base) // WORD_NBYTES)[places.row] + places.word
    words: Words = _view(base, (int(index.max()) + 1) * WORD_NBYTES).view(np.uint64)[index]
    return words


def pick_words(memory: memoryview, positions: IntColumn, places: WordPlaces) -> Words:
    """The words of rows that lie at these positions of `memory`, which are multiples of 8."""
    words: Words = np.frombuffer(memory, dtype=np.uint64)[(positions // WORD_NBYTES)[places.row] + places.word]
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
