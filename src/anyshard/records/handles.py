"""Handles: how the engine reaches bytes without knowing what holds them.

A source yields the stored bytes of one shard (its region in C order, dense, little-endian); a destination takes parts of
them back. Adapters make handles for tensors; offline tools use the NumPy ones below. A handle never holds an open file.

"Bits" arrays: engine and handles move elements as raw bits. An element of 1, 2, 4 or 8 bytes is an unsigned integer of
that size, one of 16 bytes is `complex128` (NumPy has no 128-bit integer; assignment keeps its bits).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from anyshard.records.regions import decompose_run

BITS_DTYPES: Final[Mapping[int, np.dtype[Any]]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
    8: np.dtype("<u8"),
    16: np.dtype("<c16"),
}

_SHORT_NBYTES = 4096

Slices: TypeAlias = tuple[slice, ...]


class Source(Protocol):
    """Where the engine gets one shard's bytes. Calls come from one thread, in rising order of `start`."""

    @property
    def nbytes(self) -> int:
        """Length of the shard's bytes."""
        ...

    def read_into(self, start: int, out: memoryview) -> None:
        """Copy the bytes [start, start + len(out)) into `out`. Both borders lie on element borders."""
        ...


class Destination(Protocol):
    """Where the engine puts one wanted shard. Calls come from several threads, for disjoint parts."""

    def memory(self) -> memoryview | None:
        """Writable dense bytes of the whole shard in C order, or None if they have to go through `place`."""
        ...

    def place(self, where: Slices, bits: NDArray[np.generic]) -> None:
        """Copy `bits` (an array of the region's shape, stored dtype) to the slices `where` of the shard."""
        ...


class ArraySource:
    """Source over a bits array of any strides, which it does not copy."""

    def __init__(self, bits: NDArray[np.generic]) -> None:
        self._bits = bits
        self._dense = bits.reshape(-1).view(np.uint8) if bits.flags.c_contiguous else None

    @property
    def nbytes(self) -> int:
        return int(self._bits.nbytes)

    def read_into(self, start: int, out: memoryview) -> None:
        if self._dense is not None:
            part = self._dense[start : start + len(out)]
            if len(out) <= _SHORT_NBYTES:
                out[:] = part.data  # takes half the time of NumPy, which lets other threads run meanwhile
            else:
                np.copyto(np.frombuffer(out, dtype=np.uint8), part)
            return
        array, itemsize = self._bits, self._bits.itemsize
        target = np.frombuffer(out, dtype=array.dtype)
        position = 0
        offsets, lengths = decompose_run(array.shape, start // itemsize, start // itemsize + target.size)
        for offset, length in zip(offsets, lengths, strict=True):
            box = array[tuple(slice(o, o + n) for o, n in zip(offset, length, strict=True))]
            target[position : position + box.size].reshape(box.shape)[...] = box
            position += box.size


class ArrayDestination:
    """Destination over a writable bits array of any strides."""

    def __init__(self, bits: NDArray[np.generic]) -> None:
        self._bits = bits

    def memory(self) -> memoryview | None:
        return self._bits.reshape(-1).view(np.uint8).data if self._bits.flags.c_contiguous else None

    def place(self, where: Slices, bits: NDArray[np.generic]) -> None:
        self._bits[where] = bits


class RangeSource:
    """Source of the bytes [start, start + nbytes) of another source: a piece of a shard that several ranks share out."""

    def __init__(self, source: Source, start: int, nbytes: int) -> None:
        if not 0 <= start <= start + nbytes <= source.nbytes:
            raise ValueError(f"expected a range of a source of {source.nbytes} bytes, found [{start}, {start + nbytes})")
        self.source = source
        self.start = start
        self._nbytes = nbytes

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def read_into(self, start: int, out: memoryview) -> None:
        self.source.read_into(self.start + start, out)
