"""What the tests of the room share: the kinds of key-value stores, and what each hands to a rank."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from anyshard.coord.files import FileKeyValueStore
from anyshard.coord.memory import MemoryKeyValueStore
from anyshard.coord.protocol import KeyValueStore
from anyshard.coord.torch_dist import TorchKeyValueStore

Connect = Callable[[], KeyValueStore]


def serve_tcp() -> dist.TCPStore:
    """A server of torch on a port that the system chooses."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


def connect_tcp(server: dist.TCPStore) -> TorchKeyValueStore:
    """A connection of its own to that server, as a job's ranks have it: below a prefix."""
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=20))
    return TorchKeyValueStore(dist.PrefixStore("job", client))


@pytest.fixture(autouse=True)
def _no_thread_stays_behind() -> Iterator[None]:
    """The thread of a group ends with it; but an error that a test has caught holds frames, and they the group, in a cycle."""
    yield
    if any(thread.name == "anyshard-coord" for thread in threading.enumerate()):
        gc.collect()


@pytest.fixture(params=["memory", "tcp", "files"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Connect]:
    """How a rank connects to the key-value store of its job."""
    if request.param == "memory":
        yield MemoryKeyValueStore().clone
    elif request.param == "tcp":
        server = serve_tcp()
        yield lambda: connect_tcp(server)
    else:
        yield lambda: FileKeyValueStore(tmp_path)
