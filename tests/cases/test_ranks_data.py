"""Cases of silently wrong data on many ranks: shapes, values and buffers. Each test is named after its row in cases.md."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard

import anyshard
from anyshard.testing.layouts import make_mesh
from anyshard.testing.world import Worlds
from tests.cases.jobs import bits, error_of, filled, shard

pytestmark = pytest.mark.slow


def save_six_rows(place: str) -> None:
    anyshard.save(place, {"w": shard(filled("w", 6, 4), make_mesh(("dp", 2)), Shard(0))})


def load_another_shape(place: str, shape: list[int], is_sharded: bool) -> tuple[tuple[str, str], int]:
    """The error, and how many elements of this rank's part are not what they were."""
    live = torch.zeros(shape)
    if is_sharded:
        live = shard(live, make_mesh(("dp", 2)), Shard(0))
    error = error_of(lambda: anyshard.load(place, {"w": live}))
    return error, int((live.to_local() if is_sharded else live).count_nonzero())


@pytest.mark.parametrize("is_sharded", [False, True], ids=["plain", "sharded"])
@pytest.mark.parametrize("shape", [[4, 4], [8, 4], [6, 4, 1], [4, 6]], ids=str)
def test_b002_another_shape_is_one_error_on_all_ranks(worlds: Worlds, tmp_path: Path, shape: list[int], is_sharded: bool) -> None:
    """Both ranks raise the same error with address, stored and wanted shape, and no element has changed."""
    worlds(2).run(save_six_rows, str(tmp_path / "a"))
    (one, other) = worlds(2).run(load_another_shape, str(tmp_path / "a"), shape, is_sharded)
    assert one == other
    (name, message), num_changed = one
    assert ("StateMismatch", 0) == (name, num_changed)
    assert [True] * 3 == [part in message for part in ("w: shape", "(6, 4)", str(tuple(shape)))]


def exchange_own_values(place: str) -> dict[str, Any]:
    """Save what only this rank holds, and load it."""
    own = [{"only_r0": "x"}, {"only_r1": {"a": 7, "b": [1, 2]}}][dist.get_rank()]
    anyshard.save(place, own)
    live: dict[str, Any] = dict.fromkeys(own)
    anyshard.load(place, live)
    return live


def test_b007_values_of_single_ranks(worlds: Worlds, tmp_path: Path) -> None:
    """What one rank alone holds is stored whichever rank that is, comes back there, and is read offline."""
    expected = [{"only_r0": "x"}, {"only_r1": {"a": 7, "b": [1, 2]}}]
    assert expected == worlds(2).run(exchange_own_values, str(tmp_path / "a"))
    with anyshard.open(tmp_path / "a") as checkpoint:
        assert expected == [{name: checkpoint[name]} for name in ("only_r0", "only_r1")]


class Rotary(nn.Linear):
    """A layer with a buffer that no checkpoint carries."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("angles", torch.arange(4.0), persistent=False)


def materialise_and_load(place: str) -> tuple[tuple[str, str], tuple[str, ...], bytes]:
    """The error of a load into meta tensors; then the warnings of one into poisoned memory, and the weight."""
    torch.manual_seed(0)
    anyshard.save(place, {"model": nn.Linear(4, 4)})
    with torch.device("meta"):
        model = Rotary()
    error = error_of(lambda: anyshard.load(place, {"model": model}))
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(float("nan"))
    return error, anyshard.load(place, {"model": model}).warnings, bits(model.weight)


def test_b008_buffers_that_are_not_stored_are_named(worlds: Worlds, tmp_path: Path) -> None:
    """A load into meta tensors is an error; one after materialising names, on every rank, the buffer that it did not fill."""
    for (name, message), warnings, weight in worlds(2).run(materialise_and_load, str(tmp_path / "a")):
        assert ("InvalidAppState", True) == (name, "to_empty" in message)
        assert ("model: non-persistent buffers are never stored or loaded: angles",) == warnings
        with anyshard.open(tmp_path / "a") as checkpoint:
            assert checkpoint["model/weight"][...].tobytes() == weight


def draw(num: int) -> list[float]:
    """The next numbers of torch, Python and NumPy."""
    return [*torch.rand(num).tolist(), *(random.random() for _ in range(num)), *np.random.rand(num).tolist()]  # noqa: NPY002


def repeat_draws(place: str) -> tuple[list[float], list[float]]:
    """Five draws of a stream of this rank's own after a save, and five after a load."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(dist.get_rank())
    draw(3)
    anyshard.save(place, {"rng": anyshard.RNGState()})
    expected = draw(5)
    anyshard.load(place, {"rng": anyshard.RNGState()})
    return expected, draw(5)


def test_b118_every_rank_goes_on_with_its_own_stream(worlds: Worlds, tmp_path: Path) -> None:
    """After a load each rank repeats its own draws, which are no other rank's."""
    drawn = worlds(4).run(repeat_draws, str(tmp_path / "a"))
    assert [expected for expected, _ in drawn] == [found for _, found in drawn]
    assert 4 == len({tuple(found) for _, found in drawn})
