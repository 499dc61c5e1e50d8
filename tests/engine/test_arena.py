"""Arenas: warm, aligned, lent to one at a time, and no danger to anybody."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from anyshard.engine import arena as arena_module
from anyshard.engine.arena import ArenaPool
from anyshard.engine.words import view_memory
from anyshard.errors import LimitExceeded

MiB = 1 << 20


def address_of(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def num_resident(memory: memoryview) -> int:
    """Pages of some memory that are there."""
    states = (ctypes.c_ubyte * (len(memory) // 4096))()
    assert 0 == ctypes.CDLL(None).mincore(ctypes.c_void_p(address_of(memory)), ctypes.c_size_t(len(memory)), states)
    return sum(state & 1 for state in states)


def in_child(act) -> int:  # type: ignore[no-untyped-def]
    """What a forked child that does `act` ends with: the exit status, minus a signal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, of which the child uses nothing
        child = os.fork()
    if not child:
        try:
            os._exit(act())
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_an_arena_is_aligned_writable_and_there_in_full() -> None:
    """A copy into a new arena meets no page fault, and its memory can be handed to O_DIRECT."""
    memory = ArenaPool().take(MiB + 1).memory
    assert (MiB + 4096, 0) == (len(memory), address_of(memory) % 4096)
    assert len(memory) // 4096 == num_resident(memory)


@pytest.mark.parametrize("has_memfd", [True, False])
def test_write_copies_in_pieces(has_memfd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written is there, however long, and nothing beside it; also where the system has no memfd."""
    if not has_memfd:
        monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr(arena_module, "_PIECE_NBYTES", 1000)
    arena = ArenaPool().take(8192)
    arena.write(5, memoryview(bytes(range(250)) * 16))
    assert bytes(5) + bytes(range(250)) * 16 + bytes(8192 - 4005) == bytes(arena.memory)


def test_write_beyond_the_end_is_refused() -> None:
    """The file behind an arena never grows."""
    arena = ArenaPool().take(4096)
    with pytest.raises(ValueError, match="within 4096 bytes, found 2 at 4095"):
        arena.write(4095, memoryview(b"xx"))


def test_memory_that_is_gone_is_an_error_and_no_crash() -> None:
    """A source that was unmapped is answered by the kernel."""
    arena, gone = ArenaPool().take(4096), mmap.mmap(-1, 64 * MiB)
    source = view_memory(address_of(memoryview(gone)) + 32 * MiB, 4096)
    gone.close()
    with pytest.raises(OSError, match="Bad address") as caught:
        arena.write(0, source)
    assert errno.EFAULT == caught.value.errno


def test_an_arena_is_used_again() -> None:
    """The second snapshot of a size finds warm memory, and the pool counts that."""
    pool = ArenaPool()
    first = pool.take(4096)
    address = address_of(first.memory)
    pool.give_back(first)
    assert address == address_of(pool.take(100).memory)
    assert (1, 4096) == (pool.num_hits, pool.nbytes)


def test_the_smallest_that_will_do_is_taken() -> None:
    """A small snapshot leaves the large arena to a large one."""
    pool = ArenaPool()
    for arena in [pool.take(nbytes) for nbytes in (3 * 4096, 4096, 2 * 4096)]:
        pool.give_back(arena)
    assert [2 * 4096, 3 * 4096, 4096] == [pool.take(nbytes).nbytes for nbytes in (4097, 4097, 1)]


def test_a_new_arena_takes_the_place_of_an_idle_one() -> None:
    """A pool keeps no more arenas than were out at once, though states grow."""
    pool = ArenaPool()
    pool.give_back(pool.take(4096))
    pool.give_back(pool.take(2 * 4096))
    assert (0, 2 * 4096) == (pool.num_hits, pool.nbytes)


def test_giving_back_twice_changes_nothing() -> None:
    """A late second return does not take the arena from who has it now."""
    pool = ArenaPool()
    first = pool.take(4096)
    pool.give_back(first)
    second = pool.take(4096)
    pool.give_back(first)
    assert address_of(second.memory) != address_of(pool.take(4096).memory)


def test_an_arena_that_was_given_back_is_not_touched() -> None:
    """Who writes late hears of it instead of spoiling another snapshot."""
    pool = ArenaPool()
    arena = pool.take(4096)
    pool.give_back(arena)
    with pytest.raises(RuntimeError, match="was given back"):
        arena.write(0, memoryview(b"x"))
    with pytest.raises(RuntimeError, match="was given back"):
        len(arena.memory)


def test_an_abandoned_arena_is_never_handed_out_again() -> None:
    """Memory that a stuck thread may read stays as it is, and stays there."""
    pool = ArenaPool()
    arena = pool.take(4096)
    memory = arena.memory
    memory[:] = b"x" * 4096
    arena.abandon()
    pool.give_back(arena)
    assert (0, b"x" * 4096) == (pool.nbytes, bytes(arena.memory))
    pool.take(4096).memory[:] = b"y" * 4096
    del arena
    assert b"x" * 4096 == bytes(memory)


def test_an_arena_abandoned_after_its_return_is_struck_off() -> None:
    """A thread that notices late that it is stuck is heard as well."""
    pool = ArenaPool()
    arena = pool.take(4096)
    address = address_of(arena.memory)
    pool.give_back(arena)
    arena.abandon()
    assert address != address_of(pool.take(4096).memory)
    assert (0, 4096) == (pool.num_hits, pool.nbytes)


def test_close_frees_memory_and_descriptors() -> None:
    """After close nothing is left, also of arenas that came back later; the memory of those out can still be used."""
    before = len(os.listdir("/proc/self/fd"))
    pool = ArenaPool()
    out, idle = pool.take(4096), pool.take(4096)
    pool.give_back(idle)
    pool.close()
    out.memory[:1] = b"x"
    pool.give_back(out)
    assert (0, before) == (pool.nbytes, len(os.listdir("/proc/self/fd")))


def test_views_keep_memory_that_is_closed() -> None:
    """Closing an arena under a view of it is no crash: it is freed with the view."""
    pool = ArenaPool()
    arena = pool.take(4096)
    view = np.frombuffer(arena.memory, np.uint8)
    pool.give_back(arena)
    pool.close()
    assert 0 == int(view.sum())


def test_what_belongs_to_an_arena_stays_with_it() -> None:
    """Views that one snapshot makes are there for the next one, and gone with the memory."""
    pool = ArenaPool()
    arena = pool.take(4096)
    arena.views = "views"
    pool.give_back(arena)
    assert "views" == pool.take(4096).views
    assert None is pool.take(4096).views


def test_pages_are_registered_once_and_unregistered_before_they_go() -> None:
    """A device that pins arenas hears of each of them, while its memory is there."""
    heard: list[str] = []

    def register(memory: memoryview):  # type: ignore[no-untyped-def]
        heard.append(f"+{len(memory)}")
        return lambda: heard.append(f"-{len(memory)}")

    pool = ArenaPool(register=register)
    for _ in range(2):
        pool.give_back(pool.take(4096))
    pool.close()
    assert ["+4096", "-4096"] == heard


@pytest.mark.parametrize(("nbytes", "information"), [(1 << 45, "/proc/meminfo"), (1 << 62, "/nowhere"), (1 << 70, "/nowhere")])
def test_memory_that_cannot_be_had_is_refused(nbytes: int, information: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says how much was wanted and what to do, and the pool is as before."""
    monkeypatch.setattr(arena_module, "_MEMORY", Path(information))
    pool = ArenaPool()
    with pytest.raises(LimitExceeded, match=f"expected {nbytes} bytes of memory.*use a blocking save"):
        pool.take(nbytes)
    assert 0 == pool.nbytes


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOMEM])
def test_pages_are_touched_where_the_kernel_cannot_provide_them(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An old kernel only makes it slower; one without memory refuses."""

    def advise(pages: object, advice: object) -> bool:
        if number == errno.ENOMEM:
            raise OSError(number, os.strerror(number))
        return False

    monkeypatch.setattr(arena_module, "_advise", advise)
    if number == errno.ENOMEM:
        with pytest.raises(LimitExceeded, match="Cannot allocate memory"):
            ArenaPool().take(MiB)
    else:
        assert MiB // 4096 == num_resident(ArenaPool().take(MiB).memory)


def test_a_forked_child_cannot_spoil_an_arena() -> None:
    """The child has no such memory, its pool is empty, and what it gives back or lets go of harms nobody."""
    pool = ArenaPool()
    idle, out = pool.take(4096), pool.take(4096)
    pool.give_back(idle)

    def act() -> int:
        nonlocal pool, out
        pool.give_back(out)
        own = pool.take(4096)
        own.memory[:] = b"c" * 4096
        is_own = (pool.num_hits, pool.nbytes) == (0, 4096)
        del pool, out, own
        gc.collect()
        return int(not is_own)

    assert 0 == in_child(act)
    assert (bytes(4096), 1) == (bytes(out.memory), len(pool.take(4096).memory) // 4096)


def test_memory_of_an_arena_is_not_there_in_a_forked_child() -> None:
    """A child that writes into it dies of that and changes nothing."""
    arena = ArenaPool().take(4096)

    def act() -> int:
        import faulthandler

        faulthandler.disable()
        arena.memory[:1] = b"x"
        return 0

    assert -11 == in_child(act)
    assert b"\0" == bytes(arena.memory[:1])


def test_threads_never_share_an_arena() -> None:
    """Eight threads that take and give back at once each have memory of their own."""
    pool, barrier = ArenaPool(), threading.Barrier(8)

    def use(me: int) -> bool:
        barrier.wait(timeout=30)
        for _ in range(50):
            arena = pool.take(4096)
            arena.memory[:] = bytes([me]) * 4096
            is_mine = bytes([me]) * 4096 == bytes(arena.memory)
            pool.give_back(arena)
            if not is_mine:
                return False
        return True

    with ThreadPoolExecutor(8) as threads:
        assert [True] * 8 == list(threads.map(use, range(8)))
    assert 8 * 4096 >= pool.nbytes


def test_a_limit_on_the_length_of_files_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ulimit -f` holds for the memory file too, where it is the one that counts: the error says what to do."""

    def refuse(*_: object) -> int:
        raise OSError(errno.EFBIG, "File too large")

    arena = ArenaPool().take(4096)
    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(LimitExceeded, match="ulimit -f"):
        arena.write(0, memoryview(b"12345678"))
