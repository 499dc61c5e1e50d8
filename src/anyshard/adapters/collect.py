"""Collects the leaves of an app state that become extents: tensors, large NumPy arrays, large byte strings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from anyshard.adapters.overlaps import find_common_runs, find_overlaps, make_place, overlaps_itself
from anyshard.adapters.recognise import holds
from anyshard.adapters.tensors import (
    MAX_NDIM,
    array_bits,
    dtype_name,
    identity,
    inner_tensors,
    is_flattened,
    source_of,
    synchronise,
)
from anyshard.errors import InvalidAppState, UnsupportedValue
from anyshard.records.addresses import join_address, section_of, show
from anyshard.records.arrays import numpy_dtype
from anyshard.records.captured import Captured
from anyshard.records.dtypes import DTYPES
from anyshard.records.handles import ArraySource, Source
from anyshard.records.tables import make_tensor_table, whole_shards
from anyshard.records.values import LARGE_VALUE_NBYTES, TensorMark, map_leaves

_SHOWN = 8  # pairs of tensors that share memory


@dataclass(frozen=True, slots=True)
class _Leaf:
    dtype: str
    shape: tuple[int, ...]
    source: Source


def is_stored_leaf(value: object) -> bool:
    """Whether a value is stored as an extent of its own, with a mark in the tree; a mark itself counts, to be refused."""
    if isinstance(value, (torch.Tensor, TensorMark)):
        return True
    if type(value) is np.ndarray:
        return value.nbytes >= LARGE_VALUE_NBYTES
    return type(value) is bytes and len(value) >= LARGE_VALUE_NBYTES


@final
class Collector:
    """Takes leaves by address and gives back the marks that stand for them; `finish` makes the tables."""

    def __init__(self) -> None:
        self._leaves: dict[str, _Leaf] = {}
        # The tensors are kept, else a temporary one could die and another one inherit its id.
        self._tensors: dict[tuple[str, int], tuple[torch.Tensor, list[str]]] = {}
        self._warnings: list[str] = []

    def take(self, value: object, address: str) -> object:
        """The tree of a value made of plain containers: the value itself if nothing in it is a stored leaf."""
        return map_leaves(value, self._take_leaf, address=address) if holds(value, is_stored_leaf) else value

    def warn(self, sentence: str) -> None:
        """Put a sentence into the report."""
        self._warnings.append(sentence)

    def finish(self, trees: Mapping[str, object]) -> Captured:
        """The tables of all leaves taken. Tied tensors are stored under the smallest of their addresses."""
        aliases = {
            address: names[0]
            for names in (sorted(names, key=str.encode) for _, names in self._tensors.values())
            for address in names[1:]
        }
        self._warn_of_shared_memory()
        synchronise(tensor.device for tensor, _ in self._tensors.values())
        leaves = self._leaves.values()
        table = make_tensor_table(tuple(self._leaves), [leaf.dtype for leaf in leaves], [leaf.shape for leaf in leaves], aliases)
        shards = whole_shards(table)
        sources = tuple(self._leaves[table.addresses[tensor]].source for tensor in shards.tensor)
        return Captured(shards, sources, trees, tuple(self._warnings))

    def _warn_of_shared_memory(self) -> None:
        """Say which tensors lie on memory of another one; tied ones, which are the same elements, are no such case."""
        distinct = {identity(tensor): (tensor, names[0]) for tensor, names in self._tensors.values() if tensor.numel()}
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

    def _take_leaf(self, value: object, address: str) -> object:
        if isinstance(value, torch.Tensor):
            return self._take_tensor(value, address)
        if isinstance(value, TensorMark):
            raise _refuse_mark(value, address)
        if not is_stored_leaf(value):
            return value
        if isinstance(value, np.ndarray):
            return self._add(address, _leaf_of_array(value, address), "ndarray")
        data = np.frombuffer(value, dtype=np.uint8)  # type: ignore[call-overload]
        return self._add(address, _Leaf("uint8", data.shape, ArraySource(data)), "bytes")

    def _take_tensor(self, tensor: torch.Tensor, address: str) -> object:
        if is_flattened(tensor):
            return {name: self._take_tensor(part, join_address(address, name)) for name, part in inner_tensors(tensor).items()}
        _, names = self._tensors.setdefault((section_of(address), id(tensor)), (tensor, []))
        names.append(address)
        source = source_of(tensor, address)  # first, for it refuses tensors that have no shape
        return self._add(address, _Leaf(dtype_name(tensor.dtype), tuple(tensor.shape), source), "tensor")

    def _add(self, address: str, leaf: _Leaf, kind: Any) -> TensorMark:
        if address in self._leaves:
            raise InvalidAppState(f"{show(address)}: expected one tensor with this address, found two; rename one of them")
        self._leaves[address] = leaf
        return TensorMark(address, kind)


def _refuse_mark(mark: TensorMark, address: str) -> UnsupportedValue:
    return UnsupportedValue(
        f"{show(address)}: expected data, found the mark of a {mark.kind} of another checkpoint; read it first, by "
        f"checkpoint[{show(mark.address)!r}]",
        address=address,
    )


def _leaf_of_array(array: NDArray[Any], address: str) -> _Leaf:
    name = array.dtype.name
    if name not in DTYPES or numpy_dtype(name) != array.dtype or array.ndim > MAX_NDIM:
        raise UnsupportedValue(
            f"{show(address)}: expected a numpy array of a numeric dtype in native byte order and at most {MAX_NDIM} dims, found "
            f"{array.dtype!r} and {array.ndim}; convert it with astype or reshape it",
            address=address,
        )
    return _Leaf(name, array.shape, ArraySource(array_bits(array)))
