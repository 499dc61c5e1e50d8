"""Meshes whose ranks do not rise: torch shards there by rank or by coordinate, and a DTensor does not tell which."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import anyshard
from anyshard.testing.fill import fill
from anyshard.testing.world import Worlds

pytestmark = pytest.mark.slow

SHARD: dict[str, Callable[[nn.Module, DeviceMesh], object]] = {
    "fsdp": lambda model, mesh: fully_shard(model, mesh=mesh),
    "tp": lambda model, mesh: parallelize_module(model, mesh, ColwiseParallel()),
}


def make_weight() -> torch.Tensor:
    weight = torch.empty(8, 4)
    fill(weight, "w")
    return weight


def refuse(kind: str, place: str) -> list[str]:
    """What a save of a model, of its optimizer alone, and a load say here."""
    model = nn.Linear(4, 8, bias=False)
    SHARD[kind](model, DeviceMesh("cpu", [3, 1, 0, 2]))
    optimizer = torch.optim.AdamW(model.named_parameters(), foreach=False)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    said = []
    for name, state in (("new", {"m": model}), ("new", {"o": optimizer}), ("old", {"m": model})):
        with pytest.raises(anyshard.InvalidAppState) as caught:
            (anyshard.save if name == "new" else anyshard.load)(f"{place}/{name}", state)
        said.append(str(caught.value))
    return said


@pytest.mark.parametrize("kind", SHARD)
def test_shards_on_a_mesh_that_does_not_rise_are_refused(worlds: Worlds, tmp_path: Path, kind: str) -> None:
    """On every rank, with and without the module, at save and at load: the bytes would come in another order."""
    anyshard.save(tmp_path / "old", {"m": nn.Linear(4, 8, bias=False)})
    for said in worlds(4).run(refuse, kind, str(tmp_path)):
        for name, message in zip(["m/weight", "o/state/weight/exp_avg", "m/weight"], said, strict=True):
            assert f"{name}: expected a mesh whose ranks rise along every sharded axis, found DeviceMesh" in message
    with pytest.raises(anyshard.CheckpointNotFound):
        anyshard.open(tmp_path / "new")


def save_beside_a_replicated_axis(place: str) -> None:
    """Only the axis that is not sharded has its ranks in another order."""
    mesh = DeviceMesh("cpu", [[2, 3], [0, 1]])
    anyshard.save(place, {"x": distribute_tensor(make_weight(), mesh, [Replicate(), Shard(0)])})


def test_the_order_of_replicas_does_not_matter(worlds: Worlds, tmp_path: Path) -> None:
    """Each rank of a sharded axis is where all of torch expects it."""
    worlds(4).run(save_beside_a_replicated_axis, str(tmp_path / "a"))
    assert make_weight().numpy().tobytes() == anyshard.open(tmp_path / "a")["x"].numpy().tobytes()
