"""Fixtures of the engine's tests."""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Iterator

import pytest

from .scene import CtrlC, join_threads


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """An event to block threads on; opened at the end so that none stays behind."""
    event = threading.Event()
    yield event
    event.set()
    join_threads("test-", "anyshard-")


@pytest.fixture
def ctrl_c() -> Iterator[CtrlC]:
    """A Ctrl-C for threads to press."""
    keyboard = CtrlC()
    before = signal.signal(signal.SIGINT, keyboard.handle)
    yield keyboard
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def few_files() -> Iterator[None]:
    """A limit of open files that 400 blobs do not fit in."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (380, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
