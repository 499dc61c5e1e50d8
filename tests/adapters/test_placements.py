from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import anyshard
from anyshard.adapters.placements import LocalRegions, Split, local_regions, regions_of
from tests.adapters.fake_ranks import on_each_rank

MESHES = ((8,), (4, 2), (3, 2), (2, 2, 2))
SIZES = range(41)
Placements = Sequence[Any]


def count_up(shape: Sequence[int]) -> torch.Tensor:
    """A tensor whose elements say where they are."""
    return torch.arange(math.prod(shape), dtype=torch.float64).reshape(tuple(shape))


def distribute(shape: Sequence[int], mesh: DeviceMesh, placements: Placements) -> DTensor:
    return distribute_tensor(count_up(shape), mesh, placements, src_data_rank=None)


def rebuild(tensor: DTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The local tensor put together from its regions, and how often the regions hold each element of the whole."""
    regions, whole = regions_of(tensor, "w"), count_up(tensor.shape)
    local, held = torch.full_like(tensor.to_local(), -1), torch.zeros_like(whole)
    for row in range(len(regions)):
        ends = zip(regions.offsets[row], regions.lengths[row], strict=True)
        box = tuple(slice(int(start), int(start + length)) for start, length in ends)
        if whole.numel():
            local[regions.slices(row)] = whole[box]
        held[box] += 1
    return local, held


def check_ranks(mesh_shape: Sequence[int], make: Callable[[], Sequence[DTensor]]) -> list[str]:
    """What is wrong on any rank: local tensors that regions do not rebuild, tensors that all ranks together do not tile."""
    wrong = []

    def look() -> list[torch.Tensor]:
        counts = []
        for tensor in make():
            local, held = rebuild(tensor)
            if not torch.equal(local, tensor.to_local()):
                wrong.append(f"{tuple(tensor.shape)} {tensor.placements}: {local.tolist()} != {tensor.to_local().tolist()}")
            counts.append(held)
        return counts

    for held in zip(*on_each_rank(math.prod(mesh_shape), look), strict=True):
        total = torch.stack(held).sum(0)
        if total.numel() and (total.min() != total.max() or total.min() < 1):
            wrong.append(f"{tuple(total.shape)} is held unevenly: {total.tolist()}")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
def test_regions_are_what_distribute_tensor_gives(mesh_shape: tuple[int, ...]) -> None:
    """On every mesh, for every size and every way to shard one dim, the regions rebuild each local tensor and tile the whole."""

    def make() -> list[DTensor]:
        mesh = init_device_mesh("cpu", mesh_shape)
        kinds = itertools.product((Shard(0), Replicate()), repeat=len(mesh_shape))
        return [distribute((size,), mesh, placements) for placements in kinds for size in SIZES]

    assert [] == check_ranks(mesh_shape, make)


@pytest.mark.slow
@pytest.mark.parametrize("mesh_shape", MESHES[1:], ids=str)
@pytest.mark.parametrize("shape", [(7, 5), (3, 0), (0, 4, 2), (2, 9, 3), (1, 1)], ids=str)
def test_several_dims_are_sharded_at_once(mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Placements on several dims, counted from either end, rebuild each local tensor and tile the whole."""
    dims = (None, *range(-len(shape), len(shape)))

    def make() -> list[DTensor]:
        mesh = init_device_mesh("cpu", mesh_shape)
        kinds = itertools.product(dims, repeat=len(mesh_shape))
        every_third = itertools.islice(kinds, 0, None, 3 if len(mesh_shape) == 3 else 1)
        return [distribute(shape, mesh, [Replicate() if dim is None else Shard(dim) for dim in dims]) for dims in every_third]

    assert [] == check_ranks(mesh_shape, make)


def make_fsdp(mesh_shape: tuple[int, ...], num_data: int, inner: Placements) -> list[DTensor]:
    """FSDP2 over the first `num_data` axes of a mesh (two: HSDP), of parameters that lie as `inner` on the others, if any."""
    names = tuple("abc"[: len(mesh_shape)])
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    module = nn.Module()
    for size in SIZES:
        tensor = distribute((size,), mesh[names[num_data:]], inner) if inner else count_up((size,))
        module.register_parameter(f"w{size}", nn.Parameter(tensor))
    fully_shard(module, mesh=mesh[names[:num_data]])
    return list(module.state_dict().values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh_shape", "num_data", "inner"),
    [
        ((8,), 1, []),
        ((2, 4), 2, []),
        ((4, 2), 1, [Shard(0)]),
        ((3, 2), 1, [Shard(0)]),
        ((2, 4), 1, [Shard(0)]),
        ((2, 2), 1, [Replicate()]),
        ((2, 2, 2), 2, [Shard(0)]),
        ((2, 2, 2), 1, [Shard(0), Shard(0)]),
        ((2, 2), 1, [_StridedShard(0, split_factor=2)]),
        ((3, 2), 1, [_StridedShard(0, split_factor=3)]),
    ],
    ids=str,
)
def test_regions_are_what_fsdp_gives(mesh_shape: tuple[int, ...], num_data: int, inner: Placements) -> None:
    """FSDP2 and HSDP alone, FSDP2 over TP, HSDP over it, over two axes of it, over fused weights: rebuilt and tiled."""
    assert [] == check_ranks(mesh_shape, partial(make_fsdp, mesh_shape, num_data, inner))


@pytest.mark.parametrize("split_factor", [2, 3, 5])
@pytest.mark.parametrize("mesh_shape", [(8,), (3,)], ids=str)
def test_a_lone_strided_shard_is_several_regions(mesh_shape: tuple[int, ...], split_factor: int) -> None:
    """A fused weight, sharded part by part, is rebuilt from one region per part at every size."""

    def make() -> list[DTensor]:
        mesh = init_device_mesh("cpu", mesh_shape)
        return [distribute((size, 2), mesh, [_StridedShard(0, split_factor=split_factor)]) for size in SIZES]

    assert [] == check_ranks(mesh_shape, make)


@pytest.mark.parametrize(
    ("mesh_shape", "placements"),
    [
        ((4, 2), [_StridedShard(0, split_factor=4), Shard(0)]),
        ((4, 2), [_StridedShard(0, split_factor=3), Shard(0)]),
        ((4, 2), [_StridedShard(0, split_factor=6), Shard(0)]),
        ((3, 2), [Shard(0), _StridedShard(0, split_factor=2)]),
        ((2, 2, 2), [_StridedShard(0, split_factor=8), Shard(0), Shard(0)]),
        ((2, 2, 2), [_StridedShard(0, split_factor=2), _StridedShard(0, split_factor=2), Shard(0)]),
        ((2, 2, 2), [_StridedShard(0, split_factor=4), _StridedShard(0, split_factor=2), Shard(0)]),
        ((2, 2, 2), [Shard(0), _StridedShard(0, split_factor=2), Shard(0)]),
    ],
    ids=str,
)
def test_mixed_strided_shards_agree_where_all_is_even(mesh_shape: tuple[int, ...], placements: Placements) -> None:
    """Where every cut is even the order of the cuts does not matter, so the regions are what distribute_tensor gives."""

    def make() -> list[DTensor]:
        mesh = init_device_mesh("cpu", mesh_shape)
        return [distribute((size,), mesh, placements) for size in (0, 96, 192)]

    assert [] == check_ranks(mesh_shape, make)


def test_uneven_fsdp_over_tp_has_exact_regions() -> None:
    """Nine rows on FSDP 4 x TP 2: the rank that holds no row is told so, and the one that holds row 8 is told row 8."""
    found = [
        list_runs(local_regions((9,), [Split(0, 2), Split(0)], mesh_shape=(4, 2), coordinate=(dp, tp)))
        for dp in range(4)
        for tp in range(2)
    ]
    assert [[(0, 2)], [(5, 1)], [(2, 2)], [(6, 1)], [(4, 1)], [(7, 1)], [], [(8, 1)]] == found


def list_runs(regions: LocalRegions) -> list[tuple[int, int]]:
    """Offset and length of each region of one dim."""
    return list(zip(regions.offsets[:, 0].tolist(), regions.lengths[:, 0].tolist(), strict=True))


def test_regions_of_two_strided_dims_come_in_local_order() -> None:
    """Two fused dims give a grid of regions in the C order of their places in the local tensor."""
    regions = local_regions((8, 4), [Split(0, 2), Split(1, 2)], mesh_shape=(2, 2), coordinate=(1, 0))
    assert [[2, 0], [2, 2], [6, 0], [6, 2]] == regions.offsets.tolist()
    assert [[2, 1]] * 4 == regions.lengths.tolist()
    assert [[0, 0], [0, 1], [2, 0], [2, 1]] == regions.local_offsets.tolist()
    assert (4, 2) == regions.local_shape


def test_a_scalar_is_one_region_without_dims() -> None:
    """A 0-d tensor is whole on every rank."""
    regions = local_regions((), [None], mesh_shape=(2,), coordinate=(1,))
    assert (1, (1, 0), (), ()) == (len(regions), regions.offsets.shape, regions.local_shape, regions.slices(0))


def test_a_tensor_without_elements_is_one_region() -> None:
    """It is listed whole on every rank, as a shard table has it, whatever its local shape."""
    regions = local_regions((3, 0), [Split(0)], mesh_shape=(2,), coordinate=(1,))
    assert ([[0, 0]], [[3, 0]], (1, 0)) == (regions.offsets.tolist(), regions.lengths.tolist(), regions.local_shape)


def test_a_rank_outside_the_mesh_holds_nothing() -> None:
    """Outside its mesh a DTensor has local shape (0,), and no region, be it scalar or empty."""

    def look() -> list[int]:
        mesh = DeviceMesh("cpu", [0, 2])
        tensors = [distribute((6, 2), mesh, [Shard(0)]), distribute((), mesh, [Replicate()]), distribute((0,), mesh, [Shard(0)])]
        return [len(regions_of(tensor, "w")) for tensor in tensors]

    assert [[1, 1, 1], [0, 0, 0], [1, 1, 1], [0, 0, 0]] == on_each_rank(4, look)


def test_partial_is_refused_by_address() -> None:
    """A partial sum is no value yet."""

    def look() -> str:
        tensor = DTensor.from_local(torch.ones(3), init_device_mesh("cpu", (2,)), [Partial()])
        with pytest.raises(anyshard.UnsupportedValue, match="model/w: .*partial") as caught:
            regions_of(tensor, "model/w")
        return caught.value.address

    assert ["model/w"] * 2 == on_each_rank(2, look)


def test_a_local_tensor_of_another_shape_is_refused() -> None:
    """A DTensor whose local tensor is not what its placements give is an error that names address, mesh and placements."""

    def look() -> str:
        mesh = init_device_mesh("cpu", (2,))
        tensor = DTensor.from_local(torch.ones(3), mesh, [Shard(0)], run_check=False, shape=torch.Size([4]), stride=(1,))
        with pytest.raises(anyshard.InvalidAppState) as caught:
            regions_of(tensor, "model/w")
        return str(caught.value)

    for message in on_each_rank(2, look):
        assert [] == [part for part in ("model/w", "DeviceMesh", "Shard(dim=0)", "(2,)", "(3,)") if part not in message]


def test_an_uneven_mixed_shard_of_distribute_tensor_is_refused_on_some_rank() -> None:
    """distribute_tensor and FSDP2 give uneven sizes other local tensors under equal placements; ours are those of FSDP2."""

    def look() -> bool:
        mesh = init_device_mesh("cpu", (4, 2))
        try:
            regions_of(distribute((9,), mesh, [_StridedShard(0, split_factor=2), Shard(0)]), "w")
        except anyshard.InvalidAppState:
            return True
        return False

    assert [False] * 6 + [True] * 2 == on_each_rank(8, look)


def test_columns_are_integers_even_when_empty() -> None:
    """No region is still a table of the tensor's dims."""
    regions = local_regions((5, 6), [None], mesh_shape=(1,), coordinate=None)
    assert ((0, 2), np.int64, (0,)) == (regions.offsets.shape, regions.offsets.dtype, regions.local_shape)
