"""Cases of experts, of parts that differ by rank, and of pipeline stages. Each test is named after its row in cases.md."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import anyshard
from anyshard.testing.fill import assert_same_bytes, fill, full_bytes
from anyshard.testing.layouts import make_mesh
from anyshard.testing.training import fill_training, training_state
from anyshard.testing.world import Worlds
from tests.cases.jobs import Job, bits, error_of, filled, load_job, save_job, shard

pytestmark = pytest.mark.slow


def save_halves_as_replicas(place: str) -> tuple[str, str]:
    """Each rank has another half of a weight, and says that it is the whole of a tensor."""
    half = filled("w", 4, 4).chunk(2)[dist.get_rank()]
    return error_of(lambda: anyshard.save(place, {"experts": {"w": half}}))


def test_b092_slices_are_not_taken_for_replicas(worlds: Worlds, tmp_path: Path) -> None:
    """Different halves under one name are refused with the address and both ranks, and nothing is committed."""
    for name, message in worlds(2).run(save_halves_as_replicas, str(tmp_path / "a")):
        assert ("InvalidAppState", True) == (name, "experts/w: rank 0 against rank 1" in message), message
    assert not list(tmp_path.glob("a/manifest*"))


def load_own_experts(place: str) -> tuple[bytes, bytes]:
    """What this rank's slice of the experts should be, and is after a load."""
    size, rank = dist.get_world_size(), dist.get_rank()
    live = shard(torch.zeros(6, 2, 3), make_mesh(("ep", size)), Shard(0))
    anyshard.load(place, {"experts": live})
    return bits(filled("experts", 6, 2, 3).chunk(size)[rank]), bits(live.to_local())


@pytest.mark.parametrize("size", [2, 3])
def test_b093_each_rank_gets_its_own_experts(worlds: Worlds, tmp_path: Path, size: int) -> None:
    """Of a full checkpoint of six experts rank r loads the r-th slice."""
    anyshard.save(tmp_path / "a", {"experts": filled("experts", 6, 2, 3)})
    for expected, found in worlds(size).run(load_own_experts, str(tmp_path / "a")):
        assert expected == found


def make_slices() -> Job:
    """One large parameter and five small ones; rank 0 of several has the large one in its optimizer, rank 1 the others."""
    model = nn.ParameterDict({"large": nn.Parameter(torch.zeros(40))})
    model.update({f"small{i}": nn.Parameter(torch.zeros(3)) for i in range(5)})
    params = list(model.parameters())
    if dist.is_initialized():
        params = [params[:1], params[1:], [], []][dist.get_rank()]
    return model, torch.optim.Adam([{"params": params}], foreach=False)


def save_slices(place: str) -> dict[str, bytes]:
    return save_job(place, *make_slices(), steps=False)


def load_slices(place: str) -> dict[str, bytes]:
    return load_job(place, *make_slices(), steps=False)


def test_b095_optimizer_slices_of_different_length(worlds: Worlds, tmp_path: Path) -> None:
    """One parameter on one rank and five on the other: all state is stored, and comes back on 2, 4 and 1 ranks."""
    expected = worlds(2).run(save_slices, str(tmp_path / "a"))[0]
    for size in (2, 4):
        assert_same_bytes(expected, worlds(size).run(load_slices, str(tmp_path / "a"))[0])
    assert_same_bytes(expected, load_slices(str(tmp_path / "a")))


def save_own_lists(place: str) -> tuple[tuple[str, str], list[int]]:
    """The error of lists of another length per rank as common values; then what comes back of one that is per rank."""
    lengths = list(range(1 + dist.get_rank()))
    error = error_of(lambda: anyshard.save(f"{place}/common", {"lengths": lengths}))
    anyshard.save(f"{place}/own", {"lengths": anyshard.PerRank(lengths)})
    live = {"lengths": anyshard.PerRank([])}
    anyshard.load(f"{place}/own", live)
    return error, live["lengths"].value


def test_b095_lists_of_different_length_are_not_common(worlds: Worlds, tmp_path: Path) -> None:
    """Lists that depend on the rank are refused with their address, and stored per rank when told so."""
    for rank, ((name, message), found) in enumerate(worlds(2).run(save_own_lists, str(tmp_path))):
        assert ("InvalidAppState", True) == (name, "lengths" in message and "PerRank" in message), message
        assert list(range(1 + rank)) == found


class Experts(nn.Module):
    """Four stacked experts beside a router."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(3, 4), nn.Parameter(torch.zeros(4, 6, 3))


def make_experts(kind: str) -> Job:
    """Experts on an axis of their own, or all under FSDP2, on two ranks."""
    model = Experts()
    if kind == "ep":
        model.experts = nn.Parameter(shard(model.experts.detach(), make_mesh(("ep", 2)), Shard(0)))
        fully_shard(model, mesh=make_mesh(("dp", 2)), ignored_params={model.experts})
    else:
        fully_shard(model, mesh=make_mesh(("dp", 2)), shard_placement_fn=lambda param: Shard(1 if param.ndim == 3 else 0))
    return model, torch.optim.AdamW(model.parameters(), foreach=False)


def save_expert_parallel(place: str) -> dict[str, bytes]:
    return save_job(place, *make_experts("ep"))


def load_without_experts_axis(place: str) -> dict[str, bytes]:
    return load_job(place, *make_experts("fsdp"))


def test_b096_no_axis_of_experts_is_needed(worlds: Worlds, tmp_path: Path) -> None:
    """Experts that were saved on an axis of their own load where there is none, with their moments."""
    expected = worlds(2).run(save_expert_parallel, str(tmp_path / "a"))[0]
    assert_same_bytes(expected, worlds(2).run(load_without_experts_axis, str(tmp_path / "a"))[0])


def make_stage(layers: list[int], *, num_parts: int = 1) -> dict[str, Any]:
    """Layers with global names in one or more parts, each with an optimizer of two groups, and a scheduler for all."""
    parts = [nn.Sequential(OrderedDict({f"layer{i}": nn.Linear(2, 3) for i in layers[k::num_parts]})) for k in range(num_parts)]
    optimizers = [
        torch.optim.AdamW(
            [
                {"params": [layer.weight for layer in part], "lr": 0.1},
                {"params": [layer.bias for layer in part], "lr": 0.2, "weight_decay": 0.0},
            ],
            foreach=False,
        )
        for part in parts
    ]
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5) for optimizer in optimizers]
    return {"model": parts, "optimizer": optimizers, "scheduler": schedulers[0]}


def look_at_stage(stage: dict[str, Any]) -> dict[str, bytes]:
    """All tensors of all stages as wholes."""
    found: dict[str, torch.Tensor] = {}
    for part, optimizer in zip(stage["model"], stage["optimizer"], strict=True):
        found |= training_state(part, optimizer)
    return full_bytes(found)


def rates_of(stage: dict[str, Any]) -> list[float]:
    """All learning rates of a rank."""
    groups = [group for optimizer in stage["optimizer"] for group in optimizer.param_groups]
    return [*(group["lr"] for group in groups), *stage["scheduler"].get_last_lr()]


def save_stage(place: str, layers: list[list[int]], num_parts: int) -> dict[str, bytes]:
    """Save this rank's layers after three steps of the scheduler."""
    stage = make_stage(layers[_rank()], num_parts=num_parts)
    for part, optimizer in zip(stage["model"], stage["optimizer"], strict=True):
        fill_training(part, optimizer)
    stage["scheduler"].step()
    for optimizer in stage["optimizer"]:
        for group, rate in zip(optimizer.param_groups, stage["scheduler"].get_last_lr(), strict=True):
            group["lr"] = rate
    anyshard.save(place, stage)
    return look_at_stage(stage)


def load_stage(place: str, layers: list[list[int]], num_parts: int) -> tuple[dict[str, bytes], list[float]]:
    """Load this rank's layers; all tensors, and this rank's learning rates."""
    stage = make_stage(layers[_rank()], num_parts=num_parts)
    anyshard.load(place, stage)
    return look_at_stage(stage), rates_of(stage)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def test_b097_two_parts_on_each_of_two_stages(worlds: Worlds, tmp_path: Path) -> None:
    """Four model parts on two ranks, each with an optimizer of its own, all come back."""
    layers = [[0, 1], [2, 3]]
    expected = worlds(2).run(save_stage, str(tmp_path / "a"), layers, 2)[0]
    assert {f"optimizer/state/layer{i}.weight/exp_avg" for i in range(4)} <= expected.keys()
    for found, _ in worlds(2).run(load_stage, str(tmp_path / "a"), layers, 2):
        assert_same_bytes(expected, found)


def clash(place: str) -> tuple[str, str]:
    """Both stages call their only layer `layer0`, with other weights."""
    stage = make_stage([0])
    fill(stage["model"][0].layer0.weight, f"weight of {dist.get_rank()}")
    return error_of(lambda: anyshard.save(place, {"model": stage["model"]}))


def test_b097_clashing_names_of_stages_are_refused(worlds: Worlds, tmp_path: Path) -> None:
    """Layers of different stages under one name are an error that names it and asks for global names."""
    for name, message in worlds(2).run(clash, str(tmp_path / "a")):
        assert ("InvalidAppState", True) == (name, "model/layer0.weight: rank 0 against rank 1" in message), message
        assert "global names" in message


def save_layers(place: str, layers: list[list[int]]) -> None:
    model = make_stage(layers[dist.get_rank()])["model"]
    for name, param in model[0].named_parameters():
        fill(param, name)
    anyshard.save(place, {"model": model})


@pytest.mark.parametrize("layers", [[[0, 2], [1, 3]], [[0, 1], [2, 3, 4], [5, 6, 7, 8], [9, 10, 11]]], ids=["b099", "b100"])
def test_b099_b100_layers_of_all_stages(worlds: Worlds, tmp_path: Path, layers: list[list[int]]) -> None:
    """Every layer of every stage is stored once under its global number, sizes add up, and one process loads them all."""
    worlds(len(layers)).run(save_layers, str(tmp_path / "a"), layers)
    model = make_stage(sorted(sum(layers, [])))["model"][0]  # noqa: RUF017 - a handful
    report = anyshard.load(tmp_path / "a", {"model": model})
    names = [name for name, _ in model.named_parameters()]
    with anyshard.open(tmp_path / "a") as checkpoint:
        assert {f"model/{name}" for name in names} == set(checkpoint)
    assert (len(names), sum(param.numel() * 4 for param in model.parameters())) == (report.num_tensors, report.nbytes)
    assert {name: bits(filled(name, *param.shape)) for name, param in model.named_parameters()} == {
        name: bits(param) for name, param in model.named_parameters()
    }


def test_b101_pipeline_of_one_and_of_four(worlds: Worlds, tmp_path: Path) -> None:
    """Two chunks per rank, from one stage to four and back: tensors, rates of both groups and the scheduler are equal."""
    all_layers, split = [list(range(8))], [[0, 4], [1, 5], [2, 6], [3, 7]]
    expected = save_stage(str(tmp_path / "one"), all_layers, 1)
    for found, rates in worlds(4).run(load_stage, str(tmp_path / "one"), split, 2):
        assert_same_bytes(expected, found)
        assert [0.05, 0.1] * 3 == rates
    expected = worlds(4).run(save_stage, str(tmp_path / "four"), split, 2)[0]
    found, rates = load_stage(str(tmp_path / "four"), all_layers, 1)
    assert_same_bytes(expected, found)
    assert [0.05, 0.1] * 2 == rates
