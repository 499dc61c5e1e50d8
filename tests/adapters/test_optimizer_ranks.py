"""Optimizer state beside sharded parameters: what belongs to the whole parameter, and what to one shard of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from anyshard.adapters.tensors import local_tensor
from anyshard.records.addresses import component
from anyshard.records.values import TensorMark
from tests.adapters.fake_ranks import on_each_rank
from tests.adapters.rank_parts import Part, look, shard


class Rows(torch.optim.Optimizer):
    """Keeps one number per row of this rank's shard, a plain tensor, as factored optimizers do; and two of other kinds."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        for group in self.param_groups:
            for param in group["params"]:
                local = local_tensor(param, "param").detach()
                whole = torch.zeros(param.shape)
                self.state[param] = {
                    "rows": local.sum(1),
                    "step": torch.tensor(1.0),
                    "whole": whole,
                    "avg": torch.ones_like(param),
                }


def look_at_rows(num_rows: int, mesh: DeviceMesh | None = None, *placements: Any) -> Part:
    module = nn.Module()
    module.w = nn.Parameter(shard((num_rows, 2), mesh, *placements))
    return look({"opt": Rows(module.parameters()), "m": module})


def list_state(part: Part) -> list[str]:
    return [address.removeprefix("opt/state/w/") for address in part.shapes if address.startswith("opt/state/w/r")]


def test_state_of_a_shard_is_stored_under_the_regions_of_the_shard() -> None:
    """A plain tensor of another shape than the parameter has an address per shard; a rank without a shard stores none."""
    parts = on_each_rank(3, lambda: look_at_rows(3 - 1))
    assert [["rows/~0shard 0,0-1,2"], ["rows/~0shard 1,0-1,2"], []] == [list_state(part) for part in parts]
    trees: list[Any] = [part.captured.trees["opt"]["state"]["w"] for part in parts]  # type: ignore[index]
    assert [["~shard 0,0-1,2"], ["~shard 1,0-1,2"], []] == [list(tree["rows"]) for tree in trees]
    assert ["opt/state/w/step"] * 3 == [tree["step"].address for tree in trees]
    assert [{"opt/state/w/whole": (2, 2), "opt/state/w/avg": (2, 2)}] * 3 == [
        {address: shape for address, shape in part.shapes.items() if address.endswith(("/whole", "/avg"))} for part in parts
    ]


def test_lists_with_state_of_a_shard_go_below_its_key_as_a_whole() -> None:
    """Only dicts of several ranks can be united, so the key stands around the list and not in it."""

    def act() -> object:
        module = nn.Module()
        module.w = nn.Parameter(shard((2, 2)))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        optimizer.state[module.w] = {"history": [3, torch.ones(5)]}
        tree: Any = look({"opt": optimizer, "m": module}).captured.trees["opt"]
        return tree["state"]["w"]["history"]

    keys = [f"~shard {rank},0-1,2" for rank in range(2)]
    marks = [TensorMark(f"opt/state/w/history/{component(key)}/1", "tensor") for key in keys]
    assert [{key: [3, mark]} for key, mark in zip(keys, marks, strict=True)] == on_each_rank(2, act)


def test_replicas_of_a_shard_share_the_address_of_its_state() -> None:
    """Ranks that hold the same regions hold the same state; one rank that holds several has them all in the key."""

    def act() -> list[str]:
        mesh = init_device_mesh("cpu", (2, 2))
        return list_state(look_at_rows(8, mesh, Replicate(), _StridedShard(0, split_factor=2)))

    first, second = "rows/~0shard 0,0-2,2 4,0-2,2", "rows/~0shard 2,0-2,2 6,0-2,2"
    assert [[first], [second], [first], [second]] == on_each_rank(4, act)


def test_state_beside_a_parameter_that_is_whole_everywhere_is_not_per_shard() -> None:
    """A replicated DTensor, or one sharded over a single rank, has state like a plain parameter."""

    def act() -> list[list[str]]:
        mesh = init_device_mesh("cpu", (2, 1))
        return [list_state(look_at_rows(4, mesh, Replicate(), placement)) for placement in (Replicate(), Shard(0))]

    assert [[["rows"], ["rows"]]] * 2 == on_each_rank(2, act)
