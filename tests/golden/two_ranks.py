"""What two ranks of one job hold in the golden that they save together. Never change it: add further goldens instead."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import anyshard
from anyshard.testing.layouts import make_mesh
from tests.golden.contents import fill

Make = Callable[[tuple[int, ...], str, int], torch.Tensor]

OPTIMIZER = "optimizer/state/weight"
# What is stored, by address: shape, dtype and seed.
TENSORS: Mapping[str, tuple[tuple[int, ...], str, int]] = {
    "model/bias": ((5,), "float32", 2),  # on both ranks
    "model/weight": ((5, 3), "float32", 1),  # three rows on rank 0, two on rank 1
    f"{OPTIMIZER}/exp_avg": ((5, 3), "bfloat16", 3),
    f"{OPTIMIZER}/rows/~0shard 0,0-3,3": ((3,), "float32", 4),  # state of one shard of the weight
    f"{OPTIMIZER}/rows/~0shard 3,0-2,3": ((2,), "float32", 5),
    "loader/order/~r0": ((4,), "int64", 6),
    "loader/order/~r1": ((6,), "int64", 7),
    "stages/both/layers.2": ((2,), "uint8", 10),  # on rank 1 only, whose dict `both` is empty on rank 0
    "stages/layers.0": ((2, 2), "int32", 8),  # on rank 0 only
    "stages/layers.1": ((3,), "uint8", 9),  # on rank 1 only
}
OWN_VALUES = ({"b": 2, "a": (1, 2**70)}, [1, 2])  # of rank 0 and of rank 1


def whole(address: str, make: Make = fill) -> torch.Tensor:
    """A stored tensor."""
    shape, dtype, seed = TENSORS[address]
    return make(shape, dtype, seed << 8)  # which lets `fill` give other bytes for each seed


def make_loader(rank: int, make: Make = fill) -> dict[str, Any]:
    """What a data loader keeps, with a tensor that is another one on each rank."""
    return {"position": 10 + rank, "order": whole(f"loader/order/~r{rank}", make)}


def make_stage(rank: int, make: Make = fill) -> dict[str, Any]:
    """Tensors and values that one rank alone has."""
    both = {"layers.2": whole("stages/both/layers.2", make)} if rank == 1 else {}
    return {f"layers.{rank}": whole(f"stages/layers.{rank}", make), f"of_{rank}": OWN_VALUES[rank], "both": both}


def make_state(rank: int, make: Make = fill) -> dict[str, Any]:
    """The app state of one of the two ranks; `make` gives its tensors their content."""
    model = nn.Linear(3, 5)
    model.weight = nn.Parameter(_shard(whole("model/weight", make)))
    model.bias = nn.Parameter(whole("model/bias", make))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    rows = whole(f"{OPTIMIZER}/rows/~0shard {('0,0-3,3', '3,0-2,3')[rank]}", make)
    optimizer.state[model.weight] = {"count": 4, "exp_avg": _shard(whole(f"{OPTIMIZER}/exp_avg", make)), "rows": rows}
    return {
        "model": model,
        "optimizer": optimizer,
        "loader": anyshard.PerRank(make_loader(rank, make), key=["loader", rank]),
        "mine": anyshard.PerRank({"rank": rank}),
        "alike": anyshard.PerRank([1.5], key="alike"),
        "rng": anyshard.RNGState(),
        "stages": make_stage(rank, make),
        "values": {"epoch": 3},
        **({"last": "of rank 1"} if rank == 1 else {}),
    }


def save(path: str) -> None:
    """Save it on this rank."""
    state = make_state(dist.get_rank())
    seed_all(dist.get_rank())  # after the model is made, which draws numbers
    anyshard.save(path, state, step=7)


def load(path: str) -> tuple[object, object]:
    """What this rank should hold after a load of all but the random state, and what it does."""
    rank = dist.get_rank()
    expected, live = make_state(rank), make_state(rank, _make_blank)
    live |= {"values": None, "mine": anyshard.PerRank(None), "alike": anyshard.PerRank(None, key="alike")}
    live["stages"][f"of_{rank}"] = None
    if rank == 0:  # an empty dict would take whatever is stored there
        del expected["stages"]["both"], live["stages"]["both"]
    anyshard.load(path, live, exclude=["rng"])
    return describe(expected), describe(live)


def load_random_state(path: str) -> tuple[object, object]:
    """What this rank should draw after a load, and what it does."""
    rank = dist.get_rank()
    seed_all(rank)
    expected = draw()
    anyshard.load(path, make_state(rank, _make_blank), only=["rng"])
    return expected, draw()


def seed_all(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the global state is what a random state is about
    torch.manual_seed(seed)


def draw() -> tuple[float, float, float]:
    """The next number of each of them."""
    return random.random(), np.random.rand(), torch.rand(1).item()  # noqa: NPY002


def describe(state: Mapping[str, Any]) -> object:
    """All of an app state that was saved, as plain values; tensors as shape and bytes."""
    optimizer = state["optimizer"]
    own = {name: state[name].value for name in ("loader", "mine", "alike")}
    parts = {name: value for name, value in state.items() if name in ("stages", "values", "last")}
    return _plain([state["model"].state_dict(), list(optimizer.state.values()), optimizer.param_groups[0]["lr"], own, parts])


def _plain(node: Any) -> object:
    if isinstance(node, dict):
        return {key: _plain(value) for key, value in node.items()}
    if isinstance(node, torch.Tensor):
        local = (node.to_local() if isinstance(node, DTensor) else node).detach()
        return tuple(local.shape), local.reshape(-1).view(torch.uint8).numpy().tobytes()
    return [_plain(value) for value in node] if isinstance(node, list) else node


def _make_blank(shape: tuple[int, ...], dtype: str, _seed: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=getattr(torch, dtype))


def _shard(tensor: torch.Tensor) -> DTensor:
    return distribute_tensor(tensor, make_mesh(("dp", dist.get_world_size())), [Shard(0)], src_data_rank=None)
