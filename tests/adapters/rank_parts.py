"""What one rank of many holds of an app state, read through its sources, and all ranks' parts put together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from anyshard.adapters.capture import capture
from anyshard.adapters.tensors import array_bits, bits_of
from anyshard.records.captured import Captured
from tests.adapters.roundtrip import REGISTRY

Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank holds: the shape of each logical tensor, which of them are aliases, and the bytes of each region."""

    shapes: Mapping[str, tuple[int, ...]]
    aliases: Mapping[str, str]
    regions: Mapping[str, Mapping[Box, bytes]]
    captured: Captured


def look(app_state: Mapping[str, object]) -> Part:
    """Capture this rank's part and read all its sources; the rows must be in the order of the table."""
    captured = capture(app_state, registry=REGISTRY)
    table = captured.shards.tensors
    keys = [(int(tensor), captured.shards.region(row)) for row, tensor in enumerate(captured.shards.tensor)]
    assert sorted(keys) == keys
    regions: dict[str, dict[Box, bytes]] = {address: {} for address in table.addresses}
    for (tensor, box), source in zip(keys, captured.sources, strict=True):
        data = bytearray(source.nbytes)
        if data:
            source.read_into(0, memoryview(data))
        regions[table.addresses[tensor]][box] = bytes(data)
    aliases = {address: table.addresses[of] for address, of in zip(table.addresses, table.alias_of, strict=True) if of >= 0}
    shapes = {address: table.shape(row) for row, address in enumerate(table.addresses)}
    return Part(shapes, aliases, regions, captured)


def join(parts: Sequence[Part], address: str, like: torch.Tensor) -> bytes:
    """The bytes of a whole tensor, of which all ranks together must hold every element equally often."""
    whole: NDArray[Any] = np.zeros_like(array_bits(bits_of(like).contiguous().numpy()))
    held = np.zeros(like.shape, dtype=np.int64)
    for part in parts:
        for (offsets, lengths), data in part.regions[address].items():
            box = tuple(slice(start, start + length) for start, length in zip(offsets, lengths, strict=True))
            whole[box] = np.frombuffer(data, dtype=whole.dtype).reshape(lengths)
            held[box] += 1
    assert held.size == 0 or held.min() == held.max() > 0, f"{address}: {held}"
    return whole.tobytes()


def shard(shape: Sequence[int], mesh: DeviceMesh | None = None, *placements: Any) -> DTensor:
    """A tensor of ones, sharded along its first dim unless placements are given."""
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(torch.ones(tuple(shape)), mesh, placements or [Shard(0)], src_data_rank=None)
