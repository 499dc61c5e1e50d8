"""Filesystems that lack what others have, told by the system calls of this process: each alone, or all at once."""

from __future__ import annotations

import enum
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from anyshard.storage import local
from anyshard.storage.posix import syscalls

_SHORT_NBYTES = 60_001
_NAMES_MADE = ("open", "mkdir", "rmdir", "unlink", "stat", "replace", "link")


class Lie(enum.StrEnum):
    """What a filesystem has not, or does otherwise."""

    NO_DIRECT = "no O_DIRECT"
    NO_DIRECT_CALLS = "O_DIRECT opens and is refused"
    NO_LINKS = "no hard links"
    NO_RENAME = "no renameat2"
    NO_FALLOCATE = "no fallocate"
    NO_DIRECTORY_SYNC = "directories cannot be synced"
    NO_CASE = "names without case"
    ODD_BLOCKS = "odd blocks and short reads and writes"
    LATE_NAMES = "names are seen after a listing"


def tell(lies: Iterable[Lie], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process see such a filesystem everywhere, to the end of the test."""
    for lie in lies:
        _TELLERS[lie](monkeypatch)


def fail(code: int) -> None:
    """Raise what the operating system would."""
    raise OSError(code, os.strerror(code))


def _refuse_direct_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def opened(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            fail(errno.EINVAL)
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", opened)


def _refuse_direct_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pwrite", "preadv"):
        _wrap(monkeypatch, name, lambda fd, *_: fail(errno.EINVAL) if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT else None)


def _refuse_links(monkeypatch: pytest.MonkeyPatch) -> None:
    _wrap(monkeypatch, "link", lambda *_: fail(errno.EPERM))


def _refuse_rename(monkeypatch: pytest.MonkeyPatch) -> None:
    _refuse_call(monkeypatch, "renameat2", errno.EINVAL)


def _refuse_fallocate(monkeypatch: pytest.MonkeyPatch) -> None:
    _refuse_call(monkeypatch, "fallocate", errno.EOPNOTSUPP)


def _refuse_directory_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    _wrap(monkeypatch, "fsync", lambda fd: fail(errno.EINVAL) if stat.S_ISDIR(os.fstat(fd).st_mode) else None)


def _fold_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names below an open directory lose their case, as they do on a disk that does not keep it."""
    for name in _NAMES_MADE:
        monkeypatch.setattr(os, name, _folding(getattr(os, name)))
    call = syscalls._call

    def called(name: str, *arguments: object) -> None:
        folded = [part.decode().casefold().encode() if isinstance(part, bytes) else part for part in arguments]
        call(name, *folded)

    monkeypatch.setattr(syscalls, "_call", called)


def _folding(function: Callable[..., Any]) -> Callable[..., Any]:
    def folded(*args: Any, **options: Any) -> Any:
        if any(name.endswith("dir_fd") for name in options):
            args = tuple(arg.casefold() if isinstance(arg, str) else arg for arg in args)
        return function(*args, **options)

    return folded


def _cut_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, preadv, fstatvfs = os.pwrite, os.preadv, os.fstatvfs
    monkeypatch.setattr(os, "pwrite", lambda fd, data, position: pwrite(fd, memoryview(data)[:_SHORT_NBYTES], position))
    monkeypatch.setattr(os, "preadv", lambda fd, views, position: preadv(fd, [views[0][:_SHORT_NBYTES]], position))
    monkeypatch.setattr(os, "fstatvfs", lambda fd: os.statvfs_result((999, 777, *fstatvfs(fd)[2:])))


def _hide_new_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A blob cannot be opened until its directory was listed, as where a client remembers that the name was absent."""
    real, listdir = local.open_reader, os.listdir
    seen: set[tuple[int, str]] = set()

    def opened(site: Any, parent: int, *, direct: bool) -> Any:
        if (os.fstat(parent).st_ino, site.key.rpartition("/")[2]) not in seen:
            fail(errno.ENOENT)
        return real(site, parent, direct=direct)

    def listed(path: Any) -> list[str]:
        names: list[str] = listdir(path)
        if isinstance(path, int):
            seen.update((os.fstat(path).st_ino, name) for name in names)
        return names

    monkeypatch.setattr(local, "open_reader", opened)
    monkeypatch.setattr(os, "listdir", listed)


def _wrap(monkeypatch: pytest.MonkeyPatch, name: str, first: Callable[..., None]) -> None:
    """Have `first` look at the arguments of a function of `os`; what it raises is the answer."""
    real = getattr(os, name)

    def wrapped(*args: Any, **options: Any) -> Any:
        first(*args)
        return real(*args, **options)

    monkeypatch.setattr(os, name, wrapped)


def _refuse_call(monkeypatch: pytest.MonkeyPatch, refused: str, code: int) -> None:
    real = syscalls._call

    def called(name: str, *arguments: object) -> None:
        if name == refused:
            fail(code)
        real(name, *arguments)

    monkeypatch.setattr(syscalls, "_call", called)


_TELLERS = {
    Lie.NO_DIRECT: _refuse_direct_opens,
    Lie.NO_DIRECT_CALLS: _refuse_direct_calls,
    Lie.NO_LINKS: _refuse_links,
    Lie.NO_RENAME: _refuse_rename,
    Lie.NO_FALLOCATE: _refuse_fallocate,
    Lie.NO_DIRECTORY_SYNC: _refuse_directory_sync,
    Lie.NO_CASE: _fold_names,
    Lie.ODD_BLOCKS: _cut_transfers,
    Lie.LATE_NAMES: _hide_new_names,
}
