"""Every store, and every wrapper around one, passes the contract."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from anyshard.storage.local import LocalStore
from anyshard.storage.memory import MemoryStore
from anyshard.storage.posix.publish import PRIMITIVES, Primitive
from anyshard.storage.protocol import Store
from anyshard.storage.wrappers import (
    CountingStore,
    FaultStore,
    LatencyStore,
    SequentialStore,
    ThrottledStore,
    TimedStore,
    Verb,
    WrapperStore,
)
from anyshard.storage.wrappers.below import StoreBelow
from anyshard.testing.store_contract import MakeStore, StoreContract


class TestLocal(StoreContract):
    """On the disk of the test directory, where direct I/O and syncs are real."""

    @pytest.fixture
    def make_store(self, tmp_path: Path) -> MakeStore:
        numbers = itertools.count()
        return lambda: LocalStore(tmp_path / f"run/step_{next(numbers)}")


class TestLocalBuffered(StoreContract):
    @pytest.fixture
    def make_store(self, quick_path: Path) -> MakeStore:
        numbers = itertools.count()
        return lambda: LocalStore(quick_path / f"step_{next(numbers)}", direct=False)


@pytest.mark.parametrize("primitive", PRIMITIVES, ids=lambda primitive: primitive.__name__)
class TestLocalByOnePrimitive(StoreContract):
    """Each way to publish is enough by itself."""

    @pytest.fixture
    def make_store(self, quick_path: Path, primitive: Primitive) -> MakeStore:
        numbers = itertools.count()
        return lambda: LocalStore(quick_path / f"step_{next(numbers)}", primitives=(primitive,))


class TestMemory(StoreContract):
    @pytest.fixture
    def make_store(self) -> MakeStore:
        return MemoryStore


class TestWrapped(StoreContract):
    """All wrappers at once change nothing that the contract promises."""

    @pytest.fixture
    def make_store(self) -> MakeStore:
        return _wrapped


class TestBelow(StoreContract):
    """A store below another one is one like any other, on the disk, beside its siblings."""

    @pytest.fixture
    def make_store(self, quick_path: Path) -> MakeStore:
        numbers, outer = itertools.count(), LocalStore(quick_path / "run", direct=False)
        return lambda: StoreBelow(outer, f"step_{next(numbers)}/")


class TestSequential(StoreContract):
    @pytest.fixture
    def make_store(self) -> MakeStore:
        return lambda: SequentialStore(MemoryStore())


def _wrapped() -> Store:
    throttled = ThrottledStore(FaultStore(MemoryStore(), ()), nbytes_per_s=1.0, sleep=float)
    return TimedStore(WrapperStore(CountingStore(LatencyStore(throttled, {Verb.CREATE: 1.0}, sleep=float))), 60)
