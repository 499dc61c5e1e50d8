"""Pipeline stages done right: global names, each stage with its part of the model and its own optimizer groups."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import anyshard
from anyshard.testing.training import Moment, fill_training
from anyshard.testing.world import Worlds

pytestmark = pytest.mark.slow

NUM_LAYERS = 4


class Stage(nn.Module):
    """Some layers of the model under the names that they have in the whole. Those of the first half have no bias."""

    def __init__(self, layers: range) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(layer): nn.Linear(3, 3, bias=layer >= NUM_LAYERS // 2) for layer in layers})


class Training:
    """One stage in training: weights in the first group, biases in the second, which may be empty."""

    def __init__(self, rank: int, num_stages: int) -> None:
        each = NUM_LAYERS // num_stages
        self.model = Stage(range(rank * each, (rank + 1) * each))
        params = list(self.model.parameters())
        groups = [{"params": [param for param in params if param.ndim == ndim], "lr": ndim / 8} for ndim in (2, 1)]
        self.optimizer = torch.optim.AdamW(groups)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1)

    @classmethod
    def trained(cls, rank: int, num_stages: int) -> Training:
        """As after some steps."""
        training = cls(rank, num_stages)
        fill_training(training.model, training.optimizer)
        training.scheduler.step()
        return training

    @property
    def state(self) -> dict[str, object]:
        """The app state of this rank."""
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def now(self) -> Moment:
        """This moment of model and optimizer."""
        return Moment.of(self.model, self.optimizer)


def save(place: str) -> None:
    anyshard.save(place, Training.trained(dist.get_rank(), dist.get_world_size()).state)


def load(place: str) -> list[str]:
    return load_stage(place, dist.get_rank(), dist.get_world_size())


def load_stage(place: str, rank: int, num_stages: int) -> list[str]:
    """What differs from a stage that was trained as this one."""
    live, expected = Training(rank, num_stages), Training.trained(rank, num_stages)
    for group in live.optimizer.param_groups:
        group["lr"] = 9.0
    anyshard.load(place, live.state)
    assert expected.scheduler.state_dict() == live.scheduler.state_dict()
    return expected.now().differences(live.now())


def test_stages_load_as_the_whole_and_as_other_stages(worlds: Worlds, tmp_path: Path) -> None:
    """Saved on two stages, one with an empty group, the model is the same on one process and on four stages (B099, B101, T6)."""
    place = str(tmp_path / "step_7")
    worlds(2).run(save, place)
    assert [] == load_stage(place, 0, 1)
    assert [[]] * 2 == worlds(2).run(load, place)
    assert [[]] * 4 == worlds(4).run(load, place)


def make_uneven(rank: int, lr: float) -> dict[str, object]:
    """A stage that has matrices only, or vectors only, and for the others an empty group with another rate."""
    model = nn.ModuleDict({str(rank): nn.LayerNorm(3) if rank else nn.Linear(3, 3, bias=False)})
    params = list(model.parameters())
    groups = [{"params": [param for param in params if param.ndim == ndim], "lr": lr * ndim} for ndim in (2, 1)]
    return {"model": model, "optimizer": torch.optim.SGD(groups)}


def move_uneven(place: str) -> list[float]:
    """The rates of this stage after a load."""
    anyshard.save(place, make_uneven(dist.get_rank(), 0.25))
    live = make_uneven(dist.get_rank(), 9.0)
    anyshard.load(place, live)
    optimizer = live["optimizer"]
    assert isinstance(optimizer, torch.optim.Optimizer)
    return [group["lr"] for group in optimizer.param_groups]


def test_stages_may_lack_parameters_for_different_groups(worlds: Worlds, tmp_path: Path) -> None:
    """An empty group is known by its place among all groups of its stage, and so not taken for another one that is empty."""
    place = str(tmp_path / "step_7")
    assert [[0.5, 0.25]] * 2 == worlds(2).run(move_uneven, place)
    assert ["0.weight", "1.bias", "~0", "~1"] == sorted(anyshard.open(place)["optimizer"]["param_groups"])


def test_the_whole_loads_as_stages(worlds: Worlds, tmp_path: Path) -> None:
    """Each stage finds its layers and their groups; an empty group, of which nothing was stored, keeps its options."""
    place = str(tmp_path / "step_7")
    anyshard.save(place, Training.trained(0, 1).state)
    assert [["groups"], []] == worlds(2).run(load, place)


def test_all_layers_are_stored_under_their_own_names(worlds: Worlds, tmp_path: Path) -> None:
    """No stage's layers hide those of another one (B100)."""
    worlds(4).run(save, str(tmp_path / "step_7"))
    expected = {f"model/layers.{layer}.weight" for layer in range(4)} | {f"model/layers.{layer}.bias" for layer in (2, 3)}
    assert expected == {address for address in anyshard.open(tmp_path / "step_7") if address.startswith("model/")}
