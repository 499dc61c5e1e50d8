"""Every rank of a world in turn, in this process: real DTensors over torch's fake process group, which moves nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

T = TypeVar("T")


def on_each_rank(world_size: int, act: Callable[[], T]) -> list[T]:
    """What `act` gives on each rank."""
    results = []
    for rank in range(world_size):
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        try:
            results.append(act())
        finally:
            dist.destroy_process_group()
            _clear_sharding_prop_cache()  # it holds meshes that would tell the next rank this one's coordinate
    return results
