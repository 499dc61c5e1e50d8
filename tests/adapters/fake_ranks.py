"""Every rank of a world in turn, in this process: real DTensors over torch's fake process group, which moves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

T = TypeVar("T")


@contextmanager
def as_rank(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # it holds meshes that would tell the next rank this one's coordinate


def on_each_rank(world_size: int, act: Callable[[], T]) -> list[T]:
    """What `act` gives on each rank."""
    results = []
    for rank in range(world_size):
        with as_rank(rank, world_size):
            results.append(act())
    return results
