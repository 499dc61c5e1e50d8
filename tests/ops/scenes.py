"""Checkpoints to copy, and what may be found where a copy went."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import anyshard
from anyshard.records.names import FileKind, parse_name
from anyshard.storage.local import LocalStore
from anyshard.storage.memory import MemoryStore
from anyshard.storage.protocol import Store
from anyshard.storage.wrappers import Call, WrapperStore
from anyshard.testing.layouts import make_mesh
from anyshard.testing.training import fill_training

T = TypeVar("T")

# Every fourth moment at which something may come between is enough for most days.
some_or_all = pytest.mark.parametrize("stride", [pytest.param(4, id="some"), pytest.param(1, id="all", marks=pytest.mark.long)])


class Died(BaseException):
    """The process that copies is gone: no handler may run."""


class MortalStore(WrapperStore):
    """A store whose user dies at call number `dies_at` (from 0), before it or once it is done, and so makes no further one."""

    def __init__(self, inner: Store, dies_at: int, *, is_done: bool = False) -> None:
        super().__init__(inner)
        self.num_calls = 0
        self._dies_at = dies_at
        self._is_done = is_done

    def around(self, call: Call, run: Callable[[], T]) -> T:
        """Do the call while alive."""
        number, self.num_calls = self.num_calls, self.num_calls + 1
        if number == self._dies_at and self._is_done:
            run()
        if number >= self._dies_at:
            raise Died
        return run()


def make_training(seed: str = "") -> dict[str, Any]:
    """A small model and its optimizer, filled, on one rank."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    fill_training(model, optimizer, seed=seed)
    return {"model": model, "optimizer": optimizer, "extra": {"tokens": 7}}


def make_sharded() -> dict[str, Any]:
    """The same on all ranks of the job."""
    model = nn.Linear(8, 16, bias=False)
    fully_shard(model, mesh=make_mesh(("dp", torch.distributed.get_world_size())))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    fill_training(model, optimizer)
    return {"model": model, "optimizer": optimizer}


def save_sharded(place: str) -> None:
    """A case of `World`."""
    anyshard.save(place, make_sharded(), step=11)


def save_training() -> dict[str, bytes]:
    """The files of a checkpoint of one rank."""
    store = MemoryStore()
    anyshard.save(store, make_training(), step=3)
    return store.snapshot()


def read_tree(root: Path) -> dict[str, bytes]:
    """All files below a directory."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def write_tree(root: Path, files: Mapping[str, bytes]) -> None:
    """The reverse."""
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)


def read_files(store: Store) -> dict[str, bytes]:
    """All files of a store that tells them."""
    return (
        read_tree(Path(store.url))
        if isinstance(store, LocalStore)
        else store.snapshot()
        if isinstance(store, MemoryStore)
        else {}
    )


def is_sound(found: Mapping[str, bytes], files: Mapping[str, bytes]) -> bool:
    """Whether no reader can be misled: if a manifest is there, all of the files are, as they were."""
    manifests = [name for name in found if (parsed := parse_name(name)) and parsed.kind is FileKind.MANIFEST]
    return not manifests or all(found.get(name) == data for name, data in files.items())
