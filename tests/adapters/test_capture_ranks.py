"""A state that is spread over ranks: what each rank holds of it, read through its sources, makes up the whole."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from anyshard.adapters.collect import Collector
from anyshard.adapters.tensors import array_bits, bits_of, identity, is_dtensor, local_tensor
from anyshard.errors import InvalidAppState, UnsupportedValue
from anyshard.testing.fill import assert_same_bytes, fill, full_bytes
from anyshard.testing.layouts import LAYOUTS, make_mesh
from anyshard.testing.training import fill_training, training_state
from anyshard.testing.world import Worlds
from tests.adapters.fake_ranks import on_each_rank
from tests.adapters.rank_parts import Box, Part, join, look, shard
from tests.adapters.test_modules import WRAPPINGS


def train(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A filled model and optimizer in a layout."""
    make_mesh.cache_clear()  # a mesh of the rank before would tell this one the wrong coordinate
    model, optimizer = LAYOUTS[name].build()
    fill_training(model, optimizer)
    return model, optimizer


@functools.cache
def look_at_layout(name: str) -> list[Part]:
    """What each rank holds of the filled state."""

    def act() -> Part:
        model, optimizer = train(name)
        return look({"model": model, "optimizer": optimizer})

    return on_each_rank(LAYOUTS[name].size, act)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_all_ranks_together_hold_the_whole_state(name: str) -> None:
    """In every layout the regions tile every tensor evenly, and their bytes are those of the state on one rank."""
    expected = training_state(*train("plain"))
    parts = look_at_layout(name)
    shapes = {address: tuple(tensor.shape) for address, tensor in expected.items()}
    assert [shapes] * len(parts) == [part.shapes for part in parts]
    assert_same_bytes(full_bytes(expected), {address: join(parts, address, tensor) for address, tensor in expected.items()})


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_trees_are_the_same_in_every_layout(name: str) -> None:
    """What stands in the place of a tensor does not tell how it is laid out: every rank has trees and buffers of one process."""
    (plain,) = look_at_layout("plain")
    assert [plain.captured.trees] * LAYOUTS[name].size == [part.captured.trees for part in look_at_layout(name)]
    assert [plain.captured.buffers] * LAYOUTS[name].size == [part.captured.buffers for part in look_at_layout(name)]


STRIDED: dict[str, tuple[tuple[int, ...], tuple[int, ...], list[Any]]] = {
    "one axis, two pieces": ((4,), (24, 3), [_StridedShard(0, split_factor=2)]),
    "two dims": ((2, 2), (8, 4), [_StridedShard(0, split_factor=2), _StridedShard(1, split_factor=2)]),
    "uneven pieces": ((2,), (7, 5), [_StridedShard(1, split_factor=2)]),
    "with a replica": ((2, 2), (3, 8), [_StridedShard(1, split_factor=4), Replicate()]),
}


@pytest.mark.parametrize("case", STRIDED)
def test_several_regions_of_one_rank_are_rows_in_the_order_of_the_whole(case: str) -> None:
    """A strided shard gives a row for each of its regions, and the bytes of each are where they belong."""
    mesh_shape, shape, placements = STRIDED[case]

    def act() -> Part:
        tensor = distribute_tensor(torch.zeros(shape), init_device_mesh("cpu", mesh_shape), placements, src_data_rank=None)
        fill(tensor, "w")
        return look({"w": tensor})

    whole = torch.zeros(shape)
    fill(whole, "w")
    parts = on_each_rank(math.prod(mesh_shape), act)
    assert all(len(part.regions["w"]) > 1 for part in parts)
    assert full_bytes({"w": whole}) == {"w": join(parts, "w", whole)}


def test_ranks_without_a_region_still_list_the_tensor() -> None:
    """More ranks than rows, or a rank outside the mesh: no row and no source, but the logical tensor is in the table."""

    def act() -> tuple[dict[str, tuple[int, ...]], list[int]]:
        part = look({"few": shard((1, 2)), "outside": shard((4, 2), DeviceMesh("cpu", [0, 1]))})
        assert len(part.captured.sources) == len(part.captured.shards)
        return dict(part.shapes), [len(regions) for regions in part.regions.values()]

    shapes = {"few": (1, 2), "outside": (4, 2)}
    assert [(shapes, [1, 1]), (shapes, [0, 1]), (shapes, [0, 0])] == on_each_rank(3, act)


def test_a_tensor_without_elements_is_one_whole_row_within_its_mesh() -> None:
    """As a plain one is, whatever part of nothing a rank has; a rank outside the mesh has no row."""
    found = on_each_rank(3, lambda: look({"x": shard((3, 0), DeviceMesh("cpu", [0, 1]))}).regions["x"])
    whole = {((0, 0), (3, 0)): b""}
    assert [whole, whole, {}] == found


@pytest.mark.parametrize("num_rows", [1, 4])
def test_tied_dtensors_are_stored_once_on_every_rank(num_rows: int) -> None:
    """One DTensor under two names has an alias, on ranks that hold nothing of it too."""

    def act() -> tuple[dict[str, str], int]:
        tensor = shard((num_rows, 2))
        part = look({"s": {"b": tensor, "a": tensor}})
        return dict(part.aliases), len(part.regions["s/b"])

    assert [({"s/b": "s/a"}, 0)] * 2 == on_each_rank(2, act)


def test_dtensors_on_one_memory_are_reported_unless_they_are_the_same() -> None:
    """The same part of the same whole is one tensor whichever object it is seen through; other overlaps are warned of."""

    def act() -> list[bool]:
        tensor = shard((4, 2))
        local, mesh = tensor.to_local(), tensor.device_mesh
        same, other = DTensor.from_local(local, mesh, [Shard(0)]), DTensor.from_local(local, mesh, [Replicate()])
        assert identity(tensor) == identity(same) != identity(other)
        assert ((), ()) == (
            look({"a": tensor, "b": same}).captured.warnings,
            look({"a": tensor, "b": shard((4, 2))}).captured.warnings,
        )
        return ["a and b: share memory" in warning for warning in look({"a": tensor, "b": other}).captured.warnings]

    assert [[True]] * 2 == on_each_rank(2, act)


def _make_meta() -> DTensor:
    return DTensor.from_local(torch.empty(2, device="meta"), init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False)


def _make_freed() -> DTensor:
    tensor = shard((4,))
    tensor.to_local().untyped_storage().resize_(0)
    return tensor


class _Wrapped(torch.Tensor):
    """A subclass with no bytes of its own, as low-precision weights are."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, _types: Any, _args: Any = (), _kwargs: Any = None) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, (2,))


def _make_wrapped() -> DTensor:
    local = torch.Tensor._make_wrapper_subclass(_Wrapped, (2,))
    return DTensor.from_local(local, init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False)


def _make_partial() -> DTensor:
    return DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Partial()])


REFUSED: dict[str, tuple[Callable[[], DTensor], type[Exception], str]] = {
    "meta": (_make_meta, InvalidAppState, "to_empty"),
    "freed": (_make_freed, InvalidAppState, "freed"),
    "wrapped": (_make_wrapped, UnsupportedValue, "subclass without bytes"),
    "partial": (_make_partial, UnsupportedValue, "redistribute"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_dtensors_without_plain_local_bytes_are_refused_by_address(kind: str) -> None:
    """Local tensors are held to the same rules as plain ones, and a partial sum is no value."""
    make, error, word = REFUSED[kind]

    def act() -> None:
        with pytest.raises(error, match=f"s/bad: .*{word}"):
            look({"s": {"bad": make()}})

    on_each_rank(2, act)


def test_tensors_of_a_running_collective_are_waited_for() -> None:
    """What an asynchronous collective returns is one plain tensor, be it in the app state or within a DTensor."""

    def act() -> list[tuple[type, int]]:
        plain = AsyncCollectiveTensor(torch.ones(4))
        tensors = {"d": DTensor.from_local(plain, init_device_mesh("cpu", (2,)), [Shard(0)]), "p": plain}
        assert AsyncCollectiveTensor is type(plain) is type(tensors["d"].to_local())
        assert {"d": (8,), "p": (4,)} == look(tensors).shapes
        return [type(local_tensor(tensor, "x")) for tensor in tensors.values()]

    assert [[torch.Tensor] * 2] * 2 == on_each_rank(2, act)


def test_meshes_give_their_named_axes() -> None:
    """Axes of sub-meshes count as their own, unnamed ones do not count, and of two sizes the larger one stands."""

    def act() -> Mapping[str, int]:
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        other = init_device_mesh("cpu", (2, 4), mesh_dim_names=("ep", "tp"))
        tensors = [shard((8,), mesh["dp"]), shard((8,), mesh["tp"]), shard((8,), other["tp"]), shard((8,))]
        return look({"x": tensors, "y": torch.ones(3)}).captured.mesh

    assert [{"dp": 4, "tp": 4}] * 8 == on_each_rank(8, act)


@pytest.mark.parametrize("wrapping", ["plain", "parallel of compiled"])
def test_buffers_are_told_from_parameters(wrapping: str) -> None:
    """The addresses of buffers are found through wrappers; what is not persistent is not stored and not named."""
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    module.register_buffer("cache", torch.zeros(2), persistent=False)
    expected = {f"m/0.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert expected == look({"m": WRAPPINGS[wrapping](module), "x": torch.zeros(1)}).captured.buffers


def test_values_of_one_rank_have_addresses_of_their_own() -> None:
    """Each leaf of a per-rank value ends in the rank, and is tied to nothing outside of it."""
    shared, collector = torch.ones(2), Collector()
    tree: Any = collector.take({"a": shared, "b": [np.zeros(100_000), b"x" * 100_000], "c": shared}, "s/own", rank=3)
    whole = collector.take(shared, "s/whole")
    table = collector.finish({"s": [tree, whole]}).shards.tensors
    assert ("s/own/a/~r3", "s/own/b/0/~r3", "s/own/b/1/~r3", "s/own/c/~r3", "s/whole") == table.addresses
    assert [-1, -1, -1, 0, -1] == table.alias_of.tolist()
    assert "s/own/a/~r3" == tree["a"].address


class Net(nn.Module):
    """Two layers that FSDP2 shards apart, and the root with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.scale = nn.Parameter(torch.ones(6, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.inner:
            x = layer(x).relu()
        return x @ self.scale


def make_net(*, reshard: bool) -> tuple[Net, torch.optim.Optimizer]:
    """A sharded and filled net."""
    model = Net()
    mesh = make_mesh(("dp", dist.get_world_size()))
    for layer in model.inner:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    fill_training(model, optimizer)
    return model, optimizer


def capture_after_forward(moment: str, reshard: bool) -> tuple[dict[str, dict[Box, bytes]], list[bytes]]:
    """What is captured at a moment of training, and the gradients that come out afterwards."""
    model, optimizer = make_net(reshard=reshard)
    regions: dict[str, dict[Box, bytes]] = {}
    for now in ("idle", "after eval", "before backward"):
        with torch.set_grad_enabled(now == "before backward"):
            loss = model(torch.ones(2, 6)).sum() if now != "idle" else torch.zeros(())
        assert (now == "idle") is all(map(is_dtensor, model.parameters()))
        if now == moment:
            part = look({"model": model, "optimizer": optimizer})
            regions = {address: dict(found) for address, found in part.regions.items()}
    loss.backward()  # type: ignore[no-untyped-call]
    return regions, [
        bytes(array_bits(bits_of(local_tensor(p.grad, "g")).numpy())) for p in model.parameters() if p.grad is not None
    ]


@pytest.mark.slow
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("moment", ["after eval", "before backward"])
def test_a_save_may_come_between_forward_and_backward(worlds: Worlds, moment: str, *, reshard: bool) -> None:
    """FSDP2 shows whole parameters then; the sharded ones are taken, by their names, and backward goes on as if nothing was."""
    expected = worlds(2).run(capture_after_forward, "idle", reshard)
    assert 3 * 5 + 5 == len(expected[0][0])
    assert expected == worlds(2).run(capture_after_forward, moment, reshard)
