"""Cases of DTensors: strided shards, meshes of two dims, ties, scalars, views. Each test is named after its row in cases.md."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

import anyshard
from anyshard.testing.fill import assert_same_bytes, fill, full_bytes
from anyshard.testing.layouts import make_mesh, make_optimizer
from anyshard.testing.world import Worlds
from tests.cases.jobs import Job, bits, error_of, filled, load_job, save_job, shard

pytestmark = pytest.mark.slow


def two_halves(whole: torch.Tensor, num_ranks: int) -> DTensor:
    """A gate-and-up weight [W; V]: each rank holds its rows of W and its rows of V."""
    parts = [half.chunk(num_ranks)[dist.get_rank()] for half in whole.chunk(2)]
    placement = _StridedShard(0, split_factor=2)
    mesh = make_mesh(("tp", num_ranks))
    return DTensor.from_local(torch.cat(parts), mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride())


def save_two_halves(place: str) -> None:
    anyshard.save(place, {"w": two_halves(filled("w", 16, 4), dist.get_world_size())})


def load_two_halves(place: str) -> tuple[bytes, bytes]:
    """What this rank holds after a load by the same rule, and of that what it should hold."""
    live, expected = (two_halves(tensor, dist.get_world_size()) for tensor in (torch.zeros(16, 4), filled("w", 16, 4)))
    anyshard.load(place, {"w": live})
    return bits(expected.to_local()), bits(live.to_local())


def test_b086_fused_halves_are_stored_in_canonical_order(worlds: Worlds, tmp_path: Path) -> None:
    """Rows of two stacked halves, sharded on 8, are in order for a reader, and right on 4, 2 and 1 ranks."""
    worlds(8).run(save_two_halves, str(tmp_path / "a"))
    for num_ranks in (4, 2):
        for expected, found in worlds(num_ranks).run(load_two_halves, str(tmp_path / "a")):
            assert expected == found
    live = torch.zeros(16, 4)
    anyshard.load(tmp_path / "a", {"w": live})
    assert bits(filled("w", 16, 4)) == bits(live)


def save_tp_within_ddp(place: str) -> tuple[str, str]:
    """Save a tensor-parallel weight that is replicated over two ranks, with each group; the error of the data group."""
    mesh = make_mesh(("dp", 2), ("tp", 2))
    model = nn.Linear(3, 7)
    fill(model.weight, "weight")
    fill(model.bias, "bias")
    parallelize_module(model, mesh["tp"], ColwiseParallel(), src_data_rank=None)
    state = {"model": model}
    anyshard.save(f"{place}/all", state)
    anyshard.save(f"{place}/tp{mesh.get_local_rank('dp')}", state, group=mesh.get_group("tp"))
    data = f"{place}/dp{mesh.get_local_rank('tp')}"
    return error_of(lambda: anyshard.save(data, state, group=mesh.get_group("dp")))


def test_b088_a_group_that_lacks_pieces_is_refused(worlds: Worlds, tmp_path: Path) -> None:
    """All ranks, or one tensor-parallel group, save the whole model; the data group holds half of it, and is told which."""
    missing = ["hole at (4,) of lengths (3,)", "hole at (0,) of lengths (4,)"] * 2
    for hole, (name, message) in zip(missing, worlds(4).run(save_tp_within_ddp, str(tmp_path)), strict=True):
        assert ("InvalidAppState", True) == (name, "model/bias (7,): " in message and hole in message), message
    for group in ("all", "tp0", "tp1"):
        with anyshard.open(tmp_path / group) as checkpoint:
            found = {name: checkpoint[f"model/{name}"][...].tobytes() for name in ("weight", "bias")}
        assert_same_bytes({"weight": bits(filled("weight", 7, 3)), "bias": bits(filled("bias", 7))}, found)


class Mixed(nn.Module):
    """Two layers of which one may be tensor-parallel."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.parallel = nn.Linear(5, 7), nn.Linear(7, 6)


def make_mixed(layout: str) -> Job:
    model = Mixed()
    mesh = make_mesh(("dp", 2), ("tp", 2)) if layout == "both" else None
    if layout in ("tp", "both"):
        parallelize_module(
            model, mesh["tp"] if mesh else make_mesh(("tp", 2)), {"parallel": ColwiseParallel()}, src_data_rank=None
        )
    if layout in ("fsdp", "both"):
        fully_shard(model, mesh=mesh["dp"] if mesh else make_mesh(("dp", dist.get_world_size())))
    return model, make_optimizer(model)


def save_mixed(place: str, layout: str) -> dict[str, bytes]:
    return save_job(place, *make_mixed(layout))


def load_mixed(place: str, layout: str) -> dict[str, bytes]:
    return load_job(place, *make_mixed(layout))


def test_b089_one_tensor_parallel_layer_among_fsdp(worlds: Worlds, tmp_path: Path) -> None:
    """Meshes of one and of two dims in one model load, optimizer included, under either parallelism alone."""
    expected = worlds(4).run(save_mixed, str(tmp_path / "a"), "both")[0]
    for size, layout in ((2, "tp"), (2, "fsdp"), (4, "fsdp"), (4, "both")):
        for found in worlds(size).run(load_mixed, str(tmp_path / "a"), layout):
            assert_same_bytes(expected, found)


def make_hybrid() -> nn.Module:
    return fully_shard(nn.Linear(4, 4), mesh=make_mesh(("replicate", 2), ("shard", 2)))


def save_hybrid(place: str, is_equal: bool) -> dict[str, bytes]:
    """Save HSDP of 2 x 2, whose second replica may have other weights; what was saved."""
    model = make_hybrid()
    for name, param in model.named_parameters():
        fill(param, name if is_equal or dist.get_rank() < 2 else f"other {name}")
    anyshard.save(place, {"model": model})
    return full_bytes(dict(model.named_parameters()))


def load_hybrid(place: str) -> dict[str, bytes]:
    model = make_hybrid()
    anyshard.load(place, {"model": model})
    return full_bytes(dict(model.named_parameters()))


def fail_to_save_hybrid(place: str) -> tuple[str, str]:
    return error_of(lambda: save_hybrid(place, False))


def test_b090_hybrid_replicas_are_exact_or_refused(worlds: Worlds, tmp_path: Path) -> None:
    """Equal replicas come back bit for bit; unequal ones are refused at the save, with addresses and ranks."""
    expected = worlds(4).run(save_hybrid, str(tmp_path / "a"), True)
    assert expected == worlds(4).run(load_hybrid, str(tmp_path / "a"))
    for name, message in worlds(4).run(fail_to_save_hybrid, str(tmp_path / "b")):
        assert "InvalidAppState" == name
        assert [True] * 2 == [f"model/{param}" in message for param in ("weight", "bias")]
    assert not list(tmp_path.glob("b/manifest*"))


def reach_all_meshes(place: str) -> list[dict[str, bytes]]:
    """Save under one shape of mesh, load under every shape."""
    meshes = [make_mesh(("replicate", num), ("shard", 4 // num)) for num in (1, 2, 4)]
    loaded = []
    for mesh in meshes:
        place_here = f"{place}/{mesh.shape}"
        anyshard.save(place_here, {"w": shard(filled("w", 7, 3), mesh, Replicate(), Shard(0))})
        for other in meshes:
            live = shard(torch.zeros(7, 3), other, Replicate(), Shard(0))
            anyshard.load(place_here, {"w": live})
            loaded.append(full_bytes({"w": live}))
    return loaded


def test_b026_every_shape_of_mesh(worlds: Worlds, tmp_path: Path) -> None:
    """With 1 x 4, 2 x 2 and 4 x 1 replicas and shards every rank finishes with its shard."""
    assert [[{"w": bits(filled("w", 7, 3))}] * 9] * 4 == worlds(4).run(reach_all_meshes, str(tmp_path))


def make_tied() -> nn.Module:
    """An embedding tied to the output layer, two untied layers; sharded."""
    layers = {
        "embedding": nn.Embedding(7, 4),
        "output": nn.Linear(4, 7, bias=False),
        "one": nn.Linear(4, 4),
        "two": nn.Linear(4, 4),
    }
    model = nn.Sequential(OrderedDict(layers))
    model.output.weight = model.embedding.weight
    return fully_shard(model, mesh=make_mesh(("dp", 2)))


def save_tied(place: str) -> None:
    model = make_tied()
    for name, param in model.named_parameters():
        fill(param, name)
    anyshard.save(place, {"model": model})


def load_tied(place: str) -> tuple[dict[str, bytes], bool]:
    model = make_tied()
    anyshard.load(place, {"model": model})
    return full_bytes(dict(model.named_parameters())), model.output.weight is model.embedding.weight


def test_b066_sharded_ties_are_recorded(worlds: Worlds, tmp_path: Path) -> None:
    """Offline both names give equal data, the tie is recorded and no other; on ranks it comes back tied."""
    worlds(2).run(save_tied, str(tmp_path / "a"))
    with anyshard.open(tmp_path / "a") as checkpoint:
        ties = {address: checkpoint[address].tied_to for address in checkpoint if checkpoint[address].tied_to}
        assert {"model/output.weight": "model/embedding.weight"} == ties
        whole = {address.removeprefix("model/"): checkpoint[address][...].tobytes() for address in checkpoint}
    assert bits(filled("embedding.weight", 7, 4)) == whole["embedding.weight"] == whole.pop("output.weight")
    assert [(whole, True)] * 2 == worlds(2).run(load_tied, str(tmp_path / "a"))


def make_scaled() -> Job:
    """FSDP2 with a parameter without dims, which FSDP2 leaves alone."""
    model = nn.ParameterDict({"scale": nn.Parameter(torch.tensor(1.0)), "weight": nn.Parameter(torch.ones(5, 3))})
    fully_shard(model, mesh=make_mesh(("dp", 2)), ignored_params={model["scale"]})
    return model, torch.optim.AdamW(model.parameters(), foreach=False)


def save_scaled(place: str) -> dict[str, bytes]:
    return save_job(place, *make_scaled())


def load_scaled(place: str) -> dict[str, bytes]:
    return load_job(place, *make_scaled())


def test_b017_b077_scalar_parameters_under_fsdp(worlds: Worlds, tmp_path: Path) -> None:
    """By default calls a parameter of shape () and its moments come back under FSDP2, and keep that shape."""
    expected = worlds(2).run(save_scaled, str(tmp_path / "a"))
    assert expected == worlds(2).run(load_scaled, str(tmp_path / "a"))
    with anyshard.open(tmp_path / "a") as checkpoint:
        assert () == checkpoint["model/scale"].shape == checkpoint["optimizer/state/scale/exp_avg"].shape


def save_transposed(place: str) -> bool:
    """Save a row-parallel weight whose local part is a transposed view; whether it is contiguous."""
    whole, mesh = filled("w", 6, 8), make_mesh(("tp", 2))
    local = whole.t().contiguous().chunk(2)[dist.get_rank()].t()
    live = DTensor.from_local(local, mesh, [Shard(1)], run_check=False, shape=whole.shape, stride=(1, 6))
    anyshard.save(place, {"w": live})
    live.to_local().zero_()
    anyshard.load(place, {"w": live})
    assert bits(whole) == full_bytes({"w": live})["w"]
    return local.is_contiguous()


def test_b079_transposed_row_parallel_weight(worlds: Worlds, tmp_path: Path) -> None:
    """A weight that lies transposed in memory is stored in C order, and loaded into such memory."""
    assert [False] * 2 == worlds(2).run(save_transposed, str(tmp_path / "a"))
    with anyshard.open(tmp_path / "a") as checkpoint:
        assert bits(filled("w", 6, 8)) == checkpoint["w"][...].tobytes()


def make_blocks(kind: str) -> Job:
    """A small model in a kind of parallelism, and two groups of its parameters in an order that depends on the kind."""
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    if kind == "fsdp":
        fully_shard(model, mesh=make_mesh(("dp", dist.get_world_size())))
    layers = list(model) if kind == "ddp" else list(reversed(model))
    decayed = {"params": [layer.weight for layer in layers], "lr": 0.1, "weight_decay": 0.3}
    plain = {"params": [layer.bias for layer in layers], "lr": 0.2, "weight_decay": 0.0}
    wrapped = DistributedDataParallel(model) if kind == "ddp" else model
    return wrapped, torch.optim.AdamW([decayed, plain] if kind == "ddp" else [plain, decayed], foreach=False)


def save_blocks(place: str, kind: str) -> dict[str, bytes]:
    return save_job(place, *make_blocks(kind))


def load_blocks(place: str, kind: str) -> dict[str, bytes]:
    return load_job(place, *make_blocks(kind))


@pytest.mark.parametrize(("saved", "loaded"), [((2, "ddp"), (3, "fsdp")), ((3, "fsdp"), (2, "ddp"))], ids=["to fsdp", "to ddp"])
def test_b106_between_ddp_and_fsdp(worlds: Worlds, tmp_path: Path, saved: tuple[int, str], loaded: tuple[int, str]) -> None:
    """The optimizer moves by names, and groups in another order keep their options: the next step is equal."""
    expected = worlds(saved[0]).run(save_blocks, str(tmp_path / "a"), saved[1])[0]
    for found in worlds(loaded[0]).run(load_blocks, str(tmp_path / "a"), loaded[1]):
        assert_same_bytes(expected, found)
