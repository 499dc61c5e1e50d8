from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import anyshard
from anyshard.testing.layouts import make_mesh
from anyshard.testing.world import Worlds

pytestmark = pytest.mark.slow

NUM_RANKS = 4
# What no number of ranks divides, from 5 KiB to 16 MiB: 35 MiB, so that every rank's share is large enough to be cut.
SHAPES = ((2051, 2053), (1021, 2053), (1531, 769), (1021, 1031), (509, 1031), (311, 257), (1031,), (1291, 1))
COPIES = {"ddp": 4, "hsdp": 2, "fsdp": 1}

BUILDERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "hsdp": lambda model: fully_shard(model, mesh=make_mesh(("replicate", 2), ("shard", 2))),
    "fsdp": lambda model: fully_shard(model, mesh=make_mesh(("dp", NUM_RANKS))),
}


def save(layout: str, place: str) -> int:
    """Save the tensors on this rank in a layout; how many regions of them it holds."""
    model = BUILDERS[layout](nn.ParameterList(torch.zeros(shape) for shape in SHAPES))
    anyshard.save(place, {"model": model})
    local = [param.to_local() if isinstance(param, DTensor) else param for param in model.parameters()]
    return sum(tensor.numel() > 0 for tensor in local)


@pytest.mark.parametrize("layout", BUILDERS)
def test_ranks_write_equally_much(worlds: Worlds, tmp_path: Path, layout: str) -> None:
    """No rank writes more than 1.05 times the mean, and evening out adds at most one row of the index per rank."""
    held = worlds(NUM_RANKS).run(save, layout, str(tmp_path / "step_1"))
    with anyshard.open(tmp_path / "step_1") as checkpoint:
        written = dict.fromkeys(range(NUM_RANKS), 0)
        for blob in checkpoint.manifest.blobs:
            written[blob.rank] += blob.nbytes
        assert max(written.values()) <= 1.05 * sum(written.values()) / NUM_RANKS
        assert sum(held) // COPIES[layout] <= checkpoint.manifest.num_rows <= sum(held) // COPIES[layout] + NUM_RANKS
