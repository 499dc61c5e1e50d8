"""Bookkeeping of one blob being written: did the writes cover it exactly?"""

from __future__ import annotations

import threading

from anyshard.errors import StorageError


class Coverage:
    """Counts what was written to one blob, so that a gap or a write past the end is an error and not a hole of zeros."""

    def __init__(self, file: str, nbytes: int | None) -> None:
        self._file = file
        self._nbytes = nbytes
        self._written = 0
        self._end = 0
        self._lock = threading.Lock()

    def check(self, position: int, nbytes: int) -> None:
        """Refuse a write that is not inside the blob."""
        if position < 0 or (self._nbytes is not None and position + nbytes > self._nbytes):
            raise StorageError(
                f"{self._file}: expected writes within its {self._nbytes} bytes, found {nbytes} bytes at {position}. "
                "The blob is given up: this is a defect of the caller",
                file=self._file,
            )

    def add(self, position: int, nbytes: int) -> None:
        """Count a write that was done."""
        with self._lock:
            self._written += nbytes
            self._end = max(self._end, position + nbytes)

    def check_complete(self) -> int:
        """The length of the blob, all of which was written once; `StorageError` if the counts say otherwise."""
        nbytes = self._end if self._nbytes is None else self._nbytes
        if self._written != nbytes or self._end != nbytes:
            raise StorageError(
                f"{self._file}: expected {nbytes} bytes to be written once, found {self._written} bytes written up to position "
                f"{self._end}. The blob is given up: this is a defect of the caller",
                file=self._file,
            )
        return nbytes
