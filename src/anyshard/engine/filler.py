"""Filling blocks: the bytes of a blob, put front to back, handed over block by block."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import numpy as np

from anyshard.errors import InvalidAppState
from anyshard.records.digests import Bytes
from anyshard.records.handles import Source

_ZEROS = bytes(4096)
_SHORT_NBYTES = 4096


@final
class BlockFiller:
    """The bytes [start, end) of a blob on their way into blocks, the first of which begins at `start`; gaps are zeros.

    Blocks come from `acquire`; each that is full, and the last one, is handed over with its position and its number of bytes.
    """

    def __init__(
        self, start: int, end: int, *, acquire: Callable[[], memoryview], hand_over: Callable[[memoryview, int, int], None]
    ) -> None:
        self._end = end
        self._acquire = acquire
        self._hand_over = hand_over
        self._start = start
        self._filled = 0
        self._block = acquire()

    @property
    def position(self) -> int:
        """Where in the blob the next byte will lie."""
        return self._start + self._filled

    def put(self, data: Bytes) -> None:
        """Append `data`."""
        view, taken = memoryview(data), 0
        while taken < len(view):
            room = self._room(len(view) - taken)
            _copy(room, view[taken : taken + len(room)])
            taken += len(room)

    def pull(self, source: Source, position: int, nbytes: int) -> None:
        """Append all `nbytes` bytes of a source, at `position`."""
        if source.nbytes != nbytes:
            raise InvalidAppState(
                f"expected {nbytes} bytes of a tensor, found {source.nbytes}: do not change the app state while it is saved"
            )
        self.pad_to(position)
        taken = 0
        while taken < nbytes:
            room = self._room(nbytes - taken)
            source.read_into(taken, room)
            taken += len(room)

    def pad_to(self, position: int) -> None:
        """Append zeros up to `position`, less than 4096 of them."""
        if (count := position - self.position) > 0:
            self.put(_ZEROS[:count])

    def finish(self) -> None:
        """Pad to the end and hand over the last block."""
        self.pad_to(self._end)
        self._hand_over(self._block, self._start, self._filled)

    def _room(self, nbytes: int) -> memoryview:
        """The next up to `nbytes` bytes of the blob, as memory that counts as filled."""
        if self._filled == len(self._block):
            self._hand_over(self._block, self._start, self._filled)
            self._start, self._filled = self._start + self._filled, 0
            self._block = self._acquire()
        begin = self._filled
        self._filled = min(begin + nbytes, len(self._block))
        return self._block[begin : self._filled]


def _copy(room: memoryview, data: memoryview) -> None:
    if len(room) <= _SHORT_NBYTES:
        room[:] = data  # takes half the time of NumPy, which lets other threads run meanwhile
    else:
        np.copyto(np.frombuffer(room, dtype=np.uint8), np.frombuffer(data, dtype=np.uint8))
