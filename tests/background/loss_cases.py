"""A model that trains with dropout and saves at each step, or not: what its losses are and what it ends with."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import anyshard
from anyshard.testing.fill import local_bytes
from anyshard.testing.layouts import make_mesh
from anyshard.testing.training import training_state
from tests.background.scenes import SOON_S

_WIDTH = 128
_DATA_SEED, _DROPOUT_SEED = 1, 2


def make_job(*, implementation: dict[str, bool]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model on all ranks, with a buffer and dropout, and its optimizer."""
    torch.manual_seed(0)
    layers = [nn.Linear(_WIDTH, _WIDTH), nn.BatchNorm1d(_WIDTH), nn.GELU(), nn.Dropout(0.2), nn.Linear(_WIDTH, _WIDTH)]
    model = nn.Sequential(*layers)
    if dist.is_initialized():
        fully_shard(model, mesh=make_mesh(("dp", dist.get_world_size())))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, **implementation)


def train(place: str, staging: str | None, implementation: dict[str, bool], num_steps: int) -> dict[str, Any]:
    """The losses of all steps, as their exact numbers, and the bytes of all that was trained; how many saves were lazy."""
    model, optimizer = make_job(implementation=implementation)
    state = {"model": model, "optimizer": optimizer, "random": anyshard.RNGState()}
    data = torch.Generator().manual_seed(_DATA_SEED)
    torch.manual_seed(_DROPOUT_SEED)
    losses, num_lazy = [], 0
    for step in range(1, num_steps + 1):
        inputs = torch.randn(8, _WIDTH, generator=data)
        loss = (model(inputs) - inputs.roll(1, 1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
        if staging is not None:
            options = anyshard.SaveOptions(staging=cast("Any", staging))
            pending = anyshard.async_save(Path(place) / f"step_{step}", state, options=options)
            num_lazy += pending.staging.lazy_nbytes > 0
    anyshard.wait_all(SOON_S)
    end = {address: raw.hex() for address, raw in local_bytes(training_state(model, optimizer)).items()}
    return {"losses": losses, "end": end, "num_lazy": num_lazy}
