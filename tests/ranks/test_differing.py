"""Ranks that hold other bytes or values where they should hold the same: what is refused, what is counted, what is stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import anyshard
from anyshard.testing.fill import Fill, fill
from anyshard.testing.layouts import make_mesh
from anyshard.testing.training import fill_training
from anyshard.testing.world import Worlds

pytestmark = pytest.mark.slow

State = dict[str, object]


def make_filled(model: nn.Module, seed: object) -> nn.Module:
    for name, param in model.named_parameters():
        fill(param, f"{seed} {name}", kind=Fill.FINITE)
    return model


def refuse(place: str, state: State, **options: Any) -> str:
    """The message with which a save is refused."""
    with pytest.raises(anyshard.InvalidAppState) as caught:
        anyshard.save(place, state, options=anyshard.SaveOptions(**options))
    return str(caught.value)


# At the first save ----------------------------------------------------------------------------------------------------


def make_other_weights(rank: int) -> State:
    return {"model": make_filled(nn.Linear(4, 3), rank)}


def make_hand_cut(rank: int) -> State:
    """Halves of one weight, cut without a DTensor."""
    whole = make_filled(nn.Linear(4, 6, bias=False), "whole").weight
    half = nn.Linear(4, 3, bias=False)
    half.weight = nn.Parameter(whole.detach().chunk(2)[rank])
    return {"model": half}


def make_local_names(rank: int) -> State:
    """A pipeline whose stages all count their layers from 0."""
    return {"model": nn.ModuleDict({"layers": nn.ModuleList([make_filled(nn.Linear(3, 3), f"layer {rank}")])})}


def make_other_moments(rank: int) -> State:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    fill_training(model, optimizer)
    fill(optimizer.state[model.weight]["exp_avg"], str(rank))
    return {"model": model, "optimizer": optimizer}


def make_other_tensor(rank: int) -> State:
    return {"extra": {"ema": [torch.tensor(0.5), torch.tensor(float(rank))]}}


def make_other_values(rank: int) -> State:
    return {"extra": {"loss": float(rank), "host": {"name": f"node-{rank}"}, "tokens": 123}}


# What ranks hold, and what the refusal says of it.
REFUSED: dict[Callable[[int], State], str] = {
    make_other_weights: "model/bias: rank 0 against rank 1; model/weight: rank 0 against rank 1",
    make_hand_cut: "model/weight: rank 0 against rank 1. Nothing was committed. Make tensors that are parts of one a DTensor",
    make_local_names: "model/layers.0.weight: rank 0 against rank 1. Nothing was committed.",
    make_other_moments: "other bytes: optimizer/state/weight/exp_avg: rank 0 against rank 1.",
    make_other_tensor: "other bytes: extra/ema/1: rank 0 against rank 1.",
    make_other_values: "other ones: extra/host/name: one value on rank 0, another on rank 1; extra/loss: one value on rank 0, ",
}


def save_refused(make: str, place: str) -> str:
    return refuse(place, globals()[make](dist.get_rank()))


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_what_differs_is_refused_at_the_first_save(worlds: Worlds, tmp_path: Path, make: Callable[[int], State]) -> None:
    """The error is the same on all ranks, names address and both ranks, says what to do, and leaves no file (B092, P6)."""
    first, second = worlds(2).run(save_refused, make.__name__, str(tmp_path / "step_1"))
    assert first == second
    assert REFUSED[make] in first
    assert [] == [path for path in tmp_path.rglob("*") if path.is_file()]


def save_after_refusals(place: str) -> tuple[int, int]:
    """Generation and number of tensors of the save that comes after two refused ones."""
    for _ in range(2):
        refuse(place, make_other_weights(dist.get_rank()))
    report = anyshard.save(place, make_other_weights(0))
    return report.generation, report.num_tensors


def test_a_refused_save_is_no_first_save(worlds: Worlds, tmp_path: Path) -> None:
    """What was refused in full is compared in full again, and once the ranks agree the save commits at the same place."""
    assert [(1, 2)] * 2 == worlds(2).run(save_after_refusals, str(tmp_path / "step_1"))


# Buffers --------------------------------------------------------------------------------------------------------------


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "fsdp": lambda model: fully_shard(model, mesh=make_mesh(("dp", dist.get_world_size()))),
}


def save_norm(wrap: str, place: str) -> tuple[int, bytes]:
    """Save batch norm after a step on other data on each rank: the differing buffers, and the running mean of this rank."""
    model = WRAPS[wrap](nn.Sequential(nn.BatchNorm1d(3)))
    model(torch.arange(6.0).reshape(2, 3) * (1 + dist.get_rank())).sum().backward()
    report = anyshard.save(place, {"model": model})
    mean = next(buffer for name, buffer in model.named_buffers() if name.endswith("running_mean"))
    return report.num_differing_buffers, mean.numpy().tobytes()


@pytest.mark.parametrize("wrap", WRAPS)
def test_differing_buffers_are_counted(worlds: Worlds, tmp_path: Path, wrap: str) -> None:
    """Running means and variances differ in every such job: those of the first rank are stored, and all learn of it (T9)."""
    (num, first), (also_num, second) = worlds(2).run(save_norm, wrap, str(tmp_path / "step_1"))
    assert first != second
    assert (2, 2) == (num, also_num)
    assert first == anyshard.open(tmp_path / "step_1")["model/0.running_mean"].numpy().tobytes()


# At a later save ------------------------------------------------------------------------------------------------------


def save_drifted(place: str, at: str, replica_check: str, step: int) -> str:
    """Save HSDP of which one of two replicas has drifted at step 1 or 2: the refusal, or "saved"."""
    model = fully_shard(make_filled(nn.Linear(1024, 1024, bias=False), "w"), mesh=make_mesh(("replicate", 2), ("shard", 2)))
    assert isinstance(model.weight, DTensor)
    if step > 1:
        anyshard.save(f"{place}/step_1", {"model": model})
    if dist.get_rank() == 2:
        local = model.weight.to_local().detach()
        (local[7, 77:78] if at == "one element" else local).neg_()
    if replica_check == "off":
        anyshard.save(f"{place}/step_{step}", {"model": model}, options=anyshard.SaveOptions(replica_check="off"))
        return "saved"
    return refuse(f"{place}/step_{step}", {"model": model}, replica_check=replica_check)


@pytest.mark.parametrize(
    ("at", "replica_check", "step"),
    [("one element", "sample", 1), ("one element", "full", 2), ("all elements", "sample", 2), ("all elements", "off", 2)],
)
def test_drifted_replicas(worlds: Worlds, tmp_path: Path, at: str, replica_check: Any, step: int) -> None:
    """The first save and `replica_check="full"` see a single element, samples see what is large; who turns it off is believed."""
    results = worlds(4).run(save_drifted, str(tmp_path), at, replica_check, step)
    assert 1 == len(set(results))
    assert ("saved" if replica_check == "off" else "other bytes: model/weight: rank 0 against rank 2.") in results[0]


def save_values(place: str) -> tuple[list[str], list[str], str]:
    """Save equal values, then such that differ: what the second report says, and how a strict save is refused."""
    anyshard.save(f"{place}/step_1", {"extra": {"loss": 0.5, "tokens": 1}})
    state: State = {"extra": {"loss": 0.5 + dist.get_rank(), "tokens": 2}}
    report = anyshard.save(f"{place}/step_2", state)
    strict = refuse(f"{place}/step_3", state, on_differing_values="error")
    return list(report.differing_values), list(report.warnings), strict


def test_later_values_that_differ_are_those_of_the_first_rank(worlds: Worlds, tmp_path: Path) -> None:
    """Every rank is warned and told where; on demand it is an error instead (P9)."""
    warning = "values that differ between ranks are stored as the first rank has them: extra/loss"
    results = worlds(2).run(save_values, str(tmp_path))
    assert [(["extra/loss"], [warning])] * 2 == [(differing, warnings) for differing, warnings, _ in results]
    assert "extra/loss: one value on rank 0, another on rank 1." in results[1][2]
    assert {"loss": 0.5, "tokens": 2} == anyshard.open(tmp_path / "step_2").values("extra")
    assert [] == [path for path in (tmp_path / "step_3").rglob("*") if path.is_file()]
