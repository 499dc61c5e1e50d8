"""Blocks: the engine's only big buffers, page-aligned and used again by every operation.

The first touch of fresh memory costs ten times a copy into warm memory, so whoever makes a pool keeps it. Blocks are made when
they are first needed, so small checkpoints take little memory, and never beyond the byte budget.
"""

from __future__ import annotations

import mmap
import threading
import time

from anyshard.engine.bell import Bell
from anyshard.errors import LimitExceeded
from anyshard.records.tail import CELL_NBYTES


class BlockPool:
    """Writable blocks of `block_nbytes` (whole cells), at most `byte_budget` bytes in all, but at least one block.

    Thread-safe. A block is a page-aligned `memoryview`; what it holds is undefined. Blocks that were used before are handed out
    first. Who borrows says so by any object of its own, and gives back under the same name.
    """

    def __init__(self, *, byte_budget: int, block_nbytes: int) -> None:
        cells = max(1, min(byte_budget, block_nbytes) // CELL_NBYTES)
        self._block_nbytes = cells * CELL_NBYTES
        self._num_blocks = max(1, byte_budget // self._block_nbytes)
        self._blocks: list[memoryview] = []
        # The id of each block that is out, and who has it: the only record of that, so an interrupt cannot lose a block halfway.
        self._borrowers: dict[int, object] = {}
        self._lock = threading.Lock()
        self._bell = Bell()

    @property
    def block_nbytes(self) -> int:
        """Length of every block."""
        return self._block_nbytes

    @property
    def num_blocks(self) -> int:
        """How many blocks there can be."""
        return self._num_blocks

    @property
    def num_free(self) -> int:
        """How many blocks can be acquired now without waiting."""
        return self._num_blocks - len(self._borrowers)

    def acquire(self, timeout_s: float | None = None, *, borrower: object = None) -> memoryview | None:
        """A block that nobody else has, or None if none came free within `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (block := self._take(borrower)) is None:
            left_s = None if deadline is None else deadline - time.monotonic()
            if left_s is not None and left_s <= 0:
                return None
            self._bell.wait(left_s)
        return block

    def release(self, block: memoryview, *, borrower: object = None) -> None:
        """Take a block back, which must not be touched again; one that `borrower` does not have (any more) is passed over."""
        with self._lock:
            if id(block) not in self._borrowers or self._borrowers[id(block)] is not borrower:
                return
            del self._borrowers[id(block)]
        self._bell.ring()

    def settle(self, borrower: object, *, is_in_use: bool) -> None:
        """Take back all that `borrower` has; if it may still be written to, new blocks will be made in its place."""
        with self._lock:
            out = {number for number, has_it in self._borrowers.items() if has_it is borrower}
            if is_in_use:
                self._blocks = [block for block in self._blocks if id(block) not in out]
            for number in out:
                del self._borrowers[number]
        for _ in out:
            self._bell.ring()

    def _take(self, borrower: object) -> memoryview | None:
        with self._lock:
            if len(self._borrowers) >= self._num_blocks:
                return None
            block = next((block for block in self._blocks if id(block) not in self._borrowers), None)
            if block is None:
                block = _make_block(self._block_nbytes)
                self._blocks.append(block)
            self._borrowers[id(block)] = borrower
            return block


class Loan:
    """The blocks that one operation has out of a pool; `settle` gives back whatever it still has."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._is_over = False

    @property
    def block_nbytes(self) -> int:
        """Length of every block."""
        return self._pool.block_nbytes

    def acquire(self, timeout_s: float | None = None) -> memoryview | None:
        """As `BlockPool.acquire`; once the loan is settled a thread that was left behind gets no more blocks."""
        block = self._pool.acquire(timeout_s, borrower=self)
        if self._is_over and block is not None:
            self._pool.release(block, borrower=self)
            raise RuntimeError("the operation that these blocks were for is over")
        return block

    def release(self, block: memoryview) -> None:
        """As `BlockPool.release`; a block that was settled meanwhile is let go."""
        self._pool.release(block, borrower=self)

    def settle(self, *, is_in_use: bool) -> None:
        """End the loan. Blocks that a thread left behind may still write to are never handed to anybody else."""
        self._is_over = True
        self._pool.settle(self, is_in_use=is_in_use)


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
