"""Guarded reads of memory that others may free at any moment: the kernel copies it, and answers with an error where it is gone.

Reading such memory here would end the process. A memory file takes the bytes, from which they can be read safely.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Self, final

import numpy as np
from numpy.typing import NDArray

from anyshard.engine.words import WORD_NBYTES, view_memory
from anyshard.errors import TornSnapshot
from anyshard.records.addresses import show

_NBYTES = 1 << 20
_MAX_PIECES = 1024  # that the kernel takes in one call


@final
class GuardedReader:
    """Reads memory by address; a context, for one thread. Without memory files (not on Linux) it reads as anybody would."""

    def __init__(self) -> None:
        self._closing = ExitStack()
        self._file = -1
        if hasattr(os, "memfd_create"):
            self._file = os.memfd_create("anyshard-guarded", os.MFD_CLOEXEC)
            self._closing.callback(os.close, self._file)
            os.ftruncate(self._file, _NBYTES)
            self._map = self._closing.enter_context(mmap.mmap(self._file, _NBYTES))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def read_into(self, address: int, out: memoryview) -> bool:
        """Fill `out` with the bytes from `address` on; false if they are not all there."""
        for start in range(0, len(out), _NBYTES):
            piece = out[start : start + _NBYTES]
            if (found := self._read([view_memory(address + start, len(piece))], len(piece))) is None:
                return False
            piece[:] = found
        return True

    def read_words(self, addresses: Sequence[int]) -> NDArray[np.uint64] | None:
        """The 8 bytes at each address, or None if some are not there."""
        words = np.empty(len(addresses), dtype=np.uint64)
        for start in range(0, len(addresses), _MAX_PIECES):
            batch = [view_memory(address, WORD_NBYTES) for address in addresses[start : start + _MAX_PIECES]]
            if (found := self._read(batch, WORD_NBYTES * len(batch))) is None:
                return None
            words[start : start + len(batch)] = np.frombuffer(found, dtype=np.uint64)
        return words

    def _read(self, pieces: list[memoryview], nbytes: int) -> bytes | None:
        if self._file < 0:
            return b"".join(pieces)
        try:
            if os.pwritev(self._file, pieces, 0) < nbytes:  # it came to memory that is gone
                return None
        except OSError as error:
            if error.errno != errno.EFAULT:
                raise
            return None
        return self._map[:nbytes]


@final
class GuardedSource:
    """A source over a dense tensor in host memory that training may free or move: then `TornSnapshot`, and never a crash."""

    def __init__(self, source: Any, name: str, reader: GuardedReader) -> None:
        self._source = source
        self._name = name
        self._reader = reader

    @property
    def nbytes(self) -> int:
        """Length of the tensor's bytes."""
        return int(self._source.nbytes)

    def read_into(self, start: int, out: memoryview) -> None:
        """Copy the bytes [start, start + len(out)) into `out`."""
        address = self._source.data_ptr
        if not self._source.tensor.is_cpu:  # what is freed on a device stays readable
            self._source.read_into(start, out)
            return
        is_read = self._reader.read_into(address + start, out)
        if not is_read or self._source.tensor.data_ptr() != address:
            raise TornSnapshot(
                f"{show(self._name)}: expected a tensor that keeps its memory until it is copied, found that it was freed or "
                "moved. Call pending.staged() before what does that, or save with staging='eager'",
                addresses=(self._name,),
            )
