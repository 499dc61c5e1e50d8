"""Collects the leaves of an app state that become extents: tensors, large NumPy arrays, large byte strings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray

from anyshard.adapters.overlaps import find_common_runs, find_overlaps, make_place, overlaps_itself
from anyshard.adapters.placements import regions_of
from anyshard.adapters.recognise import holds
from anyshard.adapters.tensors import (
    MAX_NDIM,
    array_bits,
    dtype_name,
    identity,
    inner_tensors,
    is_dtensor,
    is_flattened,
    local_tensor,
    source_of,
    synchronise,
)
from anyshard.errors import InvalidAppState, UnsupportedValue
from anyshard.records.addresses import join_address, section_of, show
from anyshard.records.arrays import numpy_dtype
from anyshard.records.captured import Captured
from anyshard.records.dtypes import DTYPES
from anyshard.records.handles import ArraySource, Source
from anyshard.records.tables import NOT_AN_ALIAS, IntColumn, ShardTable, TensorTable, make_tensor_table
from anyshard.records.values import LARGE_VALUE_NBYTES, PerRankMark, TensorMark, collect_marks, map_leaves

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_SHOWN = 8  # pairs of tensors that share memory

_Region: TypeAlias = tuple[Sequence[int], Sequence[int], Source]  # offsets, lengths, and the bytes of it


@dataclass(frozen=True, slots=True)
class Leaf:
    """A logical tensor and what this rank holds of it, in rising order of offsets."""

    dtype: str
    shape: tuple[int, ...]
    regions: Sequence[_Region]


@dataclass(frozen=True, slots=True)
class Taken:
    """A tensor that was met, the plain tensor in which its elements lie here, and its addresses."""

    tensor: torch.Tensor
    local: torch.Tensor
    addresses: list[str]


def is_stored_leaf(value: object) -> bool:
    """Whether a value is stored as an extent of its own, with a mark in the tree; a mark itself counts, to be refused."""
    if isinstance(value, (torch.Tensor, TensorMark, PerRankMark)):
        return True
    if type(value) is np.ndarray:
        return value.nbytes >= LARGE_VALUE_NBYTES
    return type(value) is bytes and len(value) >= LARGE_VALUE_NBYTES


@final
class Collector:
    """Takes leaves by address and gives back the marks that stand for them; `finish` makes the tables."""

    def __init__(self) -> None:
        self.leaves: dict[str, Leaf] = {}
        # By section, rank and id. The tensors are kept, else a temporary one could die and another one inherit its id.
        self.tensors: dict[tuple[str, int | None, int], Taken] = {}
        self._warnings: list[str] = []
        self._buffers: set[str] = set()
        self._branches: set[str] = set()

    def take(self, value: object, address: str, *, rank: int | None = None) -> object:
        """The tree of a value made of plain containers: the value itself if nothing in it is a stored leaf.

        With a rank the value is this rank's own: the addresses of its leaves end in `~r<rank>`, and it is tied to no other.
        """
        take_leaf = partial(self._take_leaf, rank=rank)
        return map_leaves(value, take_leaf, address=address) if holds(value, is_stored_leaf) else value

    def take_buffer(self, value: object, address: str) -> object:
        """Take a module's buffer, which may differ between its replicas."""
        tree = self.take(value, address)
        self._buffers.update(mark.address for mark in collect_marks(tree))
        return tree

    def branch(self, *addresses: str) -> None:
        """Note dicts of which other ranks may have other keys, that belong to the same whole."""
        self._branches.update(addresses)

    def warn(self, sentence: str) -> None:
        """Put a sentence into the report."""
        self._warnings.append(sentence)

    def finish(self, trees: Mapping[str, object]) -> Captured:
        """The tables of all leaves taken. Tied tensors are stored under the smallest of their addresses."""
        aliases = {
            address: names[0]
            for names in (sorted(taken.addresses, key=str.encode) for taken in self.tensors.values())
            for address in names[1:]
        }
        self._warn_of_shared_memory()
        synchronise(taken.local.device for taken in self.tensors.values())
        leaves = self.leaves.values()
        table = make_tensor_table(tuple(self.leaves), [leaf.dtype for leaf in leaves], [leaf.shape for leaf in leaves], aliases)
        shards, sources = self._list_regions(table)
        return Captured(
            shards,
            sources,
            trees,
            tuple(self._warnings),
            buffers=frozenset(self._buffers),
            branches=frozenset(self._branches),
        )

    def _list_regions(self, table: TensorTable) -> tuple[ShardTable, tuple[Source, ...]]:
        stored = np.flatnonzero(table.alias_of == NOT_AN_ALIAS)
        held = [self.leaves[table.addresses[tensor]].regions for tensor in stored.tolist()]
        tensor = np.repeat(stored, np.array([len(regions) for regions in held], dtype=np.int64))
        regions, width = list(chain.from_iterable(held)), table.shapes.shape[1]
        offsets = _make_columns([offsets for offsets, _, _ in regions], width, fill=0)
        lengths = _make_columns([lengths for _, lengths, _ in regions], width, fill=1)
        return ShardTable(table, tensor, offsets, lengths), tuple(source for _, _, source in regions)

    def _warn_of_shared_memory(self) -> None:
        """Say which tensors lie on memory of another one; tied ones, which are the same elements, are no such case."""
        distinct = {
            identity(taken.tensor): (taken.local, taken.addresses[0]) for taken in self.tensors.values() if taken.local.numel()
        }
        by_storage: dict[int, list[tuple[torch.Tensor, str]]] = {}
        for tensor, name in distinct.values():
            by_storage.setdefault(tensor.untyped_storage().data_ptr(), []).append((tensor, name))
            if overlaps_itself(tensor):
                self.warn(f"{show(name)}: an expanded tensor is stored in full; make it contiguous before a load into it")
        shared = (pair for pairs in by_storage.values() if len(pairs) > 1 for pair in pairs)
        overlaps = find_overlaps(make_place(name, tensor) for tensor, name in shared)
        for one, other in islice(overlaps, _SHOWN):
            advice = "; a load into such tensors needs exclude=[...]" if find_common_runs(one, other) is None else ""
            self.warn(f"{show(one.name)} and {show(other.name)}: share memory, and are stored in full each{advice}")

    def _take_leaf(self, value: object, address: str, *, rank: int | None) -> object:
        if isinstance(value, torch.Tensor):
            return self._take_tensor(value, address, rank)
        if isinstance(value, (TensorMark, PerRankMark)):
            raise _refuse_mark(value, address)
        if not is_stored_leaf(value):
            return value
        place = _place_of(address, rank)
        if isinstance(value, np.ndarray):
            return self._add(place, _leaf_of_array(value, address), "ndarray")
        data = np.frombuffer(value, dtype=np.uint8)  # type: ignore[call-overload]
        return self._add(place, _whole_leaf("uint8", data.shape, ArraySource(data)), "bytes")

    def _take_tensor(self, tensor: torch.Tensor, address: str, rank: int | None) -> object:
        if is_flattened(tensor):
            parts = inner_tensors(tensor).items()
            return {name: self._take_tensor(part, join_address(address, name), rank) for name, part in parts}
        local = local_tensor(tensor, address)  # first, for it refuses tensors that have no shape
        place = _place_of(address, rank)
        taken = self.tensors.setdefault((section_of(address), rank, id(tensor)), Taken(tensor, local, []))
        taken.addresses.append(place)
        if is_dtensor(tensor):
            return self._add(place, _leaf_of_dtensor(tensor, local, address), "tensor")
        return self._add(place, _whole_leaf(dtype_name(tensor.dtype), tuple(tensor.shape), source_of(local, address)), "tensor")

    def _add(self, address: str, leaf: Leaf, kind: Any) -> TensorMark:
        if address in self.leaves:
            raise InvalidAppState(f"{show(address)}: expected one tensor with this address, found two; rename one of them")
        self.leaves[address] = leaf
        return TensorMark(address, kind)


def _refuse_mark(mark: TensorMark | PerRankMark, address: str) -> UnsupportedValue:
    kind = mark.kind if isinstance(mark, TensorMark) else "per-rank value"
    return UnsupportedValue(
        f"{show(address)}: expected data, found the mark of a {kind} of another checkpoint; read it first, by "
        f"checkpoint[{show(mark.address)!r}]",
        address=address,
    )


def _make_columns(rows: Sequence[Sequence[int]], width: int, *, fill: int) -> IntColumn:
    padded = [[*row, *([fill] * (width - len(row)))] for row in rows]
    return np.array(padded, dtype=np.int64).reshape(len(rows), width)


def _place_of(address: str, rank: int | None) -> str:
    return address if rank is None else join_address(address, f"~r{rank}")


def _whole_leaf(dtype: str, shape: tuple[int, ...], source: Source) -> Leaf:
    return Leaf(dtype, shape, [((0,) * len(shape), shape, source)])


def _leaf_of_dtensor(tensor: DTensor, local: torch.Tensor, address: str) -> Leaf:
    regions, elements = regions_of(tensor, address), local.detach()
    sources = [source_of(elements[regions.slices(row)], address) for row in range(len(regions))]
    held = list(zip(regions.offsets.tolist(), regions.lengths.tolist(), sources, strict=True))
    return Leaf(dtype_name(tensor.dtype), tuple(tensor.shape), held)


def _leaf_of_array(array: NDArray[Any], address: str) -> Leaf:
    name = array.dtype.name
    if name not in DTYPES or numpy_dtype(name) != array.dtype or array.ndim > MAX_NDIM:
        raise UnsupportedValue(
            f"{show(address)}: expected a numpy array of a numeric dtype in native byte order and at most {MAX_NDIM} dims, found "
            f"{array.dtype!r} and {array.ndim}; convert it with astype or reshape it",
            address=address,
        )
    return _whole_leaf(name, array.shape, ArraySource(array_bits(array)))
