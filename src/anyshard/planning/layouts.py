"""Layouts: how tensors would lie on the ranks of a mesh that need not exist. For rehearsals; columns of ranks, no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

import numpy as np

from anyshard.errors import InvalidOption
from anyshard.records.addresses import Globs, show
from anyshard.records.dtypes import find_dtype
from anyshard.records.tables import NOT_AN_ALIAS, IntColumn, ShardTable, TensorTable

MAX_RANKS = 1 << 20

_WHOLE = -1  # in place of a dim: this axis does not cut
_CELLS_AT_ONCE = 1 << 22  # ranks x tensors x dims, so that memory stays small
_OF_ONE_RANK = re.compile(r"(?:.*/)?~r[0-9]+")


@dataclass(frozen=True, slots=True)
class Layout:
    """A mesh, and rules by which tensors lie on it; no rank of it has to exist.

    `mesh` gives the size of each axis, outermost first. `shard` maps globs of addresses to {axis: dim}: the first glob that
    matches a tensor says which of its dims is cut along which axes, each into chunks as torch's `Shard` makes them (axes on one
    dim cut one after the other). What no glob matches is whole on every rank, and so is what has no dims.

        Layout(mesh={"fsdp": 8, "tp": 2}, shard={"**.q_proj.weight**": {"tp": 0}, "**": {"fsdp": 0}})

    Raises `InvalidOption` for a mesh that can not be, and for an axis that it does not have.
    """

    mesh: Mapping[str, int]
    shard: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(isinstance(self.mesh, Mapping) and bool(self.mesh), "mesh", "axes and their sizes, like {'fsdp': 8}", self.mesh)
        for axis, size in self.mesh.items():
            _check(type(size) is int and size > 0, f"mesh: axis {axis!r}", "a size above 0", size)
        _check(self.num_ranks <= MAX_RANKS, "mesh", f"at most {MAX_RANKS} ranks", self.num_ranks)
        _check(isinstance(self.shard, Mapping), "shard", "a mapping from globs to {axis: dim}", self.shard)
        for glob, cuts in self.shard.items():
            _check(isinstance(glob, str) and isinstance(cuts, Mapping), f"shard: {glob!r}", "{axis: dim}", cuts)
            for axis, dim in cuts.items():
                _check(axis in self.mesh, f"shard: {glob!r}", f"an axis of the mesh ({', '.join(self.mesh)})", axis)
                _check(type(dim) is int, f"shard: {glob!r}: axis {axis!r}", "the number of a dim", dim)

    @property
    def num_ranks(self) -> int:
        """How many ranks the mesh has."""
        return math.prod(self.mesh.values())

    def __str__(self) -> str:
        return " x ".join(f"{axis}={size}" for axis, size in self.mesh.items())


@final
@dataclass(frozen=True, slots=True)
class PlacedTensors:
    """Logical tensors on the ranks of a layout, which count in C order of the mesh.

    Row i is the stored tensor `rows[i]` of `tensors`; `dims[i]` has for each axis which dim of it is cut, or -1. `unmatched` are
    globs that no tensor has gone by. What single ranks have of their own is left out: no other layout says whose it is.
    """

    layout: Layout
    tensors: TensorTable
    rows: IntColumn
    dims: IntColumn
    unmatched: tuple[str, ...]

    def count_bytes(self) -> IntColumn:
        """Bytes that each rank holds."""
        kinds, ranks, number = self._find_kinds(), *self._find_coordinates()
        shapes, dims, weights = kinds[:, : self._width], kinds[:, self._width : -1], kinds[:, -1]
        step = max(1, _CELLS_AT_ONCE // max(shapes.size, 1))
        counts = [
            _cut(shapes, dims, self._sizes, ranks[first : first + step])[1].prod(axis=2) @ weights
            for first in range(0, len(ranks), step)
        ]
        return np.concatenate(counts)[number]

    def shards_of(self, rank: int) -> ShardTable:
        """The regions that one rank holds, but those without elements."""
        coordinates = np.stack(np.unravel_index([rank], self._sizes), axis=1)
        offsets, lengths = (column[0] for column in _cut(self.tensors.shapes[self.rows], self.dims, self._sizes, coordinates))
        full = np.flatnonzero((lengths > 0).all(axis=1))
        return ShardTable(self.tensors, self.rows[full], offsets[full], lengths[full])

    @property
    def _sizes(self) -> tuple[int, ...]:
        return tuple(self.layout.mesh.values())

    @property
    def _width(self) -> int:
        return int(self.tensors.shapes.shape[1])

    def _find_kinds(self) -> IntColumn:
        """Shape, dims and bytes of an element of all kinds of tensors, few in a model; the last times how many there are."""
        dtypes = self.tensors.dtypes
        itemsize = np.array([find_dtype(dtypes[row]).itemsize for row in self.rows.tolist()], dtype=np.int64)
        columns = np.column_stack([self.tensors.shapes[self.rows], self.dims, itemsize])
        kinds, counts = np.unique(columns, axis=0, return_counts=True)
        kinds[:, -1] *= counts
        return kinds

    def _find_coordinates(self) -> tuple[IntColumn, IntColumn]:
        """Coordinates of ranks that hold different parts, and for each rank the row of those that it shares."""
        coordinates = np.stack(np.unravel_index(np.arange(self.layout.num_ranks), self._sizes), axis=1)
        coordinates[:, ~(self.dims != _WHOLE).any(axis=0)] = 0
        distinct, number = np.unique(coordinates, axis=0, return_inverse=True)
        return distinct, number.reshape(-1)


def place(tensors: TensorTable, layout: Layout) -> PlacedTensors:
    """Lay tensors out by the rules of a layout. Raises `InvalidOption`, naming the tensor, for a dim that it does not have."""
    is_shared = np.array([_OF_ONE_RANK.fullmatch(address) is None for address in tensors.addresses], dtype=np.bool_)
    rows = np.flatnonzero((tensors.alias_of == NOT_AN_ALIAS) & is_shared)
    globs = [(Globs((glob,)), glob) for glob in layout.shard]
    axes = {axis: number for number, axis in enumerate(layout.mesh)}
    dims = np.full((len(rows), len(axes)), _WHOLE, dtype=np.int64)
    used = set[str]()
    for i, row in enumerate(rows.tolist()):
        address, ndim = tensors.addresses[row], int(tensors.ndims[row])
        glob = next((text for compiled, text in globs if compiled.match(address)), None)
        if glob is None:
            continue
        used.add(glob)
        for axis, dim in layout.shard[glob].items() if ndim else ():
            if not -ndim <= dim < ndim:
                raise InvalidOption(
                    f"layout {layout}: {show(address)}: expected a dim of shape {tensors.shape(row)} for axis {axis!r}, found "
                    f"{dim} (by the rule {glob!r}); put a rule for this tensor before it"
                )
            dims[i, axes[axis]] = dim % ndim
    return PlacedTensors(layout, tensors, rows, dims, tuple(glob for glob in layout.shard if glob not in used))


def _cut(shapes: IntColumn, dims: IntColumn, sizes: tuple[int, ...], coordinates: IntColumn) -> tuple[IntColumn, IntColumn]:
    """Offsets and lengths of all tensors on all ranks, the ranks given by their coordinates: (rank, tensor, dim)."""
    lengths = np.repeat(shapes[None], len(coordinates), axis=0)
    offsets = np.zeros_like(lengths)
    for axis, size in enumerate(sizes):
        rows = np.flatnonzero(dims[:, axis] != _WHOLE)
        dim, left = dims[rows, axis], lengths[:, rows, dims[rows, axis]]
        chunk = -(-left // size)
        start = np.minimum(chunk * coordinates[:, axis, None], left)
        offsets[:, rows, dim] += start
        lengths[:, rows, dim] = np.minimum(start + chunk, left) - start
    return offsets, lengths


def _check(is_fine: bool, where: str, expected: str, found: object) -> None:  # noqa: FBT001 - the verdict, not a mode
    if not is_fine:
        raise InvalidOption(f"layout: {where}: expected {expected}, found {found!r}")
