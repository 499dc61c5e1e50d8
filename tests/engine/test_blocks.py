"""Blocks: aligned, reused, never beyond the byte budget."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from anyshard.engine.blocks import BlockPool, Loan
from anyshard.records.tail import CELL_NBYTES


def make_pool(num_blocks: int) -> BlockPool:
    return BlockPool(byte_budget=num_blocks * CELL_NBYTES, block_nbytes=CELL_NBYTES)


def test_blocks_are_page_aligned_and_writable() -> None:
    """A block can be handed to O_DIRECT as it is."""
    block = make_pool(1).acquire()
    assert block is not None
    block[:] = bytes(len(block))
    assert 0 == np.frombuffer(block, np.uint8).ctypes.data % 4096


def test_pool_never_exceeds_its_byte_budget() -> None:
    """When the budget is out, acquire gives up after its timeout instead of making one more block."""
    pool = make_pool(2)
    assert all(pool.acquire(0) is not None for _ in range(2))
    assert pool.acquire(0) is None
    assert 0 == pool.num_free


def test_released_block_is_the_next_one_out() -> None:
    """Warm memory is used before fresh memory."""
    pool = make_pool(2)
    block = pool.acquire()
    assert block is not None
    pool.release(block)
    assert block is pool.acquire()


@pytest.mark.parametrize(("byte_budget", "expected"), [(1, CELL_NBYTES), (3 * CELL_NBYTES + 1, 3 * CELL_NBYTES)])
def test_blocks_are_whole_cells_within_a_small_budget(byte_budget: int, expected: int) -> None:
    """A budget below the block size makes smaller blocks, but never less than one cell."""
    pool = BlockPool(byte_budget=byte_budget, block_nbytes=64 * CELL_NBYTES)
    assert expected == pool.block_nbytes
    assert 1 == pool.num_free


def test_loan_gives_back_what_it_still_has() -> None:
    """After an operation has failed all its blocks are free again."""
    pool = make_pool(3)
    loan = Loan(pool)
    blocks = [loan.acquire() for _ in range(3)]
    loan.release(blocks[0])
    loan.settle(is_in_use=False)
    assert 3 == pool.num_free


def test_loan_in_use_is_replaced_and_never_lent_again() -> None:
    """A block that a stuck thread may write to is struck off; a late release of it changes nothing."""
    pool = make_pool(1)
    loan = Loan(pool)
    block = loan.acquire()
    loan.settle(is_in_use=True)
    loan.release(block)
    assert 1 == pool.num_free
    assert block is not pool.acquire(0)


def test_thread_left_behind_gets_no_block_of_a_settled_loan() -> None:
    """What it took nobody would ever give back."""
    pool = make_pool(2)
    loan = Loan(pool)
    loan.settle(is_in_use=True)
    with pytest.raises(RuntimeError, match="is over"):
        loan.acquire(0)
    assert 2 == pool.num_free


def test_waiting_thread_gets_the_block_that_is_released() -> None:
    """A release wakes who waits for a block."""
    pool, found = make_pool(1), []
    block = pool.acquire()
    assert block is not None
    thread = threading.Thread(target=lambda: found.append(pool.acquire(30)))
    thread.start()
    pool.release(block)
    thread.join(timeout=30)
    assert [block] == found
