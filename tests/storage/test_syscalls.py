"""System calls by ctypes behave as those of Python do."""

from __future__ import annotations

import ctypes
import errno
from pathlib import Path
from types import SimpleNamespace

import pytest

from anyshard.storage.posix import syscalls


@pytest.mark.parametrize("last", [0, errno.EIO])
def test_interrupted_call_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int) -> None:
    """A signal does not fail an allocation (PEP 475); another error does."""
    answers = [errno.EINTR, errno.EINTR, last]

    def fallocate(*_arguments: object) -> int:
        ctypes.set_errno(code := answers.pop(0))
        return -1 if code else 0

    monkeypatch.setattr(syscalls, "_libc", lambda: SimpleNamespace(fallocate=fallocate))
    with (tmp_path / "a").open("wb") as file:
        if last:
            with pytest.raises(OSError, match="error"):
                syscalls.allocate(file.fileno(), 1)
        else:
            syscalls.allocate(file.fileno(), 1)
    assert [] == answers
