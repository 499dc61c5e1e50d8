"""A file that this process made and that nobody else may have written: held open until it is durable or discarded."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NewFile:
    """A new, exclusively made file: its directory's descriptor, its name there, its own descriptor."""

    parent: int
    name: str
    descriptor: int

    def write_all(self, data: bytes) -> None:
        """Write `data` from the start."""
        view = memoryview(data)
        position = 0
        while position < len(view):
            position += os.pwrite(self.descriptor, view[position:], position)

    def is_named(self) -> bool:
        """Whether the name is still this file's."""
        try:
            named = os.stat(self.name, dir_fd=self.parent, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(named, os.fstat(self.descriptor))

    def discard(self) -> None:
        """Remove the name if it is still this file's, and nothing else."""
        if self.is_named():
            os.unlink(self.name, dir_fd=self.parent)


def create_file(parent: int, name: str) -> NewFile:
    """Make a new file; a name that is taken, also by a dangling link, is `FileExistsError`."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    return NewFile(parent, name, os.open(name, flags, 0o666, dir_fd=parent))


@contextmanager
def discarded_on_error(parent: int, name: str) -> Iterator[NewFile]:
    """A new file that is closed at the end, and removed as well if the body fails."""
    file = create_file(parent, name)
    try:
        yield file
    except BaseException:
        with suppress(OSError):  # the body's error is the one to report; a leftover is recognised by its name
            file.discard()
        raise
    finally:
        os.close(file.descriptor)
