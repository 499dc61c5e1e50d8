"""Filesystem objects of fsspec: which thread and which process uses which."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, final


@final
class Instances:
    """The filesystem objects of one store, made when they are needed. None serves two threads at once, unless they are `shared`.

    Clients as those for SFTP and FTP have one connection on which answers get mixed up, or never arrive, when two threads ask.
    A forked child never uses nor frees the objects of its parent, but makes its own: the two share sockets and what watches
    them, and closing such a connection here would take it away from the parent.
    """

    def __init__(self, make: Callable[[], Any], *, shared: bool) -> None:
        self._make = make
        self._shared = shared
        self._idle: dict[int, list[Any]] = {}  # by process
        weakref.finalize(self, _let_go, self._idle).atexit = False

    def take(self) -> Any:
        """An object that nobody else uses until `give`. There is no lock, which a fork could find held."""
        idle = self._idle.setdefault(os.getpid(), [])
        with suppress(IndexError):
            return idle[0] if self._shared else idle.pop()
        made = self._make()
        if self._shared:
            idle.append(made)  # of two threads here at once one uses an object that the next ones do not
        return made

    def give(self, filesystem: Any) -> None:
        """Take an object back for the next one who asks."""
        if not self._shared:
            self._idle.setdefault(os.getpid(), []).append(filesystem)

    @contextmanager
    def taken(self) -> Iterator[Any]:
        """An object that the caller gives back later. After an error here that cannot come from its connection it is back."""
        filesystem = self.take()
        try:
            yield filesystem
        except (FileNotFoundError, FileExistsError):
            self.give(filesystem)
            raise

    @contextmanager
    def lent(self) -> Iterator[Any]:
        """An object for the time of a call. After an error that may come from its connection it is not used again."""
        with self.taken() as filesystem:
            yield filesystem
        self.give(filesystem)


def _let_go(idle: dict[int, list[Any]]) -> None:
    for process, filesystems in idle.items():
        if process != os.getpid():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(filesystems))
