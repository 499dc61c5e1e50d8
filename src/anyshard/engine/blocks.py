"""Blocks: the engine's only big buffers, page-aligned and used again by every operation.

The first touch of fresh memory costs ten times a copy into warm memory, so whoever makes a pool keeps it. Blocks are made when
they are first needed, so small checkpoints take little memory, and never beyond the byte budget.
"""

from __future__ import annotations

import mmap
import threading

from anyshard.errors import LimitExceeded
from anyshard.records.tail import CELL_NBYTES


class BlockPool:
    """Writable blocks of `block_nbytes` (whole cells), at most `byte_budget` bytes in all, but at least one block.

    Thread-safe. A block is a page-aligned `memoryview`; what it holds is undefined. The block released last is handed out first.
    """

    def __init__(self, *, byte_budget: int, block_nbytes: int) -> None:
        cells = max(1, min(byte_budget, block_nbytes) // CELL_NBYTES)
        self._block_nbytes = cells * CELL_NBYTES
        self._num_blocks = max(1, byte_budget // self._block_nbytes)
        self._num_made = 0
        self._free: list[memoryview] = []
        self._changed = threading.Condition()

    @property
    def block_nbytes(self) -> int:
        """Length of every block."""
        return self._block_nbytes

    @property
    def num_free(self) -> int:
        """How many blocks can be acquired now without waiting."""
        return self._num_blocks - self._num_made + len(self._free)

    def acquire(self, timeout_s: float | None = None) -> memoryview | None:
        """A block that nobody else has, or None if none came free within `timeout_s`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.num_free, timeout_s):
                return None
            if self._free:
                return self._free.pop()
            block = _make_block(self._block_nbytes)
            self._num_made += 1
            return block

    def release(self, block: memoryview) -> None:
        """Give a block back; the caller must not touch it again."""
        with self._changed:
            self._free.append(block)
            self._changed.notify()

    def forget(self, num_blocks: int) -> None:
        """Strike blocks that will never be released, so that new ones can be made in their place."""
        with self._changed:
            self._num_made -= num_blocks
            self._changed.notify(num_blocks)


class Loan:
    """The blocks that one operation has out of a pool; `settle` gives back whatever it still has."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._out: dict[int, memoryview] = {}

    @property
    def block_nbytes(self) -> int:
        """Length of every block."""
        return self._pool.block_nbytes

    def acquire(self, timeout_s: float | None = None) -> memoryview | None:
        """As `BlockPool.acquire`."""
        if (block := self._pool.acquire(timeout_s)) is not None:
            self._out[id(block)] = block
        return block

    def release(self, block: memoryview) -> None:
        """As `BlockPool.release`; a block that was settled meanwhile is let go."""
        if self._out.pop(id(block), None) is not None:
            self._pool.release(block)

    def settle(self, *, is_in_use: bool) -> None:
        """End the loan. Blocks that a thread left behind may still write to are never handed to anybody else."""
        blocks = list(self._out.values())
        self._out.clear()
        if is_in_use:
            self._pool.forget(len(blocks))
            return
        for block in blocks:
            self._pool.release(block)


def _make_block(nbytes: int) -> memoryview:
    """Fresh aligned memory; huge pages make touching it cheaper and leave the kernel less to pin for O_DIRECT."""
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise LimitExceeded(f"expected {nbytes} bytes of memory for a block, found too few: lower byte_budget") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        _advise(memory, mmap.MADV_HUGEPAGE)
    return memoryview(memory)


def _advise(memory: mmap.mmap, advice: int) -> None:
    try:
        memory.madvise(advice)
    except OSError:  # a kernel without huge pages: only slower
        return
