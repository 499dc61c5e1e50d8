"""Random state of real ranks, through files: each goes on with its own numbers, on as many ranks and on others."""

# ruff: noqa: NPY002 - NumPy's global generator is one of those that this is about

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import anyshard
from anyshard.testing.layouts import make_mesh
from anyshard.testing.world import Worlds

pytestmark = pytest.mark.slow

NUM_DRAWS = 64
KINDS = ("python", "numpy", "cpu", "loader", "augment", "shuffle")


class Job:
    """A model with dropout and a generator of every kind; rank r begins with seed r, but where it is told otherwise."""

    def __init__(self, seed: int) -> None:
        for set_seed in (random.seed, np.random.seed, torch.manual_seed):
            set_seed(seed)
        self.loader = torch.Generator().manual_seed(seed)
        self.augment = np.random.default_rng(seed)
        self.shuffle = random.Random(seed)
        self.model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5))
        nn.init.ones_(self.model[0].weight)  # type: ignore[arg-type]
        nn.init.zeros_(self.model[0].bias)  # type: ignore[arg-type]

    def state(self, key: object = None) -> dict[str, Any]:
        generators = {"loader": self.loader, "augment": self.augment, "shuffle": self.shuffle}
        return {"model": self.model, "rng": anyshard.RNGState(generators=generators, key=key)}

    def draw(self) -> list[list[float]]:
        """The next numbers of each kind in KINDS."""
        rows = [
            (
                *(random.random(), np.random.rand(), torch.rand(1).item()),
                *(torch.rand(1, generator=self.loader).item(), self.augment.random(), self.shuffle.random()),
            )
            for _ in range(NUM_DRAWS)
        ]
        return [list(column) for column in zip(*rows, strict=True)]

    def step(self) -> list[bool]:
        """The mask of one step."""
        return (self.model(torch.ones(4, 8)) != 0).flatten().tolist()


def save_and_draw(path: str) -> tuple[list[list[float]], list[list[bool]]]:
    """What each rank draws behind a save, and the masks of its next three steps."""
    job = Job(dist.get_rank())
    job.draw()
    anyshard.save(path, job.state())
    return job.draw(), [job.step() for _ in range(3)]


def load_and_draw(path: str) -> tuple[list[list[float]], list[list[bool]], list[str]]:
    """The same behind a load into a job that has begun otherwise, and the warnings."""
    job = Job(99)
    report = anyshard.load(path, job.state())
    return job.draw(), [job.step() for _ in range(3)], list(report.warnings)


def count_streams(draws: Sequence[list[list[float]]]) -> dict[str, int]:
    """How many ranks are unlike all others, by generator."""
    return {kind: len({tuple(drawn[place]) for drawn in draws}) for place, kind in enumerate(KINDS)}


@pytest.mark.parametrize(("saving", "loading"), [(4, 4), (4, 2), (2, 4)])
def test_ranks_go_on_with_their_numbers(worlds: Worlds, tmp_path: Path, saving: int, loading: int) -> None:
    """Ranks that saved draw what they would have drawn, masks of dropout too; new ones draw unlike all others, at each load."""
    path = str(tmp_path / "step_1")
    expected = worlds(saving).run(save_and_draw, path)
    found = worlds(loading).run(load_and_draw, path)
    kept = min(saving, loading)
    assert expected[:kept] == [drawn[:2] for drawn in found[:kept]]
    assert dict.fromkeys(KINDS, loading) == count_streams([drawn[0] for drawn in found])
    assert loading == len({str(masks) for _, masks, _ in found})
    assert found == worlds(loading).run(load_and_draw, path)
    derived = "rng: random state is stored for 2 ranks, and for none of ranks 2, 3 of 4"
    assert [loading > saving] * loading == [len(warnings) == 1 and warnings[0].startswith(derived) for *_, warnings in found]


def repeat_own(path: str) -> bool:
    """Save, draw five numbers, load, draw five again (B118)."""
    random.seed(100 + dist.get_rank())
    anyshard.save(path, {"rng": anyshard.RNGState()})
    expected = [random.random() for _ in range(5)]
    anyshard.load(path, {"rng": anyshard.RNGState()})
    return expected == [random.random() for _ in range(5)]


def test_each_rank_repeats_its_own(worlds: Worlds, tmp_path: Path) -> None:
    """No rank's random state is taken for a replica of another's."""
    assert [True] * 4 == worlds(4).run(repeat_own, str(tmp_path / "step_1"))


def save_async_and_draw(path: str) -> tuple[bool, bool]:
    """Whether a job draws as an undisturbed one while a save runs, and again behind a load."""
    expected, job = Job(dist.get_rank()).draw(), Job(dist.get_rank())
    pending = anyshard.async_save(path, job.state())
    during = job.draw()
    pending.result(timeout_s=60)
    anyshard.load(path, job.state())
    return expected == during, expected == job.draw()


def test_an_asynchronous_save_has_the_state_of_the_call(worlds: Worlds, tmp_path: Path) -> None:
    """What is drawn while it runs is drawn again behind a load, and the save itself draws nothing."""
    assert [(True, True)] * 2 == worlds(2).run(save_async_and_draw, str(tmp_path / "step_1"))


def save_by_key(path: str) -> None:
    """Four ranks, of which two each are alike."""
    group = dist.get_rank() // 2
    anyshard.save(path, Job(group).state(key=group))


def load_by_key(path: str, group_size: int) -> list[list[float]]:
    job = Job(99)
    anyshard.load(path, job.state(key=dist.get_rank() // group_size))
    return job.draw()


def test_ranks_that_are_alike_stay_alike(worlds: Worlds, tmp_path: Path) -> None:
    """Those with one key draw alike, on as many ranks and when each group has become smaller, and no two groups do."""
    path = str(tmp_path / "step_1")
    worlds(4).run(save_by_key, path)
    first, second, third, fourth = worlds(4).run(load_by_key, path, 2)
    assert (first, third) == (second, fourth)
    assert dict.fromkeys(KINDS, 2) == count_streams([first, third])
    assert [first, third] == worlds(2).run(load_by_key, path, 1)
    more = worlds(4).run(load_by_key, path, 1)
    assert [first, third] == more[:2]
    assert dict.fromkeys(KINDS, 4) == count_streams(more)


def make_on_mesh(axes: dict[str, int]) -> dict[str, Any]:
    mesh = make_mesh(*axes.items())
    weight = distribute_tensor(torch.ones(8), mesh, [Shard(0), *[Replicate()] * (len(axes) - 1)], src_data_rank=None)
    return {"model": {"w": weight}, "rng": anyshard.RNGState()}


def save_on_mesh(path: str) -> float:
    random.seed(dist.get_rank())
    anyshard.save(path, make_on_mesh({"dp": 2, "tp": 2}))
    return random.random()


def load_on_mesh(path: str) -> tuple[float, str]:
    """What a load on another mesh gives, and what it says if that is refused."""
    state = make_on_mesh({"dp": 4})
    anyshard.load(path, state)
    number = random.random()
    try:
        anyshard.load(path, {**state, "rng": anyshard.RNGState(other_mesh="refuse")})
    except anyshard.StateMismatch as error:
        return number, str(error)
    return number, ""


def test_another_mesh_of_as_many_ranks(worlds: Worlds, tmp_path: Path) -> None:
    """Each rank goes on with what the rank of its number had, unless that is refused."""
    path = str(tmp_path / "step_1")
    expected = worlds(4).run(save_on_mesh, path)
    numbers, errors = zip(*worlds(4).run(load_on_mesh, path), strict=True)
    assert expected == list(numbers)
    assert all("found those of rank 0 of 4 on a mesh of dp=2, tp=2" in error for error in errors)


def save_damaged(path: str) -> None:
    """Random state of another program under that name, beside weights."""
    foreign = {"python": dist.get_rank(), "numpy": None, "cpu": b""}
    anyshard.save(path, {"model": {"w": torch.ones(3)}, "rng": anyshard.PerRank(foreign)})


def load_damaged(path: str) -> tuple[str, list[float], list[float]]:
    """The error of a load, and the weights behind it and behind one that leaves random state out."""
    state: dict[str, Any] = {"model": {"w": torch.zeros(3)}, "rng": anyshard.RNGState()}
    try:
        anyshard.load(path, state)
    except anyshard.StateMismatch as error:
        message, weights = str(error), state["model"]["w"].tolist()
    anyshard.load(path, state, options=anyshard.LoadOptions(exclude=["rng"]))
    return message, weights, state["model"]["w"].tolist()


@pytest.mark.parametrize("loading", [2, 4])
def test_damaged_random_state_is_in_nobodys_way(worlds: Worlds, tmp_path: Path, loading: int) -> None:
    """An error by default that says how to go on without it, on all ranks and before weights change (B120)."""
    path = str(tmp_path / "step_1")
    worlds(2).run(save_damaged, path)
    for message, before, behind in worlds(loading).run(load_damaged, path):
        assert "rng: kind (expected a random state for the generators of this process" in message
        assert "damage at python" in message
        assert "exclude= leaves it out" in message
        assert ([0.0] * 3, [1.0] * 3) == (before, behind)
