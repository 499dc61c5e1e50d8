"""Fixtures of the storage tests."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_MEMORY = Path("/dev/shm")


@pytest.fixture
def quick_path(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one (syncs cost nothing there), else on disk."""
    if not _MEMORY.is_dir():
        yield tmp_path
        return
    directory = Path(tempfile.mkdtemp(dir=_MEMORY, prefix="anyshard-test-"))
    yield directory
    shutil.rmtree(directory)
