"""Create-if-absent of a whole file: written and synced under a temporary name, then given its final name if that is free.

No single primitive works on every mount (link(2) and renameat2 are both missing somewhere), so they are tried in order. Each is
safe by itself: it fails with `FileExistsError` if the name is taken and never replaces.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from contextlib import suppress

from anyshard.errors import StorageError
from anyshard.storage.posix.directories import sync_directory
from anyshard.storage.posix.new_file import NewFile, create_file, discarded_on_error
from anyshard.storage.posix.site import Site
from anyshard.storage.posix.syscalls import rename_noreplace

# (the synced temporary file, the final name, its content): make the final name appear or raise.
Primitive = Callable[[NewFile, str, bytes], None]

# EPERM: "this filesystem has no hard links". Going on is safe, the next primitive never replaces either.
_UNSUPPORTED = frozenset({errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.EOPNOTSUPP})


def by_rename(temporary: NewFile, name: str, _data: bytes) -> None:
    """renameat2 with RENAME_NOREPLACE: one step, no second name."""
    rename_noreplace(temporary.parent, temporary.name, name)


def by_link(temporary: NewFile, name: str, _data: bytes) -> None:
    """A hard link; the temporary name is removed afterwards."""
    os.link(temporary.name, name, src_dir_fd=temporary.parent, dst_dir_fd=temporary.parent, follow_symlinks=False)


def by_exclusive_open(temporary: NewFile, name: str, data: bytes) -> None:
    """Written under the final name, made exclusively: readers may see it half-written, its own digest tells them."""
    with discarded_on_error(temporary.parent, name) as file:
        file.write_all(data)
        os.fsync(file.descriptor)


def by_replacing(temporary: NewFile, name: str, _data: bytes) -> None:
    """A plain rename, which replaces: no way to create, only to put."""
    os.replace(temporary.name, name, src_dir_fd=temporary.parent, dst_dir_fd=temporary.parent)


PRIMITIVES: tuple[Primitive, ...] = (by_rename, by_link, by_exclusive_open)


def publish(site: Site, parent: int, data: bytes, *, temporary: str, primitives: Sequence[Primitive]) -> None:
    """Create the site's key in directory `parent` with `data` if it is absent, durably."""
    file = _create_temporary(site, parent, temporary)
    try:
        file.write_all(data)
        os.fsync(file.descriptor)
        site.announce("create.temporary", nbytes=len(data))
        _first_supported(primitives, file, site.key.rpartition("/")[2], data)
        site.announce("create.renamed", nbytes=len(data))
    finally:
        with suppress(OSError):  # after a rename it is gone; a leftover is recognised by its name
            file.discard()
        os.close(file.descriptor)
    sync_directory(parent)
    site.announce("create.durable", nbytes=len(data))


def _create_temporary(site: Site, parent: int, name: str) -> NewFile:
    try:
        return create_file(parent, name)
    except FileExistsError as error:
        # Not BlobExists: nobody has the key. Only a caller that uses its token twice can get here.
        raise StorageError(
            f"expected the temporary name {name} beside {site.path} to be free, found a file. Use a fresh token",
            file=site.key,
        ) from error


def _first_supported(primitives: Sequence[Primitive], file: NewFile, name: str, data: bytes) -> None:
    unsupported = OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    for primitive in primitives:
        try:
            return primitive(file, name, data)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            unsupported = error
    raise unsupported
