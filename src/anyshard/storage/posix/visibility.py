"""Names that are there and are not seen yet: waiting for them, and asking for their directory anew meanwhile.

A client of a network filesystem remembers that a name was absent (NFS up to a minute), and FUSE programs hear of other hosts'
names late. Listing the directory makes most of them ask their server again.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar, final

from anyshard.errors import BlobNotFound, InvalidPath
from anyshard.storage.posix.directories import opened_directory
from anyshard.storage.posix.site import Site, nearest_existing

T = TypeVar("T")

_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 1.0


@final
class Visibility:
    """How long the names below one root are waited for. Usable from several threads.

    A name that was missing to the end says much about the next one: while names go on missing they share one wait, so that a
    checkpoint of which a thousand files are gone is not waited for a thousand times.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._missed_s: float | None = None  # when a name was last given up

    def find(self, attempt: Callable[[], T], site: Site, directories: Sequence[str]) -> T:
        """What `attempt` returns once it finds the site's key in these directories; else `BlobNotFound` says how it was sought.

        Without a timeout the first "no such file" is the answer.
        """
        deadline_s: float | None = None
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                return retry_stale(attempt)
            except (FileNotFoundError, NotADirectoryError) as missing:
                now_s = time.monotonic()
                if self._timeout_s <= 0:
                    raise
                if deadline_s is not None and now_s >= deadline_s:
                    self._missed_s = now_s
                    raise self._not_found(site) from missing
                deadline_s = self._end_of_wait(now_s) if deadline_s is None else deadline_s
            refresh(site.url, directories)
            time.sleep(min(pause_s, max(deadline_s - now_s, 0.0)))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _end_of_wait(self, now_s: float) -> float:
        missed_s = self._missed_s
        is_one_wait = missed_s is not None and now_s - missed_s <= self._timeout_s
        return now_s if is_one_wait else now_s + self._timeout_s

    def _not_found(self, site: Site) -> BlobNotFound:
        return BlobNotFound(
            f"could not open {site.path}: found nothing there, also when its directory was listed anew (a host may be late to "
            f"see what others have made; here that is waited for up to {self._timeout_s:g} s). Check the path, that nobody "
            "removed it meanwhile, and that the directory is the same on all hosts",
            file=site.key,
            errno=errno.ENOENT,
        )


def retry_stale(attempt: Callable[[], T]) -> T:
    """What `attempt` returns; once more if the handle of a directory on its way was stale (ESTALE), as on old network clients."""
    try:
        return attempt()
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
    return attempt()


def refresh(root: str, directories: Sequence[str]) -> None:
    """Have the filesystem look again at what is in the directory, or in the deepest one above it that it knows."""
    for depth in range(len(directories), -1, -1):
        with suppress(OSError, InvalidPath), opened_directory(root, directories[:depth]) as directory:
            os.listdir(directory)
            return
    with suppress(OSError):
        os.listdir(nearest_existing(root))
