"""The layouts of the resharding matrix: one small model under every parallelism, with the same FQNs and logical shapes.

layout = LAYOUTS["fsdp3 x tp2"]
model, optimizer = layout.build()        # on each of layout.size ranks, e.g. in a case of World(layout.size)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

Training: TypeAlias = tuple[nn.Module, torch.optim.Optimizer]


class OddModel(nn.Module):
    """Parameters with dims that no number of ranks divides, one without elements, one without dims, one of bfloat16; buffers.

    It has no forward pass: steps come from `training.take_step`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.up7 = nn.Linear(5, 7)
        self.up9 = nn.Linear(5, 9)
        self.up25 = nn.Linear(5, 25)
        self.down = nn.Linear(25, 5)
        self.norm = nn.LayerNorm(5)
        self.low = nn.Parameter(torch.zeros(13, 3, dtype=torch.bfloat16))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scale = nn.Parameter(torch.zeros(()))
        self.experts = nn.Parameter(torch.zeros(5, 7, 3))
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to lay the model out on `size` ranks."""

    size: int
    build: Callable[[], Training]


@functools.cache
def make_mesh(*axes: tuple[str, int]) -> DeviceMesh:
    """The mesh with these axes (name, size), made once per process: each costs descriptors and threads for good."""
    return init_device_mesh("cpu", tuple(size for _, size in axes), mesh_dim_names=tuple(name for name, _ in axes))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with two groups of different options; the for-loop, since foreach takes no mixture of tensors and DTensors."""
    params = list(model.parameters())
    groups = [
        {"params": [param for param in params if param.ndim >= 2], "weight_decay": 0.1},
        {"params": [param for param in params if param.ndim < 2], "weight_decay": 0.0, "lr": 3e-3},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, foreach=False)


def _build_plain() -> Training:
    model = OddModel()
    return model, make_optimizer(model)


def _build_ddp() -> Training:
    model = DistributedDataParallel(OddModel())
    return model, make_optimizer(model)


def _leave(_: OddModel) -> set[nn.Parameter]:
    return set()


def _build_fsdp(mesh: Callable[[], DeviceMesh], prepare: Callable[[OddModel], set[nn.Parameter]] = _leave) -> Training:
    """FSDP2 (over two axes: HSDP) of all but what `prepare` has laid out and says to leave alone."""
    model = OddModel()
    ignored = prepare(model) | {model.scale}  # FSDP2 takes no parameters without dims
    fully_shard(model, mesh=mesh(), ignored_params=ignored)
    return model, make_optimizer(model)


def _build_tp(mesh: Callable[[], DeviceMesh]) -> Training:
    model = OddModel()
    _parallelize(model, mesh())
    return model, make_optimizer(model)


def _parallelize(model: OddModel, mesh: DeviceMesh) -> set[nn.Parameter]:
    styles: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in ("up7", "up9", "up25")}
    parallelize_module(model, mesh, {**styles, "down": RowwiseParallel()}, src_data_rank=None)
    model.experts = nn.Parameter(distribute_tensor(model.experts.detach(), mesh, [Shard(1)], src_data_rank=None))
    return set()


def _build_fsdp_tp(num_data: int) -> Training:
    def mesh() -> DeviceMesh:
        return make_mesh(("dp", num_data), ("tp", 2))

    return _build_fsdp(lambda: mesh()["dp"], lambda model: _parallelize(model, mesh()["tp"]))


def _distribute_experts(model: OddModel) -> set[nn.Parameter]:
    """Experts on a mesh of their own."""
    mesh = make_mesh(("ep", 2), ("expert_dp", 2))
    model.experts = nn.Parameter(distribute_tensor(model.experts.detach(), mesh, [Shard(0), Shard(1)], src_data_rank=None))
    return {model.experts}


def _data_axis(size: int) -> Callable[[], DeviceMesh]:
    return lambda: make_mesh(("dp", size))


LAYOUTS: Final[Mapping[str, Layout]] = MappingProxyType(
    {
        "plain": Layout(1, _build_plain),
        "ddp2": Layout(2, _build_ddp),
        "fsdp2": Layout(2, lambda: _build_fsdp(_data_axis(2))),
        "fsdp3": Layout(3, lambda: _build_fsdp(_data_axis(3))),
        "fsdp4": Layout(4, lambda: _build_fsdp(_data_axis(4))),
        "hsdp2x2": Layout(4, lambda: _build_fsdp(lambda: make_mesh(("replicate", 2), ("shard", 2)))),
        "tp2": Layout(2, lambda: _build_tp(lambda: make_mesh(("tp", 2)))),
        "fsdp2 x tp2": Layout(4, lambda: _build_fsdp_tp(2)),
        "fsdp3 x tp2": Layout(6, lambda: _build_fsdp_tp(3)),
        "fsdp4 x tp2": Layout(8, lambda: _build_fsdp_tp(4)),
        "ep2 x fsdp2": Layout(4, lambda: _build_fsdp(_data_axis(4), _distribute_experts)),
    }
)
