"""Arenas: memory in which a snapshot outlives the call that took it, used again by every asynchronous save.

The first touch of fresh memory costs ten times a copy into warm memory, so an arena is faulted in when it is made, and whoever
makes a pool keeps it. It is shared memory with a file descriptor: what is written through that is copied by the kernel, which
answers with an error where reading the source would crash. Nothing here knows what a snapshot is made of.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias, final

import numpy as np

from anyshard.errors import LimitExceeded

_PIECE_NBYTES = 8 << 20  # of one call into the kernel: another thread may want to know soon that the memory is there
_PAGE_NBYTES = 4096
_MADV_POPULATE_WRITE = 23  # Python has no name for it
_MEMORY = Path("/proc/meminfo")
_NEVER = -1

Register: TypeAlias = Callable[[memoryview], Callable[[], None]]


@final
class Arena:
    """Page-aligned shared memory, faulted in, lent to one snapshot at a time; not there in children that are forked.

    `memory` and `write` may be used by any threads. Once the arena is given back they raise `RuntimeError`, unless it was
    abandoned: then it stays with those who use it, and is freed when the last of them lets go.
    """

    def __init__(self, pages: _Pages) -> None:
        self._pages = pages
        self._is_over = False

    @property
    def nbytes(self) -> int:
        """Length of the memory."""
        return self._pages.nbytes

    @property
    def memory(self) -> memoryview:
        """The memory: writable, begins on a page border; what it holds is what the last snapshot left there."""
        self._check()
        return self._pages.memory

    @property
    def views(self) -> object:
        """Whatever was last set here, which may belong to an earlier snapshot; it lives as long as the memory."""
        self._check()
        return self._pages.views

    @views.setter
    def views(self, views: object) -> None:
        self._check()
        self._pages.views = views

    def write(self, position: int, data: memoryview) -> None:
        """Copy `data` to [position, position + len(data)) while other threads run.

        Where memory of `data` cannot be read any more this is an `OSError` (EFAULT), not a crash; without memfd it is one.
        """
        self._check()
        self._pages.write(position, data)

    def abandon(self) -> None:
        """Threads may go on using it for ever: it will never be handed out again."""
        self._pages.is_abandoned = True

    def _check(self) -> None:
        if self._is_over and not self._pages.is_abandoned:
            raise RuntimeError("expected an arena that is out of its pool, found one that was given back")

    def _end(self) -> _Pages | None:
        """The pages, for the one call that ends the loan."""
        if self._is_over:
            return None
        self._is_over = True
        return self._pages


@final
class ArenaPool:
    """Arenas that are kept from one snapshot to the next: never more than were out at the same time. Thread-safe.

    `register` is called with the memory of each new arena (to pin its pages for a device, say), and what it returns before the
    memory goes. In a forked child a pool is empty and makes arenas of its own.
    """

    def __init__(self, *, register: Register | None = None) -> None:
        self._register = register
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._idle: list[_Pages] = []
        self._num_hits = 0
        self._nbytes = 0
        self._is_closed = False

    @property
    def num_hits(self) -> int:
        """How many of the arenas handed out were there already."""
        return self._num_hits

    @property
    def nbytes(self) -> int:
        """Bytes of all arenas that the pool keeps or has out."""
        return self._nbytes

    def take(self, nbytes: int) -> Arena:
        """An arena of at least `nbytes` that nobody else has: the smallest idle one that will do, else a new one.

        A new one takes the place of the largest idle one, if there is any. Raises `LimitExceeded` if there is no such memory.
        """
        if os.getpid() != self._pid:  # its memory is the parent's, its lock may be held for ever
            self._begin()
        nbytes = max(1, -(-nbytes // _PAGE_NBYTES)) * _PAGE_NBYTES
        with self._lock:
            pages, outgrown = self._pick(nbytes)
        if pages is None:
            if outgrown is not None:
                outgrown.close()
            pages = self._make(nbytes)
        return Arena(pages)

    def give_back(self, arena: Arena) -> None:
        """Take an arena back, whose memory must not be touched again unless it was abandoned; a second time changes nothing."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            pages = arena._end()  # noqa: SLF001 - a loan is ended by its pool alone, under its lock
            if pages is None:
                return
            if not (pages.is_abandoned or self._is_closed):
                self._idle.append(pages)
                return
            self._nbytes -= pages.nbytes
        if not pages.is_abandoned:
            pages.close()

    def close(self) -> None:
        """Free the arenas that are idle now, and others when they are given back."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            self._nbytes -= sum(pages.nbytes for pages in idle)
        for pages in idle:
            if not pages.is_abandoned:
                pages.close()

    def _pick(self, nbytes: int) -> tuple[_Pages | None, _Pages | None]:
        """The idle pages to hand out; or those, if any, that are to make room for new ones."""
        self._nbytes -= sum(pages.nbytes for pages in self._idle if pages.is_abandoned)
        self._idle = sorted((pages for pages in self._idle if not pages.is_abandoned), key=lambda pages: pages.nbytes)
        pages = next((pages for pages in self._idle if pages.nbytes >= nbytes), None)
        if pages is not None:
            self._idle.remove(pages)
            self._num_hits += 1
            return pages, None
        if not self._idle:
            return None, None
        outgrown = self._idle.pop()
        self._nbytes -= outgrown.nbytes
        return None, outgrown

    def _make(self, nbytes: int) -> _Pages:
        pages = _make_pages(nbytes)
        if self._register is not None:
            pages.unregister = self._register(pages.memory)
        with self._lock:
            self._nbytes += nbytes
        return pages


class _Pages:
    """The memory of an arena, which outlives the loans."""

    def __init__(self, memory_map: mmap.mmap, descriptor: int) -> None:
        self._map = memory_map
        self._descriptor = descriptor
        self._end = weakref.finalize(self, _let_go, memory_map, descriptor, os.getpid())
        self._end.atexit = False  # threads may still use it then, and the system takes it back anyway
        self.memory = memoryview(memory_map)
        self.nbytes = len(memory_map)
        self.is_abandoned = False
        self.unregister: Callable[[], None] = _do_nothing
        self.views: object = None

    def write(self, position: int, data: memoryview) -> None:
        if not 0 <= position <= self.nbytes - data.nbytes:  # the kernel would make the file longer
            raise ValueError(f"expected to write within {self.nbytes} bytes, found {data.nbytes} at {position}")
        if self._descriptor == _NEVER:
            np.copyto(np.frombuffer(self.memory, np.uint8, data.nbytes, position), np.frombuffer(data, np.uint8))
            return
        done = 0
        while done < data.nbytes:
            try:
                done += os.pwrite(self._descriptor, data[done : done + _PIECE_NBYTES], position + done)
            except OSError as error:
                if error.errno != errno.EFBIG:  # RLIMIT_FSIZE holds for files in memory too, but not for what is mapped
                    raise
                raise _lacking(self.nbytes, "a limit on the length of files, ulimit -f") from error

    def close(self) -> None:
        """Free the memory now. Views of it that somebody still holds keep it alive, however."""
        self.unregister()
        self.views = None
        try:
            self.memory.release()
            self._map.close()
        except BufferError:
            return  # freed with the last view
        if self._descriptor != _NEVER:
            os.ftruncate(self._descriptor, 0)  # children that inherited the descriptor would keep the memory
        self._end()


def _do_nothing() -> None:
    return


def _let_go(memory_map: mmap.mmap, descriptor: int, owner: int) -> None:
    if os.getpid() != owner:
        # A forked child has not got this mapping. Unmapping it there would take away what lies at that place by now, so never.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory_map))
    if descriptor != _NEVER:
        os.close(descriptor)


def _make_pages(nbytes: int) -> _Pages:
    available = _find_available()
    if available is not None and nbytes > available:  # the system would rather kill a process than refuse
        raise _lacking(nbytes, f"{available} available")
    try:
        pages = _map_pages(nbytes)
    except (OSError, OverflowError, ValueError) as error:
        raise _lacking(nbytes, str(error)) from error
    try:
        _fault_in(pages)
    except OSError as error:
        pages.close()
        raise _lacking(nbytes, str(error)) from error
    return pages


def _map_pages(nbytes: int) -> _Pages:
    if not hasattr(os, "memfd_create"):
        return _Pages(mmap.mmap(-1, nbytes), _NEVER)
    descriptor = os.memfd_create("anyshard", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, nbytes)
        return _Pages(mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED), descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def _fault_in(pages: _Pages) -> None:
    """Have the kernel provide all pages now, huge ones where it can; raises `OSError` if it has not got them."""
    _advise(pages, getattr(mmap, "MADV_DONTFORK", None))
    _advise(pages, getattr(mmap, "MADV_HUGEPAGE", None))
    if not _advise(pages, _MADV_POPULATE_WRITE):
        np.frombuffer(pages.memory, np.uint8)[::_PAGE_NBYTES] = 0


def _advise(pages: _Pages, advice: int | None) -> bool:
    """Whether the kernel knows this advice."""
    if advice is None:
        return False
    try:
        pages._map.madvise(advice)  # noqa: SLF001 - made in this file, for this
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    return True


def _find_available() -> int | None:
    """Bytes of memory that the system can still give, if it says so."""
    try:
        lines = _MEMORY.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _lacking(nbytes: int, found: str) -> LimitExceeded:
    return LimitExceeded(
        f"expected {nbytes} bytes of memory for the snapshot of an asynchronous save, found too little ({found}): use a blocking "
        "save, which needs none, or spread the state over more ranks"
    )
