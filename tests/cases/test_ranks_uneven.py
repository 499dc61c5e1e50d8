"""Cases of uneven shards and of other numbers of ranks. Each test is named after its row in cases.md."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import anyshard
from anyshard.testing.fill import assert_same_bytes, full_bytes
from anyshard.testing.layouts import make_mesh
from anyshard.testing.world import Worlds
from tests.cases.jobs import Job, bits, error_of, filled, load_job, save_job, shard

pytestmark = pytest.mark.slow


def make_fsdp() -> Job:
    """FSDP2 of what most numbers of ranks do not divide."""
    model = nn.Linear(5, 3)
    if dist.is_initialized():
        fully_shard(model, mesh=make_mesh(("dp", dist.get_world_size())))
    return model, torch.optim.AdamW(model.parameters(), foreach=False)


def make_zero() -> Job:
    """The whole model on every rank, and an optimizer over every so manieth parameter: some ranks have none."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model = nn.Linear(5, 3)
    return model, torch.optim.AdamW([{"params": list(model.parameters())[rank::size]}], foreach=False)


def make_vectors() -> Job:
    """Vectors of 6, 3 and 1 elements; on 4 ranks the first is cut into 2, 2, 2 and nothing."""
    model = nn.ParameterDict({f"v{size}": nn.Parameter(torch.zeros(size)) for size in (6, 3, 1)})
    if dist.is_initialized():
        fully_shard(model, mesh=make_mesh(("dp", dist.get_world_size())))
    return model, torch.optim.Adam(model.parameters(), foreach=False)


MAKERS = {"fsdp": make_fsdp, "zero": make_zero, "vectors": make_vectors}


def save_on_ranks(place: str, kind: str) -> dict[str, bytes]:
    return save_job(place, *MAKERS[kind](), steps=kind != "zero")


def load_on_ranks(place: str, kind: str) -> dict[str, bytes]:
    return load_job(place, *MAKERS[kind](), steps=kind != "zero")


@pytest.mark.parametrize("kind", ["fsdp", "zero"])
def test_b015_another_number_of_ranks(worlds: Worlds, tmp_path: Path, kind: str) -> None:
    """Saved on 4 ranks, weights and moments are equal on 6, 3, 2 and 1, and so is the next step; ZeRO-style optimizers too."""
    expected = worlds(4).run(save_on_ranks, str(tmp_path / "a"), kind)[0]
    for size in (6, 3, 2):
        assert_same_bytes(expected, worlds(size).run(load_on_ranks, str(tmp_path / "a"), kind)[0])
    assert_same_bytes(expected, load_on_ranks(str(tmp_path / "a"), kind))


def test_b080_ranks_without_a_piece(worlds: Worlds, tmp_path: Path) -> None:
    """Vectors of 6, 3 and 1 elements are equal on 4, 8, 2 and 1 ranks; ranks without a piece take part."""
    expected = worlds(4).run(save_on_ranks, str(tmp_path / "a"), "vectors")[0]
    for size in (4, 8, 2):
        assert_same_bytes(expected, worlds(size).run(load_on_ranks, str(tmp_path / "a"), "vectors")[0])
    assert_same_bytes(expected, load_on_ranks(str(tmp_path / "a"), "vectors"))


def save_experts(place: str) -> list[int]:
    """Save five stacked experts; the shape of this rank's part."""
    live = shard(filled("experts", 5, 3, 2), make_mesh(("ep", 4)), Shard(0))
    anyshard.save(place, {"experts": live})
    return list(live.to_local().shape)


def load_experts(place: str) -> dict[str, bytes]:
    live = shard(torch.zeros(5, 3, 2), make_mesh(("ep", dist.get_world_size())), Shard(0))
    anyshard.load(place, {"experts": live})
    return full_bytes({"experts": live})


def test_b082_more_ranks_than_experts(worlds: Worlds, tmp_path: Path) -> None:
    """Five experts on 4 ranks, of which one has none, come back on 4 and on 3."""
    assert [[2, 3, 2], [2, 3, 2], [1, 3, 2], [0, 3, 2]] == worlds(4).run(save_experts, str(tmp_path / "a"))
    for size in (4, 3):
        found = worlds(size).run(load_experts, str(tmp_path / "a"))
        assert [{"experts": bits(filled("experts", 5, 3, 2))}] * size == found


def save_three_of_four(place: str) -> tuple[str, str] | None:
    """Save a tensor that is cut into four from the first three ranks alone."""
    live = shard(filled("w", 8, 2), make_mesh(("dp", 4)), Shard(0))
    if dist.get_rank() == 3:
        return None
    return error_of(lambda: anyshard.save(place, {"w": live}, group=[0, 1, 2]))


def test_b084_pieces_that_miss_the_end_are_refused(worlds: Worlds, tmp_path: Path) -> None:
    """Three pieces that cover rows 0 to 5 of 8 are no tensor of 6 rows: the save says which region nobody holds."""
    errors = worlds(4).run(save_three_of_four, str(tmp_path / "a"))
    assert errors[0] == errors[1] == errors[2]
    name, message = errors[0]
    assert ("InvalidAppState", True) == (name, "w (8, 2): " in message and "hole at (6, 0) of lengths (2, 2)" in message), message
