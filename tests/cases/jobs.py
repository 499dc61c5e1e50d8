"""What ranks do in the cases of many ranks: tensors that say where they belong, jobs saved and loaded, calls that fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

import anyshard
from anyshard.testing.fill import fill, full_bytes
from anyshard.testing.training import fill_training, take_step, training_state

Job: TypeAlias = tuple[nn.Module, torch.optim.Optimizer]


def filled(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A whole tensor with the bits of its name."""
    tensor = torch.empty(shape, dtype=dtype)
    fill(tensor, name)
    return tensor


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a plain tensor in C order."""
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


def shard(tensor: torch.Tensor, mesh: DeviceMesh, *placements: Placement) -> DTensor:
    """This rank's part of a tensor that every rank has as a whole, cut by torch."""
    return distribute_tensor(tensor, mesh, placements, src_data_rank=None)


def save_job(place: str, model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: bool = True) -> dict[str, bytes]:
    """Save a filled job; what `look_at` finds in it."""
    fill_training(model, optimizer)
    anyshard.save(place, {"model": model, "optimizer": optimizer})
    return look_at(model, optimizer, steps=steps)


def load_job(place: str, model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: bool = True) -> dict[str, bytes]:
    """Load a job; what `look_at` finds in it."""
    anyshard.load(place, {"model": model, "optimizer": optimizer})
    return look_at(model, optimizer, steps=steps)


def look_at(model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: bool = True) -> dict[str, bytes]:
    """All tensors of a job of all ranks as wholes, and (`steps`) again after a step that is the same under every layout."""
    before = full_bytes(training_state(model, optimizer))
    if not steps:
        return before
    take_step(model, optimizer, seed="next ")
    after = full_bytes(training_state(model, optimizer))
    return before | {f"next step: {address}": data for address, data in after.items()}


def error_of(act: Callable[[], object]) -> tuple[str, str]:
    """Class and message of the error in which a call of all ranks ends."""
    try:
        act()
    except anyshard.OperationFailed as error:
        return type(error).__name__, str(error)
    raise AssertionError("expected an error of all ranks, found that the call returned")
