"""What each rank of the benchmarks on many ranks does: cases for `anyshard.testing.World`. Arguments are plain values.

The job is a transformer's blocks (12 of them: 85 million parameters in 72 tensors) under FSDP2 with AdamW and both moments.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from measure import RawDisk
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import anyshard

WIDTH = 768
BLOCK_STATE_NBYTES = 3 * 4 * 12 * WIDTH * WIDTH  # parameters and two moments of the four matrices, which are nearly all
# What anyshard does by default, so that raw differs from it only in what it leaves out.
RAW_BLOCK_NBYTES, RAW_MAX_THREADS = anyshard.SaveOptions().block_nbytes, anyshard.SaveOptions().threads


class Block(nn.Module):
    """The parameters of one block; there is no forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)


@dataclass(frozen=True, slots=True)
class Job:
    """A model, its optimizer, and the same as DCP wants it: tensors that share memory with the live ones."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    state: dict[str, object]

    @property
    def app_state(self) -> dict[str, object]:
        """The same as anyshard wants it."""
        return {"model": self.model, "optimizer": self.optimizer}

    def tensors(self) -> list[torch.Tensor]:
        """The live tensors of this rank, without the step counts."""
        moments = (self.optimizer.state[param][name] for param in self.model.parameters() for name in ("exp_avg", "exp_avg_sq"))
        return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in (*self.model.parameters(), *moments)]


@functools.cache
def make_job(num_blocks: int) -> Job:
    """The job of this rank, made once per process."""
    model = nn.Sequential(*(fully_shard(Block()) for _ in range(num_blocks)))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()
    weights, moments = get_state_dict(model, optimizer)
    return Job(model, optimizer, {"model": weights, "optimizer": moments})


@torch.no_grad()
def fill_state(num_blocks: int) -> list[int]:
    """Fill all with bits of this rank and return their sums."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    for tensor in make_job(num_blocks).tensors():
        tensor.uniform_(generator=generator)
    return sum_state(num_blocks)


@torch.no_grad()
def forget_state(num_blocks: int) -> None:
    """Fill all with zeros."""
    for tensor in make_job(num_blocks).tensors():
        tensor.zero_()


def sum_state(num_blocks: int) -> list[int]:
    """The sum of the bits of each tensor on this rank; sums over all ranks are those of the logical tensors."""
    return [int(tensor.detach().view(torch.int32).sum()) for tensor in make_job(num_blocks).tensors()]


def count_nbytes(num_blocks: int) -> int:
    """Bytes of this rank."""
    return sum(tensor.nbytes for tensor in make_job(num_blocks).tensors())


def save(num_blocks: int, place: str) -> bool:
    """Our save; whether it found a cached plan."""
    return anyshard.save(place, make_job(num_blocks).app_state).plan_was_cached


def load(num_blocks: int, place: str) -> None:
    """Our load."""
    anyshard.load(place, make_job(num_blocks).app_state)


def save_with_dcp(num_blocks: int, path: str, num_threads: int) -> None:
    """DCP's save with its plans cached, made durable: it syncs data and metadata itself, but not the directories.

    The state dict, which costs it further time, was made before.
    """
    writer = FileSystemWriter(path, single_file_per_rank=True, sync_files=True, thread_count=num_threads)
    planner = DefaultSavePlanner(enable_plan_caching=True)
    dcp_save(make_job(num_blocks).state, storage_writer=writer, planner=planner)
    if dist.get_rank() == 0:
        _sync_directory(Path(path))
        _sync_directory(Path(path).parent)


def load_with_dcp(num_blocks: int, path: str) -> None:
    """DCP's load into the live tensors, without the `set_state_dict` that its users call after it."""
    dcp_load(make_job(num_blocks).state, storage_reader=FileSystemReader(path))


def write_raw(num_blocks: int, directory: str, num_threads: int) -> None:
    """As many bytes as this rank has, into a file of its own."""
    path = Path(directory)
    path.mkdir(exist_ok=True)
    _raw_disk().write(path / str(dist.get_rank()), count_nbytes(num_blocks), num_threads=num_threads)


def read_raw(paths: list[str], num_threads: int) -> None:
    """This rank's share of these files."""
    _raw_disk().read([Path(path) for path in paths[dist.get_rank() :: dist.get_world_size()]], num_threads=num_threads)


@functools.cache
def _raw_disk() -> RawDisk:
    return RawDisk(max_threads=RAW_MAX_THREADS, block_nbytes=RAW_BLOCK_NBYTES)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(descriptor)
    os.close(descriptor)
