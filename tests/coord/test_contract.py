"""Every key-value store passes the contract."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch.distributed as dist

from anyshard.coord.bounded import BoundedKeyValueStore, Caller
from anyshard.coord.files import FileKeyValueStore
from anyshard.coord.memory import MemoryKeyValueStore
from anyshard.coord.torch_dist import TorchKeyValueStore
from anyshard.testing.key_value_contract import KeyValueContract, MakeKeyValueStore
from tests.coord.conftest import connect_tcp, serve_tcp


class TestMemory(KeyValueContract):
    @pytest.fixture
    def make_store(self) -> MakeKeyValueStore:
        return MemoryKeyValueStore


@pytest.mark.slow
class TestBounded(KeyValueContract):
    @pytest.fixture
    def make_store(self) -> MakeKeyValueStore:
        return lambda: BoundedKeyValueStore(MemoryKeyValueStore(), Caller(), timeout_s=20)


class TestFiles(KeyValueContract):
    @pytest.fixture
    def make_store(self, tmp_path: Path) -> MakeKeyValueStore:
        numbers = itertools.count()

        def make() -> FileKeyValueStore:
            directory = tmp_path / str(next(numbers))
            directory.mkdir()
            return FileKeyValueStore(directory)

        return make


@pytest.mark.slow
class TestTcp(KeyValueContract):
    """Torch's usual store, through a connection as a rank has it."""

    @pytest.fixture
    def make_store(self) -> MakeKeyValueStore:
        servers = []

        def make() -> TorchKeyValueStore:
            servers.append(serve_tcp())
            return connect_tcp(servers[-1])

        return make


class TestHash(KeyValueContract):
    @pytest.fixture
    def make_store(self) -> MakeKeyValueStore:
        return lambda: TorchKeyValueStore(dist.HashStore())


class TestTorchFile(KeyValueContract):
    """Torch's own store in a file, of jobs that start with `file://`."""

    @pytest.fixture
    def make_store(self, tmp_path: Path) -> MakeKeyValueStore:
        numbers = itertools.count()
        return lambda: TorchKeyValueStore(dist.FileStore(str(tmp_path / str(next(numbers))), 1))
