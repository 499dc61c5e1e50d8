"""Lazy rows: tensors in host memory that are copied beside the training, and what shows that they stayed as they were.

The kernel copies them, for it answers with an error where the memory is gone; reading it here would crash.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import Protocol, final

import numpy as np
from numpy.typing import NDArray

from anyshard.engine.guarded import GuardedReader
from anyshard.engine.images import Images
from anyshard.engine.words import WordPlaces, Words, pick_words, read_words, view_memory
from anyshard.records.tables import IntColumn

_PIECE_NBYTES = 8 << 20  # copied between two looks at whether the source is still there


class _Storage(Protocol):
    def nbytes(self) -> int: ...


class _Tensor(Protocol):
    """What is asked of a tensor."""

    @property
    def itemsize(self) -> int: ...

    def data_ptr(self) -> int: ...

    def numel(self) -> int: ...

    def storage_offset(self) -> int: ...

    def untyped_storage(self) -> _Storage: ...


@final
class LazyRows:
    """Rows of a plan (`number`) whose bytes are the memory of their tensors at `address`; holds these until they are copied."""

    def __init__(self, images: Images, number: IntColumn, *, tensors: Sequence[_Tensor], address: IntColumn) -> None:
        self._images = images
        self._number = number
        self._tensors: list[_Tensor] = list(tensors)
        self._address = address
        self._places = WordPlaces(number[:0], number[:0])
        self._words: Words = np.zeros(0, dtype=np.uint64)

    def begin(self, places: WordPlaces) -> LazyRows:
        """Remember some words of the rows; on the training thread."""
        self._places, self._words = places, read_words(self._address, places)
        return self

    def finish(self, check: Callable[[], None]) -> list[int]:
        """Copy the rows, calling `check` now and then; the numbers of those that were changed or freed. On any thread."""
        position, nbytes = (column[self._number] for column in (self._images.layout.row_position, self._images.layout.row_nbytes))
        is_torn = np.zeros(len(self._number), dtype=np.bool_)
        for at, (address, start, length) in enumerate(
            zip(self._address.tolist(), position.tolist(), nbytes.tolist(), strict=True)
        ):
            is_torn[at] = not self._copy(at, view_memory(address, length), position=start, check=check)
        found = pick_words(self._images.arena.memory, position, self._places)
        is_torn[self._places.row[found != self._words]] = True
        is_torn |= self._look_again(~is_torn)
        torn: list[int] = self._number[is_torn].tolist()
        return torn

    def _look_again(self, is_fine: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which rows are not any more as they were at the call, of those that seem to be fine.

        The copy may have overtaken a writer between two of the words. By now that has come to the next one.
        """
        here = is_fine & np.array([self._is_there(at) for at in range(len(self._number))], dtype=np.bool_)
        has_changed = is_fine & ~here
        which = np.flatnonzero(here[self._places.row])
        row, addresses = self._places.row[which], (self._address[self._places.row] + self._places.start)[which]
        with GuardedReader() as reader:
            found = reader.read_words(addresses.tolist())
            if found is None:  # one at a time tells which are gone
                single = [reader.read_words([address]) for address in addresses.tolist()]
                found = np.array([~word if one is None else one[0] for one, word in zip(single, self._words[which], strict=True)])
        has_changed[row[found != self._words[which]]] = True
        return has_changed

    def drop(self) -> None:
        """Let go of all tensors."""
        self._tensors = []

    def _copy(self, at: int, source: memoryview, *, position: int, check: Callable[[], None]) -> bool:
        """Whether a row was there until it was copied."""
        for start in range(0, source.nbytes, _PIECE_NBYTES):
            check()
            if not self._is_there(at):
                return False
            try:
                self._images.arena.write(position + start, source[start : start + _PIECE_NBYTES])
            except OSError as error:
                if error.errno != errno.EFAULT:
                    raise
                return False
        return self._is_there(at)

    def _is_there(self, at: int) -> bool:
        tensor = self._tensors[at]
        end_nbytes = (tensor.storage_offset() + tensor.numel()) * tensor.itemsize
        return tensor.data_ptr() == self._address[at] and tensor.untyped_storage().nbytes() >= end_nbytes
