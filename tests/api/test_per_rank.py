"""Per-rank values and random state on real ranks, through files."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

import anyshard
from anyshard.records.values import PerRankMark
from anyshard.testing.layouts import make_mesh
from anyshard.testing.world import Worlds

pytestmark = pytest.mark.slow


class Loader:
    """A stateful with a tensor in its state."""

    def __init__(self, position: int) -> None:
        self.state: dict[str, Any] = {"position": position, "order": torch.arange(3) + position}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def make_state(position: int, *, key: int) -> dict[str, Any]:
    return {
        "rng": anyshard.RNGState(other_mesh="refuse"),
        "data": {"loader": anyshard.PerRank(Loader(position), key=key), "epoch": 3},
    }


def read(state: dict[str, Any]) -> tuple[object, ...]:
    loaded = state["data"]["loader"].value.state
    return loaded["position"], loaded["order"].tolist(), state["data"]["epoch"]


def save_and_load(path: str) -> tuple[object, ...]:
    rank = dist.get_rank()
    random.seed(rank)
    anyshard.save(path, make_state(rank, key=rank))
    expected, state = random.random(), make_state(-1, key=rank)
    anyshard.load(path, state)
    return expected == random.random(), read(state)


def load_with_keys_swapped(path: str) -> tuple[object, ...]:
    state = make_state(-1, key=1 - dist.get_rank())
    anyshard.load(path, state)
    return read(state)


def load_random_state_alone(path: str) -> bool:
    """Random state that was saved beside a sharded model is loaded without one."""
    random.seed(dist.get_rank())
    weight = distribute_tensor(torch.ones(4), make_mesh(("dp", dist.get_world_size())), [Shard(0)], src_data_rank=None)
    anyshard.save(path, {"model": {"w": weight}, "rng": anyshard.RNGState()})
    expected = random.random()
    anyshard.load(path, {"rng": anyshard.RNGState()})
    return expected == random.random()


def load_on_one_rank(path: str) -> tuple[object, ...]:
    state = make_state(-1, key=1)
    try:
        anyshard.load(path, state)
    except anyshard.StateMismatch as error:
        found = [(difference.kind, difference.address) for difference in error.differences]
    anyshard.load(path, state, options=anyshard.LoadOptions(exclude=("rng",)))
    return found, read(state)


def test_each_rank_gets_its_own_back(worlds, tmp_path: Path) -> None:
    """Loader, its tensors, and random numbers, each that of the same rank."""
    own = [(True, (rank, [rank, rank + 1, rank + 2], 3)) for rank in range(2)]
    assert own == worlds(2).run(save_and_load, str(tmp_path / "a"))


def test_a_key_takes_values_to_other_ranks(worlds, tmp_path: Path) -> None:
    """To another rank of as many, and to another number of ranks, where random state that may not go there is left out."""
    path = str(tmp_path / "a")
    worlds(2).run(save_and_load, path)
    assert [(1, [1, 2, 3], 3), (0, [0, 1, 2], 3)] == worlds(2).run(load_with_keys_swapped, path)
    assert ([("rank", "rng")], (1, [1, 2, 3], 3)) == load_on_one_rank(path)


def test_random_state_is_loaded_without_the_model(worlds, tmp_path: Path) -> None:
    """The mesh of the model that lay beside it is not asked for (review C14)."""
    assert [True] * 2 == worlds(2).run(load_random_state_alone, str(tmp_path / "a"))


def test_an_open_checkpoint_shows_where_they_are(worlds, tmp_path: Path) -> None:
    """Offline, each rank's tensors are there under their addresses."""
    worlds(2).run(save_and_load, str(tmp_path / "a"))
    with anyshard.open(tmp_path / "a") as checkpoint:
        assert {"loader": PerRankMark("data/loader"), "epoch": 3} == checkpoint.values("data")
        assert [1, 2, 3] == checkpoint["data/loader/order/~r1"].numpy().tolist()


def make_loader(position: int) -> dict[str, Any]:
    return {"loader": anyshard.PerRank(Loader(position), key="of all")}


def save_with_one_key(path: str) -> tuple[str, str, list[object]]:
    """Ranks that say to be replicas and are not: what the first save says, and a later one that is not the first."""
    rank = dist.get_rank()
    try:
        anyshard.save(f"{path}/refused", make_loader(rank))
    except anyshard.InvalidAppState as error:
        refused = str(error)
    equal = anyshard.save(f"{path}/equal", make_loader(5))
    later = anyshard.save(f"{path}/later", make_loader(rank))
    return refused, str(equal.differing_values), list(later.differing_values)


def test_ranks_with_equal_keys_must_have_equal_values(worlds: Worlds, tmp_path: Path) -> None:
    """Values and tensors of ranks with one key are compared: an error at the first save, a line in the report at later ones."""
    for refused, equal, later in worlds(2).run(save_with_one_key, str(tmp_path)):
        assert "loader: one value on rank 0, another on rank 1" in refused
        assert ("()", ["loader"]) == (equal, later)


def test_the_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of docs/random-state.md, in an empty directory."""
    text = (Path(__file__).parents[2] / "docs/random-state.md").read_text(encoding="ascii")
    example = text.partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    before = torch.get_rng_state()
    exec(compile(example, "docs/random-state.md", "exec"), {})
    torch.set_rng_state(before)
    assert ["step_1"] == [path.name for path in (tmp_path / "runs/a").iterdir()]
