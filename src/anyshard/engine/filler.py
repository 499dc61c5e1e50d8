"""Filling blocks: the bytes of a blob, put front to back, handed over block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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

    What puts bytes is an iterator that pauses whenever it needs a block: call `give` before it goes on. So no block is held while
    another one is waited for, and the blobs of several fillers can be staged in turn. A block is handed over, with its position
    and its number of bytes, as soon as it is full; the last one by `finish`.
    """

    def __init__(self, start: int, end: int, *, hand_over: Callable[[memoryview, int, int], None]) -> None:
        self._end = end
        self._hand_over = hand_over
        self._start = start
        self._filled = 0
        self._block: memoryview | None = None

    @property
    def position(self) -> int:
        """Where in the blob the next byte will lie."""
        return self._start + self._filled

    def give(self, block: memoryview) -> None:
        """Let the next bytes go into `block`."""
        self._block = block

    def put(self, data: Bytes) -> Iterator[None]:
        """Append `data`."""
        view, taken = memoryview(data), 0
        while taken < len(view):
            if self._block is None:
                yield
            room = self._room(len(view) - taken)
            _copy(room, view[taken : taken + len(room)])
            taken += self._settle(room)

    def pull(self, source: Source, position: int, nbytes: int) -> Iterator[None]:
        """Append all `nbytes` bytes of a source, at `position`."""
        if source.nbytes != nbytes:
            raise InvalidAppState(
                f"expected {nbytes} bytes of a tensor, found {source.nbytes}: do not change the app state while it is saved"
            )
        yield from self.pad_to(position)
        taken = 0
        while taken < nbytes:
            if self._block is None:
                yield
            room = self._room(nbytes - taken)
            source.read_into(taken, room)
            taken += self._settle(room)

    def pad_to(self, position: int) -> Iterator[None]:
        """Append zeros up to `position`, less than 4096 of them."""
        if (count := position - self.position) > 0:
            yield from self.put(_ZEROS[:count])

    def finish(self) -> Iterator[None]:
        """Pad to the end and hand over the last block."""
        yield from self.pad_to(self._end)
        if self._filled:
            self._pass_on()

    def _room(self, nbytes: int) -> memoryview:
        """The next up to `nbytes` bytes of the block."""
        assert self._block is not None
        return self._block[self._filled : self._filled + nbytes]

    def _settle(self, room: memoryview) -> int:
        """Count `room` as filled."""
        assert self._block is not None
        self._filled += len(room)
        if self._filled == len(self._block):
            self._pass_on()
        return len(room)

    def _pass_on(self) -> None:
        block, start, filled = self._block, self._start, self._filled
        assert block is not None
        self._block, self._start, self._filled = None, start + filled, 0
        self._hand_over(block, start, filled)


def _copy(room: memoryview, data: memoryview) -> None:
    if len(room) <= _SHORT_NBYTES:
        room[:] = data  # takes half the time of NumPy, which lets other threads run meanwhile
    else:
        np.copyto(np.frombuffer(room, dtype=np.uint8), np.frombuffer(data, dtype=np.uint8))
