"""Placements: which regions of a logical tensor lie in a rank's part of a DTensor, and where in it.

Torch's own answer is wrong for some uneven sizes, so regions come from our own chunking, and every answer is checked against
the local tensor. Along one dim, `Shard` placements cut from left to right, and each cuts what the ones before it left. A
`_StridedShard` cuts after those of the mesh axes to its right whose sizes make up its split factor, which is how FSDP2 shards
what tensor parallelism has cut already. What is left of the factor is a number of equal pieces, each of which is cut by itself:
then the part of a rank is several regions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product
from operator import mul
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from anyshard.errors import InvalidAppState, UnsupportedValue
from anyshard.records.addresses import show
from anyshard.records.handles import Slices
from anyshard.records.tables import IntColumn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Run: TypeAlias = tuple[int, int]  # start, stop along one dim


@dataclass(frozen=True, slots=True)
class Split:
    """How a logical tensor lies along one mesh axis: `dim` is sharded, with the split factor of torch's `_StridedShard`."""

    dim: int
    split_factor: int = 1


@dataclass(frozen=True, slots=True)
class LocalRegions:
    """The regions of a logical tensor that make up one rank's local tensor, in the C order of their places in it.

    Row i is the region `offsets[i]`, `lengths[i]` of the logical tensor; it begins at `local_offsets[i]` of the local tensor.
    """

    offsets: IntColumn
    lengths: IntColumn
    local_offsets: IntColumn
    local_shape: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.offsets)

    def slices(self, row: int) -> Slices:
        """Where one region lies in the local tensor."""
        ends = zip(self.local_offsets[row].tolist(), self.lengths[row].tolist(), strict=True)
        return tuple(slice(start, start + length) for start, length in ends)


@dataclass(frozen=True, slots=True)
class _Cut:
    """One mesh axis cutting one dim: every one of `pieces` equal pieces is chunked, and the rank takes the chunks at `index`."""

    num_chunks: int
    index: int
    pieces: int


def local_regions(
    shape: Sequence[int], placements: Sequence[Split | None], *, mesh_shape: Sequence[int], coordinate: Sequence[int] | None
) -> LocalRegions:
    """The regions of a logical tensor of `shape` on the rank at `coordinate` of a mesh; None in `placements` is a replica.

    Each region holds an element, but for a logical tensor without elements, which is one region, the whole, on every rank of
    the mesh (as a shard table has it). A rank outside the mesh (`coordinate` is None) holds none; its local shape is (0,).
    """
    if coordinate is None:
        return _make_regions([], len(shape), (0,))
    cuts: list[list[tuple[Split, int, int]]] = [[] for _ in shape]
    for split, size, index in zip(placements, mesh_shape, coordinate, strict=True):
        if split is not None:
            cuts[split.dim].append((split, size, index))
    runs = [_cut_dim(length, _order_cuts(along)) for length, along in zip(shape, cuts, strict=True)]
    local_shape = tuple(_length(along) for along in runs)
    if math.prod(shape) == 0:
        return _make_regions([[(0, length, 0) for length in shape]], len(shape), local_shape)
    return _make_regions(product(*map(_place_runs, runs)), len(shape), local_shape)


def _order_cuts(splits: Sequence[tuple[Split, int, int]]) -> list[_Cut]:
    """The cuts of one dim in the order in which they are made.

    From the last mesh axis to the first, each goes behind as many of those after it as its split factor can stand for: their
    sizes divide it. A plain shard has the factor 1, so it goes before all.
    """
    order: list[_Cut] = []
    for split, size, index in reversed(splits):
        cut_before = list(accumulate((cut.num_chunks for cut in order), mul, initial=1))
        place = max(place for place, num in enumerate(cut_before) if split.split_factor % num == 0)
        order.insert(place, _Cut(size, index, split.split_factor // cut_before[place]))
    return order


def _cut_dim(length: int, cuts: Sequence[_Cut]) -> list[Run]:
    """What is left of a dim after all cuts, as runs in rising order that do not touch."""
    runs = [(0, length)]
    for cut in cuts:
        left = _length(runs)
        ranges = [_chunk(left, cut.pieces, piece) for piece in range(cut.pieces)]
        chunks = [(start, *_chunk(stop - start, cut.num_chunks, cut.index)) for start, stop in ranges]
        runs = _merge(run for start, first, end in chunks for run in _select(runs, start + first, start + end))
    return runs


def _chunk(length: int, num_chunks: int, index: int) -> Run:
    """One chunk as `torch.chunk` makes them, with empty ones for those that it leaves out."""
    size = -(-length // num_chunks)
    return min(index * size, length), min((index + 1) * size, length)


def _length(runs: Iterable[Run]) -> int:
    return sum(stop - start for start, stop in runs)


def _select(runs: Sequence[Run], first: int, end: int) -> list[Run]:
    """The elements [first, end) of the runs laid end to end."""
    selected, position = [], 0
    for start, stop in runs:
        low, high = max(start, start + first - position), min(stop, start + end - position)
        if low < high:
            selected.append((low, high))
        position += stop - start
    return selected


def _merge(runs: Iterable[Run]) -> list[Run]:
    merged: list[Run] = []
    for start, stop in runs:
        if merged and merged[-1][1] == start:
            start = merged.pop()[0]  # noqa: PLW2901 - the run now begins where the one it continues began
        merged.append((start, stop))
    return merged


def _place_runs(runs: Sequence[Run]) -> list[tuple[int, int, int]]:
    """Offset, length and local offset of each run of one dim."""
    begins = accumulate((stop - start for start, stop in runs), initial=0)
    return [(start, stop - start, begin) for (start, stop), begin in zip(runs, begins, strict=False)]


def _make_regions(rows: Iterable[Sequence[tuple[int, int, int]]], ndim: int, local_shape: tuple[int, ...]) -> LocalRegions:
    listed = list(rows)
    columns = np.array(listed, dtype=np.int64).reshape(len(listed), ndim, 3)
    return LocalRegions(columns[:, :, 0], columns[:, :, 1], columns[:, :, 2], local_shape)


def regions_of(tensor: DTensor, address: str) -> LocalRegions:
    """The regions that this rank's local tensor holds, checked against its shape.

    Raises `UnsupportedValue` for a placement that is neither sharded nor replicated, `InvalidAppState` if the local tensor is
    not of the shape that its placements give, or its mesh not in the order of ranks: its elements are not where they say.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    splits = [_read_placement(placement, tensor, address) for placement in placements]
    coordinate = mesh.get_coordinate()
    if coordinate is not None:
        _check_order(tensor, coordinate, address)
    here = None if coordinate is None else tuple(coordinate)
    regions = _find_regions(tuple(tensor.shape), tuple(splits), mesh_shape=tuple(mesh.shape), coordinate=here)
    with torch.no_grad():  # else the local tensor is a new node of the autograd graph
        found = tuple(tensor.to_local().shape)
    if found != regions.local_shape:
        raise InvalidAppState(
            f"{show(address)}: expected a local tensor of shape {regions.local_shape} at coordinate {coordinate} of {mesh}, for "
            f"global shape {tuple(tensor.shape)} and placements {placements}; found {found}; make it with distribute_tensor "
            "(uneven sizes: with plain Shard placements) or fully_shard"
        )
    return regions


# Models repeat few shapes, and each parameter has optimizer state of its own shape beside it.
_find_regions = lru_cache(maxsize=1024)(local_regions)


def is_sharded(tensor: DTensor) -> bool:
    """Whether the elements of a DTensor are spread over ranks; the same on each of them, whatever part it has."""
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return any(size > 1 and not placement.is_replicate() for placement, size in sizes)


def _check_order(tensor: DTensor, coordinate: Sequence[int], address: str) -> None:
    """Refuse a mesh whose ranks do not rise, for torch does not agree with itself there on which part a rank holds.

    FSDP2, `distribute_tensor` and `full_tensor` go by its rank in the process group of the axis, which sorts its ranks; local
    shapes, and `distribute_tensor` with `src_data_rank=None`, go by its coordinate.
    """
    mesh = tensor.device_mesh
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_replicate() and mesh.get_group(axis).rank() != coordinate[axis]:
            raise InvalidAppState(
                f"{show(address)}: expected a mesh whose ranks rise along every sharded axis, found {mesh}: torch places some "
                "shards on it by rank and others by coordinate; build the mesh with its ranks in ascending order"
            )


def _read_placement(placement: Any, tensor: DTensor, address: str) -> Split | None:
    """A placement of torch as ours, known by what it has: `_StridedShard` is private and no `Shard` in every release."""
    if placement.is_replicate():
        return None
    dim = getattr(placement, "dim", None)
    if dim is None or placement.is_partial():
        raise UnsupportedValue(
            f"{show(address)}: expected a DTensor with placements Shard and Replicate, found {tensor.placements} on "
            f"{tensor.device_mesh}; redistribute it first (a partial sum is no value yet)",
            address=address,
        )
    return Split(dim % tensor.ndim, int(getattr(placement, "split_factor", 1)))
