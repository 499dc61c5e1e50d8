"""System calls that Python does not offer, and direct I/O. Made for Linux; where a call is missing it counts as unsupported."""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os

import numpy as np

# Direct I/O covers whole pages only, so that no page is ever shared with a buffered write to the same file.
DIRECT_ALIGNMENT = max(4096, mmap.PAGESIZE)

_RENAME_NOREPLACE = 1
_TMPFS = 0x01021994
_PROBE_DISTANCE = 1 << 20
_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


def rename_noreplace(parent: int, source: str, target: str) -> None:
    """Rename within one directory unless `target` exists (`FileExistsError`), atomically."""
    _call("renameat2", parent, os.fsencode(source), parent, os.fsencode(target), ctypes.c_uint(_RENAME_NOREPLACE))


def allocate(descriptor: int, nbytes: int, *, is_space_known: bool = True) -> None:
    """Reserve the blocks of a file of exactly `nbytes`, so that a full disk is found now; passes where it is not supported.

    Not `os.posix_fallocate`, which writes zeros to every block where the filesystem cannot reserve. Where `is_space_known` is
    false, what the filesystem says of its free space is not believed.
    """
    if nbytes == 0:
        return
    status = os.fstatvfs(descriptor)
    if is_space_known and status.f_blocks and nbytes > status.f_bavail * status.f_frsize:
        # Asking anyway would take all that is left from everybody else before it fails.
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    try:
        _call("fallocate", descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes))
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise


def reopen_direct(descriptor: int, flags: int) -> int | None:
    """A second descriptor of the same file, even if its name is gone, for direct I/O; None where that is refused or in vain."""
    direct = getattr(os, "O_DIRECT", None)
    if direct is None or _is_memory(descriptor):
        return None
    try:
        return os.open(f"/proc/self/fd/{descriptor}", flags | direct)
    except OSError:
        return None


def is_aligned(position: int, buffer: memoryview) -> bool:
    """Whether memory, position and length all suit direct I/O."""
    return (position | buffer.nbytes | _address(buffer)) % DIRECT_ALIGNMENT == 0


def is_resident(descriptor: int, position: int, nbytes: int) -> bool:
    """Whether a range of an open file seems to be in the page cache, by its last page and one of each MiB.

    Asking reads nothing (a read with RWF_NOWAIT would start a readahead). Linux answers yes for files that are not ours to write.
    """
    begin = position - position % mmap.ALLOCATIONGRANULARITY
    try:
        with mmap.mmap(descriptor, position + nbytes - begin, offset=begin, prot=mmap.PROT_READ) as window:
            address = _address(memoryview(window))
            last = (len(window) - 1) // mmap.PAGESIZE * mmap.PAGESIZE
            return all(_is_page_resident(address + probe) for probe in (*range(0, last, _PROBE_DISTANCE), last))
    except (OSError, ValueError):  # cannot tell, or the range ends behind the file
        return False


def _is_page_resident(address: int) -> bool:
    resident = ctypes.c_ubyte()
    _call("mincore", ctypes.c_void_p(address), ctypes.c_size_t(1), ctypes.byref(resident))
    return bool(resident.value & 1)


def _is_memory(descriptor: int) -> bool:
    # tmpfs takes O_DIRECT, but its page cache is all that it has.
    status = (ctypes.c_long * 64)()  # struct statfs begins with the type of the filesystem
    try:
        _call("fstatfs", descriptor, status)
    except OSError:
        return False
    return int(status[0]) == _TMPFS


def _address(buffer: memoryview) -> int:
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    function = getattr(_libc(), name, None)
    if function is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    ctypes.set_errno(0)
    while function(*arguments) != 0:
        if (code := ctypes.get_errno()) != errno.EINTR:  # a signal is no failure; its handler has run by now (as in PEP 475)
            raise OSError(code, os.strerror(code))
